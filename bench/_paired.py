"""Sides of a comparison, each in a process of its own, that take turns; and what their pairs say."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any


class Side:
    """A process that prints ``ready``, and then a JSON list for each line that it is given."""

    def __init__(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        """Start Python with these words, in this environment or in one's own."""
        self._process = subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._read("ready")

    def ask(self, what: str) -> list[Any]:
        """Return what the process has measured."""
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._read("["))  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _read(self, beginning: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line
        raise RuntimeError("a process of the bench ended early; see its message above")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, whatever the distribution: order statistics by the sign test."""
    count, below, total = len(values), 0, 0.0
    while below < count // 2:
        total += math.comb(count, below) / 2**count
        if total > 0.025:
            break
        below += 1
    ordered = sorted(values)
    return ordered[max(below - 1, 0)], ordered[min(count - below, count - 1)]
