"""What of a fine-tuning run is over: kept with its checkpoints and commits, so that a resumed run has the whole report.

Owns the way of it into a checkpoint and back. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.format.folder import Folder
from offload.cli.finetune.report import StepRecord, thinned
from offload.cli.finetune.settings import FinetuneError, Settings


@dataclasses.dataclass(slots=True)
class Past:
    """Of one run.

    Attributes:
        steps: of it, so far.
        evaluations: (steps done, held-out loss).
        seconds: wall time of the steps.
        tokens: of the steps.
        sample_before: text that the model had made before training.
        schedule: state of the learning rate's; None before it was saved.
    """

    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    evaluations: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    sample_before: str | None = None
    schedule: Mapping[str, Any] | None = None

    @property
    def done(self) -> int:
        """Steps that were taken."""
        return self.steps[-1].step if self.steps else 0

    def to_state(
        self, settings: Settings, digests: Mapping[str, str], schedule: Mapping[str, Any], *, small: bool = False
    ) -> dict[str, Any]:
        """Return it as the user's part of a checkpoint; `small`, with some of the steps, as that of a commit.

        Args:
            settings: of the run.
            digests: of what it trains on, what is held out, and the prompt.
            schedule: state of the learning rate's.
            small: whether some steps are enough.
        """
        return {
            "data": _data_of(settings, digests),
            "steps": [dataclasses.asdict(record) for record in (thinned(self.steps) if small else self.steps)],
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "sample_before": self.sample_before,
            "schedule": dict(schedule),
        }

    @classmethod
    def of_state(cls, state: Any, settings: Settings, digests: Mapping[str, str]) -> Past:
        """Return what a checkpoint has kept.

        Raises:
            FinetuneError: it is none of this command, was made with other data, or has taken more steps.
        """
        if not isinstance(state, dict) or not {"data", "schedule", "sample_before", "tokens"} <= state.keys():
            raise FinetuneError("resume: expected a checkpoint that finetune has saved; name its --output")
        for name, value in _data_of(settings, digests).items():
            before = state["data"].get(name, value if name in digests else None)  # an older one has no digest of it
            if before != value:
                raise FinetuneError(
                    f"resume: expected {name} {before!r} but got {value!r}; the steps, or what the report compares, "
                    "depend on it, so resume with what the run was begun with"
                )
        steps = [StepRecord(**record) for record in state["steps"]]
        evaluations = [tuple(one) for one in state["evaluations"]]
        past = cls(steps, evaluations, state["seconds"], state["tokens"], state["sample_before"], state["schedule"])
        if past.done > settings.steps:
            raise FinetuneError(
                f"resume: expected at most {settings.steps} steps behind the run but got {past.done}; ask for as many "
                "with --steps, or for more"
            )
        return past


def checkpoints_of(settings: Settings) -> Path:
    """Return the directory of a run's checkpoints."""
    assert settings.output is not None
    return settings.output / "checkpoints"


def refuse_another_run(settings: Settings) -> None:
    """Refuse to begin a run where the checkpoints of another one would go.

    Raises:
        FinetuneError: there are some.
    """
    if settings.output is None or settings.resume:
        return
    found = Folder(checkpoints_of(settings)).tags()
    if found:
        raise FinetuneError(
            f"output {settings.output}: expected no run there but checkpoints has {', '.join(found[:3])}; pass "
            "--resume to go on with that run, or name another --output"
        )


def _data_of(settings: Settings, digests: Mapping[str, str]) -> dict[str, Any]:
    """Return what decides on the steps and the report, beside what the engine compares: data, order, adapters."""
    names = ("seed", "sequence_length", "batch_size", "gradient_accumulation_steps", "peft")
    rates, adapters = ("lr", "weight_decay", "warmup_steps"), ("lora_rank", "lora_alpha", "lora_targets")
    found = {name: getattr(settings, name) for name in (*names, *rates, *adapters)}
    return {**found, "chunked_loss": settings.chunked_loss or None, **digests}
