"""A durable run: what belongs to each commit beside the shards, and how a run is taken up again.

Owns the record of a step. Its parts are taken at three moments: the random generators when ``step()`` returns, groups,
buffers and the user's own when the next step begins, what updates change when they are home. Between the first two, all
that a training loop does belongs to the step. When a record is written is the business of
:mod:`offload.shards.commits`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from offload.build import Parts
from offload.checkpoint.format.nested import Encoder
from offload.checkpoint.format.packed import pack, pack_encoded, unpack
from offload.errors import StateError
from offload.life import Life
from offload.run_state import RunState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """What an engine has found when it was made.

    Attributes:
        step: optimizer steps that were taken.
        client_state: what was assigned to ``engine.client_state`` last; None where nothing was.
        source: the run directory, or the folder of the checkpoint.
        seconds: from the beginning of the engine's construction to its end.
    """

    step: int
    client_state: Any
    source: str
    seconds: float


class DurableRun:
    """The record of one engine's run. See the module's text; it is opened when the engine's parts are made."""

    def __init__(self, directory: str) -> None:
        """Begin a record of the run in `directory`."""
        self._directory = directory
        self._state: RunState | None = None
        self._parts: Parts | None = None
        self._life: Life | None = None
        self._client = pack(None, "client_state")
        self._drawn: Mapping[str, Any] | None = None
        self._ended = False  # a step, since the last seal
        self._assigned = self._was_assigned = False  # the user's own: since the last seal, and before it
        self._ahead = False  # sealed before the next step has begun
        self._sealed_step = self._committed_step = 0

    def open(self, state: RunState, parts: Parts, life: Life) -> None:
        """Note the parts of the engine."""
        self._state, self._parts, self._life = state, parts, life

    # --- going on ---------------------------------------------------------------------------------------------------

    def restore(self) -> bool:
        """Put what the last commit has beside the shards; False where there is none.

        Raises:
            ConfigError: the optimizer has other groups.
        """
        state, parts = self._state, self._parts
        assert state is not None and parts is not None
        if parts.run is None or parts.run.saved is None:
            return False
        saved = parts.run.saved
        contents = saved["contents"]
        if saved["late"] is not None:
            contents["optimizer"]["records"] = saved["late"]
        groups = state.groups(contents["optimizer"], strict=True)
        updates = {name: int(row["updates"]) for name, row in contents["parameters"].items()}
        state.restore(contents, updates, state.names())
        state.load_groups(groups)
        self._client = pack(contents["client_state"], "client_state")
        self._was_assigned = contents["client_state"] is not None
        self._sealed_step = self._committed_step = int(contents["step"])
        self._drawn = contents["random"]
        state.set_drawn(contents["random"])
        return True

    # --- the user's own ---------------------------------------------------------------------------------------------

    @property
    def client_state(self) -> Any:
        """A fresh copy of what was assigned last; None before."""
        return unpack(self._client)

    @client_state.setter
    def client_state(self, value: Any) -> None:
        self._client = pack(value, "client_state")
        self._assigned = True

    def take_over(self, value: Any) -> None:
        """Let what was saved with a checkpoint be the user's own; an empty dict is that of one without."""
        if isinstance(value, dict) and not value:
            self._client, self._assigned, self._was_assigned = pack(None, "client_state"), False, False
        else:
            self.client_state = value

    def client_state_of_step(self) -> Any:
        """Return :attr:`client_state`, if it is that of the last step.

        Raises:
            StateError: it was assigned for the step before, and not for this one.
        """
        assert self._parts is not None
        if self._is_stale and self._parts.steps.run.steps != self._sealed_step:  # else the last one changed nothing
            raise StateError(
                f"client_state: expected that of step {self._parts.steps.run.steps} but it was assigned for step "
                f"{self._sealed_step}; assign engine.client_state before save_checkpoint, or pass client_state= to it"
            )
        return self.client_state

    @property
    def was_assigned_late(self) -> bool:
        """Whether :attr:`client_state` was assigned since the last step was sealed."""
        return self._assigned

    @property
    def _is_stale(self) -> bool:
        """Whether the user's own was assigned for the step before the last one, and not since."""
        return self._ended and self._was_assigned and not (self._assigned or self._ahead)

    # --- the moments of a step --------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Note that a step has ended, whatever came of it."""
        assert self._state is not None
        self._drawn, self._ended, self._ahead = self._state.drawn_so_far(), True, False

    def seal(self) -> bytes | None:
        """See :class:`offload.shards.commits.Record`; nothing is sealed inside an accumulation."""
        parts, state, life = self._parts, self._state, self._life
        if not self._ended or parts is None or state is None or life is None or life.manager is None:
            return None
        step = parts.steps.step
        if life.manager.gradients.any_arrived or (step is not None and step.micro_batches.done):
            return None
        encoder = Encoder()
        contents = state.describe(encoder, self.client_state, self._drawn)
        assert parts.run is not None
        sealed = pack_encoded(
            {"run": parts.run.name, "sides": life.manager.copies.sides(), "contents": contents}, encoder.tensors
        )
        self._ended = False
        self._was_assigned = self._assigned or (self._ahead and self._was_assigned)
        self._assigned = self._ahead = False
        self._sealed_step = parts.steps.run.steps
        return sealed

    def late(self) -> bytes:
        """See :class:`offload.shards.commits.Record`: what an optimizer's own class remembers."""
        assert self._state is not None
        return pack(self._state.records(), "optimizer")

    def renew(self) -> None:
        """See :class:`offload.shards.commits.Record`: the file of the run."""
        assert self._parts is not None and self._parts.run is not None
        self._parts.run.renew()

    def note_commit(self) -> None:
        """See :class:`offload.shards.commits.Record`."""
        self._committed_step = self._sealed_step

    def describe(self) -> tuple[str, int, int]:
        """See :class:`offload.shards.commits.Record`."""
        return self._directory, self._sealed_step, self._committed_step

    def finish(self) -> None:
        """Commit the last step now, if all that belongs to it is there.

        Whoever assigns ``client_state`` for each step has not assigned it for the last one if an error came between.
        Such a step is not committed: its content would stand beside the data position of the one before.

        Raises:
            swap.SwapError: it could not be committed.
        """
        assert self._life is not None
        manager = self._life.require_open()
        manager.finish_updates()
        if manager.commits is None:
            return
        if self._is_stale:
            logger.info("run %s: the last step waits for its client_state", self._directory)
        elif self._ended:
            manager.commits.seal()
            self._ended = self._ahead = True  # what follows until the next step begins belongs to this one
        manager.commit()
        if manager.commits.due:  # the ranks have ended
            logger.warning(
                "run %s: step %d is not committed, for the ranks have failed; the drive holds step %d", *self.describe()
            )
