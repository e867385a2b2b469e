"""Keeps an eye on one engine while it trains: the history of its steps, lines of a log, a file for who looks on.

Owns when each of them is due, so that together they cost a small share of the time, whatever a step takes. It changes
nothing, and it asks no device anything. Next: :mod:`offload.snapshot` counts, :mod:`offload.seeing` keeps and shows.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from offload.build import Parts
from offload.config import Config
from offload.life import Life
from offload.seeing.history import Between, History, Sample
from offload.seeing.published import Publisher
from offload.shards.manager import Manager
from offload.sizes import short_bytes
from offload.snapshot import take_sample
from offload.spans import CPU_ADAM, UPDATE

logger = logging.getLogger(__name__)

EVERY_STEP = 8  # steps at first, of each of which there is a sample
SAMPLED_S = 0.05  # at least between two samples later on
PUBLISHED_S = 1.0  # at least between two writes of the file


@dataclasses.dataclass(slots=True)
class _Mean:
    """The mean of numbers that come one by one."""

    total: float = 0.0
    many: int = 0

    def add(self, number: float) -> None:
        self.total += number
        self.many += 1

    @property
    def value(self) -> float | None:
        """The mean; None of no numbers."""
        return self.total / self.many if self.many else None


@dataclasses.dataclass(slots=True)
class _Run:
    """What was seen of steps that came one behind the other.

    Attributes:
        last_step: its number.
        logged: what was counted at the last line of the log; at first, when the run began.
        begun_s: when the step that comes next began: with a training pass that was seen, or where the last one ended.
        history: of samples.
        sampled_loss, logged_loss: since the last sample, and line of the log.
        loss: the last that is known.
        ended_s: when the last step did.
        step_s: that it took.
        sample_at_s: not before then is there another sample.
        published: what was counted when the file was written.
    """

    last_step: int
    logged: Sample | None
    begun_s: float | None = None
    history: History = dataclasses.field(default_factory=History)
    sampled_loss: _Mean = dataclasses.field(default_factory=_Mean)
    logged_loss: _Mean = dataclasses.field(default_factory=_Mean)
    loss: float | None = None
    ended_s: float | None = None
    step_s: float | None = None
    sample_at_s: float = 0.0
    published: Sample | None = None

    def end_step(self, step: int, now_s: float) -> None:
        """Note the end of a step."""
        self.step_s = None if self.ended_s is None else now_s - self.ended_s
        self.last_step, self.ended_s, self.begun_s = step, now_s, now_s


class Watch:
    """Sees the passes and steps of one engine. See the module's text.

    Attributes:
        title: what is trained, in words.
    """

    def __init__(self, name: str, config: Config, parts: Parts, life: Life) -> None:
        """Begin.

        Args:
            name: of the module's class.
            config: the options.
            parts: of the engine.
            life: nothing is seen unless it is open.
        """
        self.title = f"{name}: {parts.plan.headline()}"
        self._parts = parts
        self._life = life
        self._log_every = config.log_every
        self._publisher = Publisher() if config.visible else None
        self._phase = "making"
        self._publish_at_s = 0.0
        self._seen = self._another_run(time.perf_counter())
        self._publish(time.perf_counter())

    @property
    def knows_losses(self) -> bool:
        """Whether it costs nothing to look at a loss: on a device that is not the CPU, looking would wait for it."""
        return self._parts.device.addressable

    def note_loss(self, loss: float) -> None:
        """See the loss of a micro-batch."""
        self._seen.sampled_loss.add(loss)
        self._seen.logged_loss.add(loss)

    @property
    def _step_now(self) -> int:
        run = self._parts.steps.run
        return run.steps + run.skipped

    def begins(self, what: str) -> None:
        """See the beginning of a forward or backward pass, whoever calls it.

        A run begins with the first pass that trains, whatever was done before since the engine was made, an evaluation
        among it, or since a checkpoint was loaded.
        """
        if what != "backward" and not torch.is_grad_enabled():
            return
        is_another = self._step_now != self._seen.last_step
        if is_another or self._seen.begun_s is None:
            now_s = time.perf_counter()
            if is_another:
                self._seen = self._another_run(now_s)
            self._seen.begun_s, self._seen.logged = now_s, self._counted(now_s)

    def passed(self, what: str) -> None:
        """See the end of a forward or backward pass."""
        self._phase = what
        now_s = time.perf_counter()
        if self._publisher is not None and now_s >= self._publish_at_s:
            self._publish(now_s)

    def stepped(self, now_s: float) -> float | None:
        """See the end of an optimizer step, or of one that was skipped; returns when it began, if that is known."""
        self._phase = "step"
        manager, seen, step = self._life.manager, self._seen, self._step_now
        if manager is None:
            return None
        if step != seen.last_step + 1:  # a checkpoint was loaded, and gradients came without a pass
            self._seen = self._another_run(now_s)
            return None
        begun_s = seen.begun_s
        seen.end_step(step, now_s)
        sampled = seen.history.wants(step) and (now_s >= seen.sample_at_s or step <= EVERY_STEP)
        logged = self._log_every is not None and step % self._log_every == 0
        if sampled or logged:
            sample = self._sample(manager, now_s)
            if sampled:
                seen.history.add(sample)
                seen.sample_at_s = now_s + SAMPLED_S
                seen.sampled_loss = _Mean()
            if logged and seen.logged is not None:
                of_line = dataclasses.replace(sample, loss=seen.logged_loss.value)
                logger.info("%s", log_line(Between.of(seen.logged, sample), of_line))
                seen.logged, seen.logged_loss = sample, _Mean()
        if self._publisher is not None and now_s >= self._publish_at_s:
            self._publish(now_s)
        return begun_s

    def _another_run(self, now_s: float) -> _Run:
        return _Run(self._step_now, self._counted(now_s))

    def _counted(self, now_s: float) -> Sample | None:
        manager = self._life.manager
        return None if manager is None else take_sample(self._parts, manager, now_s)

    def samples(self) -> list[Sample]:
        """Return the history of the run."""
        return list(self._seen.history.samples)

    def close(self) -> None:
        """Take the file away. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()

    def _sample(self, manager: Manager, now_s: float) -> Sample:
        seen = self._seen
        loss = seen.sampled_loss.value
        seen.loss = seen.loss if loss is None else loss
        return take_sample(self._parts, manager, now_s, loss)

    def _publish(self, now_s: float) -> None:
        manager, seen = self._life.manager, self._seen
        if manager is None or self._publisher is None:
            return
        sample, before = self._sample(manager, now_s), seen.published
        between = Between.of(sample if before is None else before, sample)
        seen.published, self._publish_at_s = sample, now_s + PUBLISHED_S
        self._publisher.write(self._state(sample, between))

    def _state(self, sample: Sample, between: Between) -> Mapping[str, Any]:
        parts, seen = self._parts, self._seen
        return {
            "model": self.title,
            "device": str(parts.device.place),
            "program": os.path.basename(sys.argv[0]) if sys.argv else "",
            "rank": parts.ranks.rank,
            "world": parts.ranks.world,
            "phase": self._phase,
            "step": sample.step,
            "step_seconds": seen.step_s,
            "loss": seen.loss,
            "grad_norm": sample.grad_norm,
            "tiers": {
                tier.value: {
                    "used": sample.used_bytes[tier.value],
                    "peak": sample.peak_bytes[tier.value],
                    "budget": budget.limit_bytes,
                }
                for tier, budget in parts.budgets.items()
            },
            "seconds": between.seconds,
            "steps": between.steps,
            "lanes": {
                name: {"share": between.share(link.seconds), "bytes": link.bytes, "gb_s": link.bandwidth_gb_s}
                for name, link in between.links.items()
            },
            "waits": {what: between.share(seconds) for what, seconds in between.waited.items()},
        }


