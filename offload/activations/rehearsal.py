"""What would leave the device in a forward and its backward, found out on the meta device: bytes per link.

Owns the rehearsal: the same :class:`LeavingActivations` decides, over tensors without content, and nothing is moved.
Copies and transfers are over as soon as they begin, and the device's budget is not looked at. Next:
:mod:`offload.predicting` asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from offload.activations.away import Away
from offload.activations.leaving import LeavingActivations, SavedElsewhere
from offload.activations.ledger import SavedActivation
from offload.memory.arena import Buffer
from offload.memory.budget import Budget, Tier
from offload.memory.transfer import Mover
from offload.stats import Counters
from offload.torch_private import no_functions, storage_place, top_hooks
from offload.wrappers import has_own_storage
from swap import SwapStore

_META = torch.device("meta")


class _Over:
    """A copy, or a transfer of the drive, that is over."""

    def done(self) -> bool:
        """See :class:`offload.memory.transfer.Ticket`."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """See :class:`offload.memory.transfer.Ticket`."""

    def use(self, timeout_s: float) -> None:
        """See :class:`offload.memory.transfer.Arriving`."""


class _Nowhere:
    """Stands for a mover and a swap store."""

    def save(self, *_: Any) -> _Over:
        """See :class:`offload.memory.transfer.Mover`."""
        return _Over()

    restore = save

    def note_use(self, tensor: torch.Tensor) -> None:
        """See :class:`offload.memory.transfer.Mover`."""

    def note_stream(self) -> int:
        """See :class:`offload.memory.transfer.Mover`."""
        return 0

    def begin_waiting(self) -> None:
        """See :class:`offload.memory.transfer.Mover`."""

    def end_waiting(self, what: str, begun: object | None, begin: float) -> None:
        """See :class:`offload.memory.transfer.Mover`."""

    def put_many(self, items: Sequence[object]) -> list[_Over]:
        """See :class:`swap.SwapStore`."""
        return [_Over() for _ in items]

    def get_many(self, items: Sequence[object], *, urgent: bool) -> list[_Over]:
        """See :class:`swap.SwapStore`."""
        return [_Over() for _ in items]

    def delete(self, key: object) -> None:
        """See :class:`swap.SwapStore`."""


class _Region:
    """A working region that gives nothing."""

    size_bytes = smallest_arena_bytes = leaving_bytes = 0

    def shrink(self, by_bytes: int) -> int:
        """See :class:`offload.activations.ledger.Elastic`."""
        return 0

    grow = make_room = leave_more = shrink


class _Uncharged(LeavingActivations):
    """Takes no note of what the device has room for."""

    def charge(self, tensor: torch.Tensor, address: int) -> bool:
        """Charge nothing, nor anything in part."""
        return False

    def refund(self) -> None:
        """Give nothing back."""
        self.freed.clear()

    def _memory(self, size_bytes: int) -> torch.Tensor:
        """Return memory that whoever counts what is alive sees."""
        with no_functions():
            return torch.empty(size_bytes, dtype=torch.uint8, device=_META)


class Rehearsal:
    """Activations of one micro-batch on the meta device. See the module's text."""

    def __init__(self, *, near_bytes: int, last_bytes: int, host_bytes: int, drive_bytes: int) -> None:
        """Begin with nothing; sizes are those of the plan."""
        nowhere = _Nowhere()
        store = cast(SwapStore, nowhere) if drive_bytes else None
        self._away = Away(Buffer(Tier.HOST, 0, 0, host_bytes), store, drive_bytes)
        self._ledger = _Uncharged(
            Budget(Tier.DEVICE, 1 << 60),
            _Region(),
            None,
            self._away,
            cast(Mover, nowhere),
            _META,
            Counters(),
            near_bytes=near_bytes,
            kept_bytes=last_bytes,
            deadline_s=0.0,
        )
        self._parameters: set[int] = set()

    def watch(self, parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Decide on what is saved in the ``with`` block, a forward; one that is inside of another changes nothing.

        Args:
            parameters: on the meta device; autograd keeps handles of them.
        """
        hidden = top_hooks()
        if hidden is not None:  # ours, or those of gradient checkpointing
            return contextlib.nullcontext()
        self._parameters = {storage_place(parameter) for parameter in parameters}
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def moved(self) -> Mapping[str, int]:
        """Return the bytes per link, once backward has ended."""
        return self._ledger.moved()

    def _pack(self, tensor: torch.Tensor) -> object:
        if not has_own_storage(type(tensor)) or tensor.layout is not torch.strided or tensor.device != _META:
            return tensor
        if storage_place(tensor) in self._parameters:
            return tensor
        return self._ledger.keep(tensor)

    def _unpack(self, saved: object) -> torch.Tensor:
        if isinstance(saved, SavedElsewhere):
            return self._ledger.bring(saved)
        if isinstance(saved, SavedActivation):
            return saved.get()
        assert isinstance(saved, torch.Tensor)
        return saved
