"""``offload scale``: a step of many GPUs on paper, for clusters that are not here.

Owns the options of the command, and the table that it prints. Next: :mod:`offload.planning.scale`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offload.errors import ConfigError
from offload.planning.clusters import CLUSTERS, Cluster

if TYPE_CHECKING:
    from offload.planning.scale import Case, Step

DESCRIPTION = (
    "Tell what a step of many GPUs would take, by formulas and a simulation: where slices live, bytes and seconds of "
    "each link per GPU, what binds. Nobody has run this: no engine with several ranks has met a GPU yet. "
    "docs/scale.md has the formulas."
)
_LAYERS = ((0, 32), (50_000_000_000, 80), (300_000_000_000, 126), (700_000_000_000, 128))  # from how many parameters on
_LETTERS = {"M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([MBT])")
_MOST = 10**18  # of anything: no cluster has as much


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--cluster", default="h200", choices=tuple(CLUSTERS), help="the kind of nodes")
    parser.add_argument(
        "--gpus", type=_gpus, default=(8, 64, 512), metavar="N,N", help="how many in all, such as 8,64,512"
    )
    parser.add_argument(
        "--parameters",
        type=_parameters,
        default=tuple(map(_parameter, ("7B", "70B", "405B", "1T"))),
        metavar="N,N",
        help="of the models, such as 7B,70B,405B,1T",
    )
    parser.add_argument("--tokens", type=_positive, default=16384, metavar="N", help="of each GPU and step")
    parser.add_argument(
        "--sums", default="ranks", choices=("ranks", "nodes"), help="gradients: in rank order, or within nodes first"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> None:
    """Print the table.

    Raises:
        ConfigError: a node would be used in part, beside others.
    """
    from offload.planning.scale import Case, step_of

    cluster = CLUSTERS[arguments.cluster]
    for gpus in arguments.gpus:
        if gpus > cluster.gpus and gpus % cluster.gpus:
            raise ConfigError(
                f"gpus: expected at most {cluster.gpus}, which a node of {cluster.name} has, or a multiple of it, but "
                f"got {gpus}; name whole nodes"
            )
    cases = [
        Case(cluster, gpus, parameters, _layers(parameters), arguments.tokens, arguments.sums == "nodes")
        for parameters in arguments.parameters
        for gpus in arguments.gpus
    ]
    found = [(case, step_of(case)) for case in cases]
    if arguments.json:
        print(json.dumps([_plain(case, step) for case, step in found], indent=1))
    else:
        print("\n".join(_lines(cluster, found)))


def _plain(case: Case, step: Step | None) -> dict[str, Any]:
    """Return a row for JSON."""
    from offload.planning.scale import most_parameters

    row: dict[str, Any] = {"cluster": case.cluster.name, "gpus": case.gpus, "parameters": case.parameters}
    row |= {"layers": case.layers, "units": case.units, "tokens": case.tokens, "fits": step is not None}
    row["most_parameters"] = most_parameters(case)
    if step is not None:
        homes = {kind: {tier.value: share for tier, share in where.items()} for kind, where in step.homes.items()}
        row |= dataclasses.asdict(step) | {"homes": homes, "binding": step.binding, "efficiency": step.efficiency}
    return row


def _lines(cluster: Cluster, found: list[tuple[Case, Step | None]]) -> Iterator[str]:
    from offload.planning.scale import FLOPS, LINKS, most_parameters

    rows: list[tuple[str, ...]] = [("model", "GPUs", "homes", *LINKS, "compute", "step", "binds", "busy", "TFLOP/s")]
    for case, step in found:
        start = (_short(case.parameters), str(case.gpus))
        if step is None:
            rows.append((*start, f"does not fit: {_short(most_parameters(case))} would", *[""] * (len(rows[0]) - 3)))
            continue
        links = [_size(step.bytes[link], step.seconds[link]) for link in LINKS]
        times = (_seconds(step.seconds["compute"]), _seconds(step.step_s))
        rate = FLOPS * case.parameters * case.tokens / step.step_s / 1e12
        rows.append((*start, _homes(step), *links, *times, step.binding, f"{step.efficiency:.0%}", f"{rate:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = found[0][0]
    order = "within nodes first" if first.two_level else "in rank order"
    yield f"{cluster.name}: nodes of {cluster.gpus} GPUs, {first.tokens} tokens of each GPU and step, sums {order}"
    yield "per GPU and step: bytes and seconds of each link"
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _homes(step: Step) -> str:
    """Return where parameters, gradients and states live: the tiers of each, the fastest first."""
    letters = {"device": "d", "cpu": "c", "nvme": "n"}
    kinds = ("parameters", "gradients", "states")
    return "/".join("".join(letters[tier.value] for tier, share in step.homes[kind].items() if share) for kind in kinds)


def _layers(parameters: int) -> int:
    return [layers for least, layers in _LAYERS if parameters >= least][-1]


def _size(size: float, seconds: float) -> str:
    one, unit = next((pair for pair in ((1e12, "T"), (1e9, "G")) if size >= pair[0]), (1e6, "M"))
    return f"{size / one:.3g}{unit} {_seconds(seconds)}" if size else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g}s" if seconds < 10 else f"{seconds:.0f}s"


def _short(parameters: int) -> str:
    letter, one = next((pair for pair in reversed(_LETTERS.items()) if parameters >= pair[1]), ("M", 10**6))
    return f"{parameters / one:.3g}{letter}"


def _parameter(text: str) -> int:
    match = _NUMBER.fullmatch(text)
    parameters = float(match[1]) * _LETTERS[match[2]] if match else 0
    if not 1 <= parameters <= _MOST:
        raise argparse.ArgumentTypeError(f"expected parameters such as 7B, 70B or 1T but got {text!r}")
    return int(parameters)


def _parameters(text: str) -> tuple[int, ...]:
    return tuple(map(_parameter, text.split(",")))


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {_MOST} but got {text!r}")
    return int(text)


def _gpus(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, text.split(",")))