def log_line(between: Between, sample: Sample) -> str:
    """Return one line for the steps between two samples, the later of which is `sample`: milliseconds and bytes each.

    Seconds of links are those in which they were busy; they work side by side, so nothing adds up.
    """
    count = max(between.steps, 1)
    first = sample.step - count + 1
    which = f"step {sample.step}" if count == 1 else f"steps {first} to {sample.step}, each"

    def ms(seconds: float) -> str:
        return f"{seconds / count * 1e3:.1f} ms"

    here = between.links.get(CPU_ADAM)
    update_s = between.passes.get(UPDATE, 0.0) + (here.seconds if here else 0.0)  # of the device, and of the CPU
    parts = [f"{what} {ms(between.passes.get(what, 0.0))}" for what in ("forward", "backward")]
    parts.append(f"updates {ms(update_s)}")
    waits = [f"{what} {ms(seconds)}" for what, seconds in between.waited.items() if seconds]
    parts.append(f"waiting for {', '.join(waits)}" if waits else "waiting for nothing")
    for name, link in between.links.items():
        if link.bytes and name != CPU_ADAM:
            parts.append(f"{name} {ms(link.seconds)} {short_bytes(link.bytes / count)}")
    if sample.loss is not None:
        parts.append(f"loss {sample.loss:.4f}")
    if sample.grad_norm is not None:
        parts.append(f"grad norm {sample.grad_norm:.4g}")
    return f"{which} {ms(between.seconds)}: {'; '.join(parts)}"
