"""What a checkpoint of another program holds, by parameter name: the one value that all readers here return.

Values only. Tensors are sources: their elements are read in ranges, when they are needed. Next:
:mod:`offload.checkpoint.foreign.opening` chooses the reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from offload.checkpoint.sources import Source


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """A param group.

    Attributes:
        names: of its parameters.
        options: its hyper-parameters, as saved.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The small facts of a run.

    Attributes:
        kind: which program has saved it, and how.
        global_step: optimizer steps so far; None where nothing says.
        skipped_steps: of them, those that were skipped for an overflow.
        epoch: as saved.
        loss_scale: ``scale``, ``tolerance`` and ``good_steps`` of a dynamic one; None where there is none.
        scheduler: state of the learning rate's schedule.
        rng: states of random number generators by name.
        samples: seen so far; None where nothing says.
        client_state: what the script has saved beside, as far as somebody tells it apart.
    """

    kind: str
    global_step: int | None = None
    skipped_steps: int = 0
    epoch: float | None = None
    loss_scale: Mapping[str, float] | None = None
    scheduler: Any = None
    rng: Mapping[str, Any] | None = None
    samples: int | None = None
    client_state: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def taken(self) -> int | None:
        """Steps that were not skipped; None where nothing says."""
        return None if self.global_step is None else max(self.global_step - self.skipped_steps, 0)

    def run(self, taken: int) -> dict[str, Any]:
        """Return how far the run has come with so many steps, as an optimizer's state dict has it."""
        scale = {} if self.loss_scale is None else {"loss_scale": dict(self.loss_scale)}
        return {"step": taken, "skipped_steps": self.skipped_steps, **scale}


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint.

    Attributes:
        path: where it is.
        weights: parameters and buffers, of the dtype that was saved; a tied parameter under any of its names.
        masters: fp32 masters of parameters that have one beside the weight.
        states: per parameter that was updated, the optimizer's states by torch's names (a source, or a plain value) and
            ``step`` where the optimizer counts.
        groups: param groups; empty where no optimizer was saved.
        facts: the rest.
    """

    path: str
    weights: Mapping[str, Source]
    masters: Mapping[str, Source]
    states: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Group]
    facts: Facts
