"""Whether the forward of a block does the same when backward repeats it.

Owns the comparison of what autograd saves in both: number, shapes and dtypes each time, and values in a block's first
repetition, at some places of each tensor. So a state that was not put back is not silently another one. Where the
repetition fails because of it, it says so. Next: :mod:`offload.module.recomputing` repeats.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from offload.errors import OffloadError, StateError
from offload.torch_private import DEVICE_ERRORS, StopsRepetition, no_dispatch, no_functions

PLACES = 1024  # of a tensor whose values are compared
_GOLDEN = 2654435769  # 2 ** 32 times the golden ratio's fraction: multiples of it fall everywhere, whatever is left out
_MOST_FLIPPED = 0.01  # of a mask's places: a device may round otherwise when it does the same again
_COMPARED = frozenset(
    {torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_OTHERS: tuple[type[Exception], ...] = (StopsRepetition, OffloadError, *DEVICE_ERRORS)
_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Repetition:
    """What is saved in one forward of a block, which :meth:`look` is given, and in its repetition."""

    def __init__(self, name: str, unseen: set[str], refuse: Callable[[str], StateError]) -> None:
        """Begin.

        Args:
            name: of the block.
            unseen: blocks whose values were not compared so far; this one leaves when they were.
            refuse: makes the error that says what the repetition has done.
        """
        self.name = name
        self.refuse = refuse
        self.unseen = unseen
        self._compares_values = name in unseen

    def look(self, tensor: torch.Tensor) -> Saved:
        """Return what is compared of a tensor that is saved."""
        return Saved(self, tensor, _values(tensor) if self._compares_values else None)

    @contextlib.contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Let errors of the ``with`` block, which the forward had not, say what they come of.

        Raises:
            StateError: an error that is neither the engine's nor that of a full memory, a device or a drive.
        """
        try:
            yield
        except _OTHERS:
            raise
        except _FAILURES as error:
            raise self.refuse(f"it fails then with {type(error).__name__}: {error}") from error


class Saved:
    """What is compared of one tensor. Torch asks whether both are equal."""

    __slots__ = ("_kind", "_repetition", "_values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, repetition: Repetition, tensor: torch.Tensor, values: torch.Tensor | None) -> None:
        self._repetition = repetition
        self._kind = tensor.shape, tensor.dtype, tensor.device
        self._values = values

    def __eq__(self, other: object) -> bool:
        """Return true.

        Raises:
            StateError: they are not equal, in words for whoever has the model.
        """
        assert isinstance(other, Saved)
        if self._kind != other._kind:
            raise self._repetition.refuse(f"it saves {other._told()} then, and did save {self._told()}")
        if self._values is not None and other._values is not None:
            if not _are_close(self._values, other._values):
                raise self._repetition.refuse(f"{self._told()} that it saves has other values then")
            self._repetition.unseen.discard(self._repetition.name)
        return True

    def _told(self) -> str:
        shape, dtype, _ = self._kind
        return f"a tensor of shape {tuple(shape)} in {str(dtype).removeprefix('torch.')}"


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return those at up to :data:`PLACES` places; None where nothing is compared, as of integers: some are not set."""
    if tensor.dtype not in _COMPARED or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    with torch.no_grad(), no_functions(), no_dispatch():
        if tensor.numel() <= PLACES:
            return tensor.detach().clone()
        numbers = torch.arange(PLACES, device=tensor.device) * _GOLDEN % (1 << 32)
        places = numbers * min(tensor.numel(), 1 << 31) >> 32
        return tensor.detach()[torch.unravel_index(places, tensor.shape)]


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    with torch.no_grad(), no_functions(), no_dispatch():
        if one.dtype is torch.bool:
            return float((one != other).float().mean()) <= _MOST_FLIPPED
        rounding = math.sqrt(torch.finfo(one.dtype).eps)  # which has half of the digits: sums in any order have more
        largest = float(torch.where(one.isfinite(), one, 0).abs().max())
        return torch.allclose(one, other, rtol=rounding, atol=rounding * largest, equal_nan=True)
