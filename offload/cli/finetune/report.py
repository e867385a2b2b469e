"""What a fine-tuning run reports: figures as text and JSON, the loss as a picture.

Owns the shape of the report and how it is shown. Knows neither the engine nor the model: it is handed plain
values. Next: :mod:`offload.cli.finetune.run`, which fills it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.replacing import replacing
from offload.sizes import MIB, short_bytes

RSS_HEADROOM_BYTES = 64 * MIB  # what the process may need beyond its budgets and the interpreter itself


@dataclasses.dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: number, from 1.
        loss: mean over the tokens that count.
        grad_norm: if known.
        lr: learning rate.
        seconds: wall time.
        tokens: of all its micro-batches, without padding.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    seconds: float
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """Resident memory of the process against the budgets."""

    baseline_bytes: int  # RSS with torch and transformers imported, before the model was loaded
    peak_bytes: int  # highest RSS from then on
    budget_bytes: int | None  # of the tiers that live in RAM, None where one was not given

    @property
    def used_bytes(self) -> int:
        """Peak over the baseline."""
        return max(0, self.peak_bytes - self.baseline_bytes)

    @property
    def within_budget(self) -> bool | None:
        """Whether the peak stayed within the budget and the head-room; None without a budget."""
        if self.budget_bytes is None:
            return None
        return self.used_bytes <= self.budget_bytes + RSS_HEADROOM_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class LinkReport:
    """One link over the training steps: mean bytes and busy seconds per step."""

    bytes_per_step: float
    seconds_per_step: float


def thinned(steps: Sequence[StepRecord], most: int = 1024) -> list[StepRecord]:
    """Return about `most` of the records at most, evenly spread, with the first and the last: for a long run's plot."""
    apart = 1
    while len(steps) // apart > most:
        apart *= 2
    return [record for record in steps if record.step % apart == 0 or record is steps[0] or record is steps[-1]]


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Result of a fine-tuning run."""

    model: str  # name of the model's folder
    parameters: int  # tied ones counted once
    tokens_per_step: int  # in the mean, without padding
    steps: Sequence[StepRecord]
    evaluations: Sequence[tuple[int, float]]  # (steps done, held-out loss); the first is before training; perhaps none
    prompt: str  # held-out text, if there is some; the samples continue it greedily
    sample_before: str
    sample_after: str
    train_seconds: float  # wall time of the steps; evaluations and samples are not in it
    total_seconds: float  # wall time of the whole run
    memory: MemoryReport
    peak_bytes: Mapping[str, int]  # per tier, as the engine counts them
    budget_bytes: Mapping[str, int]  # per tier
    links: Mapping[str, LinkReport]  # means over the training steps
    binding_link: str  # the link that was busy longest during training
    settings: Mapping[str, Any]  # the options of the run
    machine: Mapping[str, Any]  # where it ran

    @property
    def tokens_per_second(self) -> float:
        """Training speed, first step included."""
        return self.taken * self.tokens_per_step / self.train_seconds if self.train_seconds > 0 else 0.0

    @property
    def taken(self) -> int:
        """Steps of the run; the records of some may be left out."""
        return self.steps[-1].step if self.steps else 0

    @property
    def loss_before(self) -> float | None:
        """Held-out loss before training; None if nothing was held out."""
        return self.evaluations[0][1] if self.evaluations else None

    @property
    def loss_after(self) -> float | None:
        """Held-out loss after training; None if nothing was held out."""
        return self.evaluations[-1][1] if self.evaluations else None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values; numbers that are not finite become None."""
        values = dataclasses.asdict(self)
        values["tokens_per_second"] = self.tokens_per_second
        values["loss_before"] = self.loss_before
        values["loss_after"] = self.loss_after
        for when, loss in (("before", self.loss_before), ("after", self.loss_after)):
            values[f"perplexity_{when}"] = None if loss is None else perplexity(loss)
        values["memory"]["within_budget"] = self.memory.within_budget
        plain: dict[str, Any] = plain_json(values)
        return plain


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; that of 50 for whatever is above."""
    return math.exp(min(loss, 50))


def plain_json(value: Any) -> Any:
    """Return plain JSON values; numbers that are not finite become None, what JSON does not know its text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def duration_text(seconds: float) -> str:
    """Return seconds for people: ``8.2 s``, ``1 min 05 s``, ``2 h 03 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _memory_text(memory: MemoryReport) -> str:
    baseline = short_bytes(memory.baseline_bytes)
    text = f"RSS peak {short_bytes(memory.used_bytes)} over the {baseline} of interpreter and libraries"
    if memory.budget_bytes is None:
        return f"{text}; no budget given"
    limit = f"budget {short_bytes(memory.budget_bytes)} + {short_bytes(RSS_HEADROOM_BYTES)}"
    return f"{text}; {limit}: {'within' if memory.within_budget else 'EXCEEDED'}"


def _sample_text(text: str) -> str:
    return textwrap.fill(
        " ".join(text.split()) or "(nothing)", width=96, initial_indent="    ", subsequent_indent="    "
    )


def render(report: Report) -> str:
    """Return the report as text for a terminal."""
    before, after, rows = report.loss_before, report.loss_after, list[tuple[str, str]]()
    if before is not None and after is not None:
        perplexities = f"perplexity {perplexity(before):.1f}, {perplexity(after):.1f}"
        rows.append(("held-out loss", f"{before:.4f} before, {after:.4f} after ({perplexities})"))
    if report.steps:
        rows.append(("train loss", f"{report.steps[0].loss:.4f} first step, {report.steps[-1].loss:.4f} last"))
    took = f"{report.taken} steps of {report.tokens_per_step} tokens in {duration_text(report.train_seconds)}"
    whole = f"the whole run {duration_text(report.total_seconds)}"
    rows.append(("speed", f"{report.tokens_per_second:.0f} tokens/s; {took}; {whole}"))
    rows.append(("memory", _memory_text(report.memory)))
    for tier, peak in report.peak_bytes.items():
        budget = report.budget_bytes.get(tier)
        rows.append((f"  {tier}", f"peak {short_bytes(peak)}" + (f" of {short_bytes(budget)}" if budget else "")))
    if report.links:  # else no step was taken here
        rows.append(("per step", f"bound by {report.binding_link}"))
    step_seconds = report.train_seconds / report.taken if report.steps else 0.0
    for name, link in report.links.items():
        if link.bytes_per_step or link.seconds_per_step:
            moved = f"{short_bytes(link.bytes_per_step):>9} in" if link.bytes_per_step else " " * 12
            share = f" {100 * link.seconds_per_step / step_seconds:3.0f} % of the time" if step_seconds > 0 else ""
            rows.append((f"  {name}", f"{moved} {link.seconds_per_step:6.3f} s{share}"))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"{report.model}: {report.parameters / 1e6:.1f} M parameters", ""]
    lines += [f"{name:<{width}}{text}" for name, text in rows]
    if report.prompt:
        lines += ["", f"{'held-out ' if report.evaluations else ''}text, as it begins", _sample_text(report.prompt)]
        lines += ["continued before", _sample_text(report.sample_before)]
        lines += ["continued after", _sample_text(report.sample_after)]
    return "\n".join(lines)


def write_json(report: Report, path: Path) -> None:
    """Write the report as JSON; the file appears complete or not at all."""
    with replacing(path, "--output") as file:
        file.write(json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n")


def smoothed(losses: Sequence[float], *, width: int = 9) -> list[float]:
    """Return the median over `width` neighbours (odd), fewer at both ends: single texts differ much."""
    reach = width // 2
    return [statistics.median(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))]


def loss_range(report: Report) -> tuple[float, float]:
    """Return limits of the loss axis: all held-out losses and the middle nine tenths of the training losses."""
    losses = sorted(loss for loss in (record.loss for record in report.steps) if math.isfinite(loss))
    cut = len(losses) // 20
    shown = losses[cut : len(losses) - cut] + [loss for _, loss in report.evaluations if math.isfinite(loss)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    margin = 0.15 * (high - low) or 0.1
    return low - margin, high + margin


def write_plot(report: Report, path: Path) -> None:
    """Draw training loss and held-out loss over the steps as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    numbers = [record.step for record in report.steps]
    losses = [record.loss for record in report.steps]
    axes.plot(numbers, losses, ".", color="#9db8d9", markersize=6, label="training, each step")
    width = max(3, len(losses) // 4) | 1
    axes.plot(
        numbers, smoothed(losses, width=width), color="#1f5aa6", linewidth=2, label=f"training, median of {width}"
    )
    if report.evaluations:
        held_out = zip(*report.evaluations, strict=True)
        axes.plot(*held_out, color="#c4531a", marker="o", linewidth=1.5, label="held out", zorder=3)
    for step, loss in report.evaluations and (report.evaluations[0], report.evaluations[-1]):
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            textcoords="offset points",
            xytext=(0, 10),
            ha="left" if (step, loss) == report.evaluations[0] else "right",
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
            color="#c4531a",
            fontweight="bold",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    budgets = ", ".join(f"{tier} {short_bytes(size)}" for tier, size in report.budget_bytes.items() if size)
    axes.set_title(
        f"{report.model}, {report.parameters / 1e6:.0f} M parameters, "
        f"{report.tokens_per_second:.0f} tokens/s\n"
        f"budgets: {budgets or 'what is free'}",
        fontsize=10,
        loc="left",
    )
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_ylim(*loss_range(report))
    with replacing(path, "--output", binary=True) as file:
        figure.savefig(file, format="png")
