"""What was counted at the ends of steps, over a whole run, in a bounded number of samples.

Owns what a sample is, what lies between two of them, and which are forgotten in a long run. Knows nothing of who
counts. Next: :mod:`offload.watching` takes samples, :mod:`offload.seeing.page` draws them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.stats import LinkStats

MOST = 512  # samples of a run


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """What was counted since the engine was made, at one moment.

    Attributes:
        time_s: of ``time.perf_counter``.
        step: optimizer steps until then, skipped ones among them.
        used_bytes: booked in each tier.
        peak_bytes: the most of that so far.
        links: bytes and busy seconds; of an accelerator's copies, those that are known to be over.
        waited: seconds that computing has waited, per what it waited for, as in ``Spans``.
        passes: seconds of ``forward`` and of ``backward``, by the device's clock where it has one, and of its own
            ``update``.
        loss: mean of those since the sample before; None where they are not known.
        grad_norm: of the last step, before clipping, if known.
    """

    time_s: float
    step: int
    used_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    links: Mapping[str, LinkStats]
    waited: Mapping[str, float]
    passes: Mapping[str, float]
    loss: float | None = None
    grad_norm: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    """What happened between two samples: the same as in :class:`Sample`, of that time alone."""

    steps: int
    seconds: float
    links: Mapping[str, LinkStats]
    waited: Mapping[str, float]
    passes: Mapping[str, float]

    @classmethod
    def of(cls, before: Sample, after: Sample) -> Between:
        """Return what the later sample has more than the earlier one."""
        nothing = LinkStats(0, 0.0)
        links = {}
        for name, link in after.links.items():
            past = before.links.get(name, nothing)
            links[name] = LinkStats(link.bytes - past.bytes, link.seconds - past.seconds)
        return cls(
            steps=after.step - before.step,
            seconds=after.time_s - before.time_s,
            links=links,
            waited=_more(before.waited, after.waited),
            passes=_more(before.passes, after.passes),
        )

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None where none has ended."""
        return self.seconds / self.steps if self.steps else None

    def share(self, seconds: float) -> float:
        """Return a part of the time, at most 1: a copy counts when it is over, wherever it began."""
        return min(seconds / self.seconds, 1.0) if self.seconds > 0 else 0.0


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}


class History:
    """The samples of a run. Where there are too many, each two neighbours become one, and new ones come half as often.

    Invariant: at most `most` samples, of steps that rise, and the first one stays.
    """

    def __init__(self, most: int = MOST) -> None:
        """Begin with nothing; keep `most` samples, at least 4."""
        assert most >= 4
        self._most = most
        self._apart = 1  # steps between two samples
        self._samples: list[Sample] = []

    @property
    def samples(self) -> Sequence[Sample]:
        """What is kept, the earliest first."""
        return tuple(self._samples)

    def wants(self, step: int) -> bool:
        """Tell whether a sample of this step would be kept."""
        return not self._samples or step - self._samples[-1].step >= self._apart

    def add(self, sample: Sample) -> None:
        """Keep a sample."""
        self._samples.append(sample)
        if len(self._samples) > self._most:
            first, rest = self._samples[0], self._samples[1:]
            pairs = zip(rest[::2], rest[1::2], strict=False)
            self._samples = [first, *(_merged(one, other) for one, other in pairs)]
            self._samples += rest[len(rest) // 2 * 2 :]
            self._apart *= 2


def _merged(earlier: Sample, later: Sample) -> Sample:
    """Return the later one, with the losses of both."""
    losses = [sample.loss for sample in (earlier, later) if sample.loss is not None]
    return dataclasses.replace(later, loss=sum(losses) / len(losses) if losses else None)
