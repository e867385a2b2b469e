"""Spans in a file that Perfetto and Chrome show: the Trace Event Format.

Owns the format. Both viewers want the events of one row to follow or contain each other: lanes that do several things
at once get several rows. Next: :mod:`offload.engine` offers it to users.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from offload.replacing import replacing
from offload.spans import LANES, Recorded, Span

INCOMPLETE = "incomplete"


def write_trace(path: str | Path, recorded: Recorded, whose: str = "offload") -> None:
    """Write spans to a file, in place of what was there, all or nothing.

    Where some were forgotten, a row says until when something is missing.

    Args:
        path: of the file; its folder must exist.
        recorded: spans; times in the file begin with the earliest.
        whose: what the viewer calls the process.

    Raises:
        ConfigError: it cannot be written.
    """
    with replacing(path, "trace") as file:
        json.dump({"traceEvents": _events(recorded, whose), "displayTimeUnit": "ms"}, file)


def _events(recorded: Recorded, whose: str) -> list[dict[str, Any]]:
    """Return the rows' names, then one complete event per span; times are microseconds, exact to the nanosecond."""
    process, spans = os.getpid(), recorded.spans
    events: list[dict[str, Any]] = [_name("process_name", process, 0, name=whose)]
    start = min((span.begin for span in spans), default=0.0)
    if recorded.complete_from > start:
        spans = [Span(INCOMPLETE, "lanes lack their oldest spans", start, recorded.complete_from), *spans]
    threads = 0
    for lane in (INCOMPLETE, *LANES):
        first, rows = threads + 1, list[int]()  # per row, when it is free again, in nanoseconds
        for span in sorted((span for span in spans if span.lane == lane), key=lambda span: span.begin):
            begin, end = round((span.begin - start) * 1e9), round((span.end - start) * 1e9)
            row = next((row for row, free in enumerate(rows) if free <= begin), len(rows))
            thread = first + row
            if row == len(rows):
                rows.append(0)
                threads += 1
                events.append(_name("thread_name", process, thread, name=f"{lane} {row + 1}" if row else lane))
                events.append(_name("thread_sort_index", process, thread, sort_index=thread))
            rows[row] = end
            event = {"name": span.name, "cat": lane, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3}
            events.append(event | {"pid": process, "tid": thread, "args": {"bytes": span.size_bytes}})
    return events


def _name(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}
