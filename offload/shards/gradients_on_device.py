"""Gradients that wait on a device which the host cannot address.

Owns their tensors, one per parameter, and the places for what is measured of them: of all at once, so that the host
waits for the device once per step. What autograd has made is kept as it is, if nobody else has its memory: then nothing
is copied.
The plan counts these bytes beside the device's arena. The device's kernels add and measure in the order that
:mod:`offload.kernels.cpu_adam` defines, so results have its bits. Next: :mod:`offload.shards.gradients` decides,
:mod:`offload.shards.device_updates` uses them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from offload.errors import StateError
from offload.kernels.cpu_adam import Dtype
from offload.kernels.on_device import TOTAL_BYTES, DeviceKernels, Measured
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.memory.device_kernels import TORCH_DTYPE
from offload.planning.plan import Plan
from offload.planning.units import Unit, Where
from offload.torch_private import no_dispatch, no_functions, storage_use_count

KERNEL_DTYPE = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPE.items()}

# Who has the memory of a gradient in a hook behind its accumulation: the gradient, what autograd has made it of, and
# the object through which this is asked.
HOLDERS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class _Kept:
    """A gradient, contiguous, and torch's count of the changes that tensors of the same memory have seen."""

    tensor: torch.Tensor
    version: int


class GradientsOnDevice:
    """Gradients of one engine that wait on its device. See the module's text.

    Attributes:
        place: torch's device.
    """

    def __init__(self, plan: Plan, kernels: DeviceKernels, place: torch.device, totals: Buffer) -> None:
        """Begin with none; `totals` has room for what is measured of each parameter."""
        units = [unit for unit in plan.request.units if unit.trainable and plan.on_device(unit)]
        names = {(unit.index, number): slot.name for unit in units for number, slot in enumerate(unit.slots)}
        self.place = place
        self._kernels = kernels
        self._names = names
        self._totals = {where: totals.address + number * TOTAL_BYTES for number, where in enumerate(names)}
        self._units = {unit.index for unit in units}
        self._kept: dict[Where, _Kept] = {}
        self._asleep: dict[Where, tuple[torch.Size, torch.dtype]] = {}

    def __contains__(self, index: int) -> bool:
        """Tell whether the gradient of unit `index` waits on the device."""
        return index in self._units

    def keep(self, where: Where, gradient: torch.Tensor, dtype: Dtype) -> bool:
        """Keep a gradient as it is; returns False where it has to be copied: see :meth:`add`.

        Args:
            where: whose it is.
            gradient: contiguous, on the device.
            dtype: in which it is kept.
        """
        if where in self._kept or KERNEL_DTYPE[gradient.dtype] is not dtype or not _is_sole(gradient):
            return False
        self._keep(where, gradient)
        return True

    def add(self, where: Where, gradient: torch.Tensor, dtype: Dtype) -> None:
        """Add a gradient to what is there, or copy it; the arguments are those of :meth:`keep`."""
        known = where in self._kept
        target = self.address(where) if known else self._make(where, gradient.shape, TORCH_DTYPE[dtype])
        self._kernels.take_gradient(
            src=gradient.data_ptr(),
            src_dtype=KERNEL_DTYPE[gradient.dtype],
            dst=target,
            dst_dtype=dtype,
            numel=gradient.numel(),
            add=known,
        )

    def room(self, where: Where, numel: int, dtype: Dtype) -> int:
        """Return where a gradient of `numel` elements lies, with any content if there was none."""
        if where in self._kept:
            return self.address(where)
        return self._make(where, torch.Size((numel,)), TORCH_DTYPE[dtype])

    def address(self, where: Where) -> int:
        """Return where a gradient lies.

        Raises:
            StateError: somebody has changed it, through a tensor that came before it was taken.
        """
        kept = self._kept[where]
        if kept.tensor._version != kept.version:
            raise StateError(
                f"gradient of {self._names[where]}: expected as backward has left it but a tensor that shares its "
                "memory was changed in place; call engine.zero_grad() and run the micro-batches again, and change "
                "gradients inside 'with engine.gather_gradients(parameter, modify=True):'"
            )
        return kept.tensor.data_ptr()

    def widen(self, unit: Unit) -> None:
        """Let the gradients of a unit be fp32 from now on, one after the other."""
        for where in self._wheres(unit):
            self.address(where)
            with no_functions(), no_dispatch():
                self._keep(where, self._kept[where].tensor.float())

    def parts(self, unit: Unit, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Return what waits of elements [begin, end) of a unit.

        Returns:
            First element, elements, and address, of each parameter's in order.

        Raises:
            StateError: as :meth:`address`.
        """
        found = []
        for position, slot, first, last in unit.overlaps(begin, end):
            if (where := (unit.index, position)) in self._kept:
                skipped = (first - slot.offset_numel) * self._kept[where].tensor.itemsize
                found.append((first, last - first, self.address(where) + skipped))
        return found

    def release(self, where: Where) -> None:
        """Give the memory of a gradient back: nobody needs it any more, but for what the device was given to do."""
        self._kept.pop(where, None)

    def release_all(self, unit: Unit) -> None:
        """Give the memory of a unit's gradients back; see :meth:`release`."""
        for where in self._wheres(unit):
            self.release(where)

    # --- while the device's memory is given back ---------------------------------------------------------------------

    def buffers(self) -> list[Buffer]:
        """Return where all gradients that are kept lie, in an order that stays."""
        return [
            Buffer(Tier.DEVICE, self.address(where), 0, kept.tensor.nbytes)
            for where, kept in self._kept.items()
            if kept.tensor.nbytes
        ]

    def put_down(self) -> None:
        """Give the memory of all gradients back, until :meth:`take_again`; their content is lost. Idempotent."""
        if self._kept and not self._asleep:  # else :meth:`take_again` has failed half way
            self._asleep = {where: (kept.tensor.shape, kept.tensor.dtype) for where, kept in self._kept.items()}
        self._kept.clear()

    def take_again(self, by_bytes: int) -> None:
        """Have memory for the same gradients, with any content; the rest of the device's is elsewhere now.

        Raises:
            torch.OutOfMemoryError: there is none.
        """
        self._totals = {where: address + by_bytes for where, address in self._totals.items()}
        for where, (shape, dtype) in self._asleep.items():
            self._make(where, shape, dtype)
        self._asleep = {}

    # --- what is measured --------------------------------------------------------------------------------------------

    def measure(self, wheres: Sequence[Where]) -> list[tuple[float, int]]:
        """Wait for the device; return the sum of squares and the number of non-finite elements of each gradient.

        Raises:
            StateError: as :meth:`address`.
        """
        ranges = []
        for where in wheres:
            tensor = self._kept[where].tensor
            dtype = KERNEL_DTYPE[tensor.dtype]
            ranges.append(Measured(self.address(where), dtype, tensor.numel(), self._totals[where]))
        self._kernels.sums_of_squares(ranges)
        return self._kernels.read_totals([each.total for each in ranges])

    def _wheres(self, unit: Unit) -> list[Where]:
        """Return whose gradients wait, of a unit's parameters."""
        wheres = ((unit.index, number) for number in range(len(unit.slots)))
        return [where for where in wheres if where in self._kept]

    def _make(self, where: Where, shape: torch.Size, dtype: torch.dtype) -> int:
        with no_functions(), no_dispatch(), torch.inference_mode(False):
            self._keep(where, torch.empty(shape, dtype=dtype, device=self.place))
        return self._kept[where].tensor.data_ptr()

    def _keep(self, where: Where, tensor: torch.Tensor) -> None:
        self._kept[where] = _Kept(tensor, tensor._version)


def _is_sole(gradient: torch.Tensor) -> bool:
    """Tell whether nobody else has the memory of a gradient that a hook was given, and all of it is the gradient's."""
    storage = gradient.untyped_storage()
    return storage.nbytes() == gradient.nbytes and storage_use_count(storage) <= HOLDERS
