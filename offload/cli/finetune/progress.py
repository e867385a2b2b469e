"""What a fine-tuning run shows while it goes on: a line per step, the links' traffic, the highest resident memory.

Knows neither models nor the engine, only their figures. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from typing import TextIO

import psutil

from offload.activations.rss import reset_high_water, status_bytes
from offload.cli.finetune.report import LinkReport, StepRecord, duration_text
from offload.sizes import short_bytes
from offload.stats import Stats

PLAIN_LINE_EVERY_S = 5.0


class Progress:
    """Shows one line per step: rewritten in place on a terminal, else a plain line every few seconds."""

    def __init__(self, stream: TextIO, *, steps: int) -> None:
        from tqdm import tqdm

        self._stream = stream
        self._steps = steps
        self._due_s = 0.0
        self._seconds = 0.0  # exponential means over the steps
        self._tokens = 0.0
        self._live = stream.isatty()
        # The rows are given because tqdm shows nothing on a terminal that says it has none.
        self._bar = tqdm(total=steps, file=stream, bar_format="{desc}", nrows=20, disable=not self._live)

    def step(self, record: StepRecord, used_bytes: Mapping[str, int], binding_link: str) -> None:
        """Show a finished step."""
        weight = 1.0 if record.step <= 2 else 0.2  # the first step warms up
        self._seconds += weight * (record.seconds - self._seconds)
        self._tokens += weight * (record.tokens - self._tokens)
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"{self._tokens / max(self._seconds, 1e-9):.0f} tokens/s",
            "  ".join(f"{tier} {short_bytes(size)}" for tier, size in used_bytes.items()),
            f"bound by {binding_link}",
        ]
        last = record.step == self._steps
        if not last:
            parts.append(f"{duration_text(self._seconds * (self._steps - record.step))} left")
        line = " | ".join(parts)
        if self._live:
            self._bar.ncols = max(20, shutil.get_terminal_size().columns - 1)
            self._bar.set_description_str(line)
        elif last or time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + PLAIN_LINE_EVERY_S
            print(line, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._bar.write(text, file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Leave the last live line standing; notes may follow."""
        self._bar.close()


class LinkMeter:
    """Adds up what the links carried between pairs of snapshots, so that evaluations are left out."""

    def __init__(self) -> None:
        self.size_bytes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(self, before: Stats, after: Stats) -> str:
        """Count what happened between two snapshots; return the link that was busy longest between them."""
        busy: dict[str, float] = {}
        for name, link in after.links.items():
            busy[name] = link.seconds - before.links[name].seconds
            self.size_bytes[name] = self.size_bytes.get(name, 0) + link.bytes - before.links[name].bytes
            self.seconds[name] = self.seconds.get(name, 0.0) + busy[name]
        return max(busy, key=busy.__getitem__)

    @property
    def binding_link(self) -> str:
        """The link that was busy longest over all."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else "compute"

    def per_step(self, steps: int) -> dict[str, LinkReport]:
        """Return means per step."""
        count = max(1, steps)
        return {name: LinkReport(self.size_bytes[name] / count, self.seconds[name] / count) for name in self.seconds}


class RssMeter:
    """Highest resident memory of this process from construction on; `baseline_bytes` is what it was then.

    The kernel's own high-water mark where it can be reset, else a sampling thread.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.baseline_bytes: int = self._process.memory_info().rss
        self._peak_bytes = self.baseline_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            reset_high_water()
        except OSError:
            self._thread = threading.Thread(target=self._sample, name="rss-meter", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        """Return the highest resident memory so far."""
        if self._thread is None:
            self._peak_bytes = max(self._peak_bytes, status_bytes("VmHWM"))
        else:
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
        return self._peak_bytes

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
