"""Lets tests that were written for the CPU run on the simulated device: ``pytest --device sim --schedule lazy``.

Where such a test names the CPU as the device of an engine, it gets the simulated one. Batches follow the model there,
and tensors are compared on the CPU. What holds on the CPU alone is marked ``cpu`` with the reason,
and does not run so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulated import EAGER, LAZY, Run, Schedule, at_random, first, fixed, load, running

MARK = "cpu"
FILES = {  # and how many of their tests run on the device, at least, nightly ones among them
    "wrappers": 40,
    "parity": 220,
    "engine": 130,
    "backward_updates": 60,
    "forward_updates": 50,
    "checkpoint": 130,
    "optimizers": 75,
    "bad_input": 130,
    "reference_models": 20,
}
TURNS = "in turn"
MOVER_STREAMS = 4  # it makes one for gradients, two for uploads, and one for what is settled


def schedule_of(name: str, turn: int = 0) -> Schedule:
    """Return the schedule of a name: "lazy", "eager", "first 1", "seed 3", or "in turn", of all fixed ones.

    Raises:
        ValueError: there is none of that name.
    """
    all_fixed = fixed(MOVER_STREAMS)
    if name == TURNS:
        return all_fixed[turn % len(all_fixed)]
    by_name = {schedule.name: schedule for schedule in (LAZY, EAGER)}
    found = re.fullmatch(r"(first|seed) (\d+)", name)
    if name in by_name:
        return by_name[name]
    if found is None:
        raise ValueError(f"--schedule: expected lazy, eager, 'first N', 'seed N' or 'in turn' but got {name!r}")
    return (first if found[1] == "first" else at_random)(int(found[2]))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of these files or holds on the CPU alone; let the others' engines be on the device."""
    files = {f"test_{name}.py" for name in FILES}
    out = [item for item in items if item.path.name not in files or item.get_closest_marker(MARK)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
    install()


def install() -> None:
    """Let engines that are made for the CPU compute on the simulated device, for the rest of the process."""
    import torch
    from harness import compute_on
    from torch import nn

    from offload.memory import devices
    from offload.module import refusals

    load()
    compute_on("sim")
    place, cpu = torch.device("sim", 0), torch.device("cpu")
    resolve, refuse, call = devices.resolve_device, refusals.refuse_batch, nn.Module.__call__

    def resolve_device(name: str | torch.device | None) -> torch.device:
        found = resolve(name)
        return place if found == cpu else found

    def refuse_batch(args: Any, kwargs: Any, device: torch.device) -> None:
        if device == place:
            args, kwargs = _moved((args, kwargs), place)
        refuse(args, kwargs, device)

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.device == place:
            args, kwargs = _moved((args, kwargs), place)
        return call(self, *args, **kwargs)

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def compare(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _moved((args, kwargs), cpu)
            return function(*args, **kwargs)

        return compare

    devices.resolve_device = resolve_device
    refusals.refuse_batch = refuse_batch
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    torch.equal, torch.allclose = on_cpu(torch.equal), on_cpu(torch.allclose)


def _moved(value: Any, place: Any) -> Any:
    """Return `value` with the tensors of the other device, CPU or simulated, at `place`."""
    import torch
    from torch.utils import _pytree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != place and leaf.device.type in ("cpu", "sim"):
            return leaf.to(place)
        return leaf

    return _pytree.tree_map(move, value)


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[Run]:
    """Run a test under a schedule; it fails where accesses are not ordered."""
    with running(schedule) as seen:
        yield seen
    if seen.races:
        pytest.fail(f"under {schedule.name}, nothing orders: " + "; ".join(seen.races[:5]))
