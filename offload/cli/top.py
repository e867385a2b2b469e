"""``offload top``: the engines of this user that run on this machine, as they are now.

Owns the options of the command, and what a screen shows. Must not import torch, so that it begins at once. Next:
:mod:`offload.seeing.published` finds and reads what engines say.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from offload.errors import ConfigError, StateError
from offload.seeing import published
from offload.seeing.drawing import seconds_text
from offload.seeing.published import Running
from offload.sizes import short_bytes

DESCRIPTION = (
    "Show the engines of this user that run on this machine: step, seconds per step, tiers against budgets, how busy "
    "each lane was since the last look, and what computing waited for. On a terminal the screen is drawn again every "
    "second; Ctrl-C leaves it. Exit code 0: an engine was shown, 1: none runs."
)
WIDE, LEAST_WIDE = 24, 4  # letters of a bar
SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("pid", type=int, nargs="?", metavar="PID", help="of one process; default: all")
    which.add_argument("--run", type=Path, metavar="FILE", help="the file of one engine, wherever it is")
    parser.add_argument("--every", type=_seconds, default=SECONDS, metavar="SECONDS", help="draw again after (1)")
    parser.add_argument("--once", action="store_true", help="show it once; so it is where output is no terminal")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, once")


def run(arguments: argparse.Namespace, stream: TextIO | None = None) -> None:
    """Show the engines that are asked for.

    Raises:
        ConfigError: a file cannot be read, or is none of an engine.
        StateError: no such engine runs.
    """
    out = sys.stdout if stream is None else stream
    engines = _asked(arguments)
    if arguments.json:
        print(json.dumps([_described(one) for one in engines], indent=1), file=out)
    elif arguments.once or not out.isatty():
        print("\n".join(screen(engines, shutil.get_terminal_size((100, 40)).columns)), file=out)
    else:
        with _screen(out), contextlib.suppress(KeyboardInterrupt):
            watch(lambda: _asked(arguments), out, every_s=arguments.every)


def watch(
    look: Callable[[], Sequence[Running]],
    out: TextIO,
    *,
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw what `look` finds again and again, until nothing runs any more, or the file that was named is gone."""
    while True:
        try:
            engines = look()
        except (ConfigError, StateError):  # who calls this has looked before
            return
        size = shutil.get_terminal_size((100, 40))
        shown = screen(engines, size.columns, size.lines - 1)
        out.write("\x1b[H" + "".join(f"{line}\x1b[K\n" for line in shown) + "\x1b[J")
        out.flush()
        sleep(every_s)


@contextlib.contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    """Have a screen of one's own: what was on the terminal is there again afterwards."""
    out.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        out.write("\x1b[?25h\x1b[?1049l")
        out.flush()


def _asked(arguments: argparse.Namespace) -> list[Running]:
    if arguments.run is not None:
        return [_of_file(arguments.run)]
    engines = published.running()
    if not engines:
        raise StateError(
            "top: expected an engine of this user that runs on this machine but found none; start one, without "
            "visible=False, or name its file with --run"
        )
    chosen = [one for one in engines if arguments.pid in (None, one.pid)]
    if not chosen:
        pids = ", ".join(str(pid) for pid in sorted({one.pid for one in engines}))
        raise StateError(f"top: expected an engine in process {arguments.pid} but found none; engines run in {pids}")
    return chosen


def _of_file(path: Path) -> Running:
    try:
        one = published.read(path)
    except OSError as error:
        raise ConfigError(f"top: expected the file of an engine but got {path}: {error.strerror}") from error
    if one is None:
        raise ConfigError(f"top: expected the file of an engine but got {path}, which is something else")
    if not published.is_running(one):
        raise StateError(f"top: expected an engine that runs but that of {path}, process {one.pid}, does not run here")
    return one


def _described(one: Running) -> dict[str, Any]:
    hidden = ("version", "start", "space")
    plain = {name: value for name, value in one.state.items() if name not in hidden}
    return {**plain, "age_seconds": _age_s(one), "file": str(one.path)}


def _age_s(one: Running) -> float:
    return max(datetime.datetime.now().timestamp() - one.written_s, 0.0)


def screen(engines: Sequence[Running], columns: int, rows: int | None = None) -> list[str]:
    """Return the lines of a screen, none of them wider than a terminal of so many columns, and no more than its rows.

    If there are more, the last one says how many are missing.
    """
    lines = [f"offload top, {datetime.datetime.now():%H:%M:%S}, engines: {len(engines)}"]
    for one in engines:
        lines += ["", *_lines(one, max(min(WIDE, columns - 55), LEAST_WIDE))]
    if rows is not None and len(lines) > rows:
        kept = max(rows - 1, 0)
        lines[kept:] = [f"... {len(lines) - kept} more lines; top PID shows one process"]
    most = max(columns, 20)
    return [line if len(line) <= most else f"{line[: most - 1]}>" for line in map(_clean, lines)]


def _lines(one: Running, wide: int) -> Iterator[str]:
    state = one.state
    rank = f", rank {state.get('rank')} of {state.get('world')}" if state.get("world", 1) > 1 else ""
    yield f"process {one.pid} ({state.get('program')}), {state.get('device')}{rank}"
    yield f"  {state.get('model')}"
    parts = [f"step {state['step']}", f"last: {state.get('phase')}"]
    for name, form in (("step_seconds", seconds_text), ("loss", _number), ("grad_norm", _number)):
        value = state.get(name)
        if isinstance(value, (int, float)):
            parts.append(f"{name.replace('_', ' ').replace('step seconds', 'a step takes')} {form(value)}")
    yield f"  {', '.join(parts)}, said {seconds_text(round(_age_s(one), 1))} ago"
    for name, tier in state["tiers"].items():
        budget = tier["budget"]
        if budget:
            used, most = short_bytes(tier["used"]), short_bytes(budget)
            sizes = f"{used:>9} of {most:>9}" if wide > LEAST_WIDE else f"{used} of {most}"
            yield f"  {name:<11} {_bar(tier['used'] / budget, wide)} {sizes}, peak {short_bytes(tier['peak'])}"
    for name, lane in state["lanes"].items():
        if lane["share"] or lane["bytes"]:
            rate = f", {lane['gb_s']:.2f} GB/s" if lane["bytes"] else ""
            percent = f"{100 * lane['share']:.0f} %"
            yield f"  {name:<11} {_bar(lane['share'], wide)} {percent:>{10 if wide > LEAST_WIDE else 5}}{rate}"
    yield f"  {_waits(state['waits'])}"


def _waits(waits: Mapping[str, float]) -> str:
    shown = [f"{name} {100 * share:.0f} %" for name, share in sorted(waits.items(), key=lambda one: -one[1]) if share]
    return f"computing waited for {', '.join(shown)}" if shown else "computing waited for nothing"


def _bar(share: float, wide: int) -> str:
    full = round(min(max(share, 0.0), 1.0) * wide)
    return f"[{'#' * full}{' ' * (wide - full)}]"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _clean(line: str) -> str:
    """Return a line without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.1 to 3600 but got {text!r}")
    return value
