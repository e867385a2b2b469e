"""Errors a caller can meet.

Owns the exception classes of the package. Every message reads ``<subject>: <expected> but got <actual>; <remedy>``.
Errors of the NVMe tier come from :mod:`swap.errors` and are passed on unchanged: they already name path, offset,
length, errno and remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

# What carries an optimizer's states from an engine to the next one: they go with their engine.
NEW_ENGINE = "save engine.optimizer.state_dict(), close the engine, make a new one and load the dict into its optimizer"
SAVE_FIRST = "closing frees its optimizer's states: save engine.optimizer.state_dict() before"
_TRAIN = (  # the same, for a parameter that has no room in the plan
    "save engine.optimizer.state_dict(), close the engine, call model.zero_grad(), make a new one with the same param "
    "groups"
)
TRAIN_MORE = f"{_TRAIN}, load the dict into its optimizer, and add the parameter with add_param_group"
TRAIN_LISTED = f"{_TRAIN}, and load the dict into its optimizer"  # one that is in a group

# What searches for a batch size look for in errors: accelerate's (auto_find_batch_size), and Lightning's.
BATCH_TOO_LARGE = '; searches for a batch size know this as "CUDA out of memory."'

ASLEEP = "engine: asleep; call engine.wake()"
PARTS = (
    "engine: expected one process for gradients and optimizer states as a whole but each of several ranks has a part "
    "of them; save a checkpoint, and load it in one process"
)


class OffloadError(RuntimeError):
    """Base of all errors raised by this package."""


class ConfigError(OffloadError, ValueError):
    """An option is unknown, has the wrong type, or contradicts another one."""


class BudgetError(OffloadError, MemoryError):
    """A tier's budget cannot hold what must be in it; the text names bytes and the smallest one that would do.

    Attributes:
        budgets: of a plan that is refused, the budgets that would do: bytes by the names that ``max_memory`` has. Those
            that stay as they are, are left out. Empty for other refusals.
        larger_than: of such a plan, the largest one for :func:`offload.ops.tile_` that would do instead, if there is.
    """

    def __init__(self, *text: str, budgets: Mapping[str, int] | None = None, larger_than: int | None = None) -> None:
        """Make an error with the text."""
        super().__init__(*text)
        self.budgets, self.larger_than = dict(budgets or {}), larger_than


class StateError(OffloadError):
    """A call came in an order that has no meaning (a step without backward, a closed engine, a wrapped model...)."""


class NonFiniteError(OffloadError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the text names the parameter. Nothing was changed."""


class CheckpointError(OffloadError):
    """A checkpoint cannot be written, found or loaded; the text names the file, tensor and offset, and the remedy."""


class RanksError(OffloadError):
    """Ranks disagree, or one has failed, ended or not come; the text is the same on all and names the rank."""


class InternalError(OffloadError):
    """Bookkeeping contradicts itself. Always a bug of this package; the text holds a state dump."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the closest of `choices`, or an empty string."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
