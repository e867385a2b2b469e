"""Arithmetic on gradients that wait on a device which the host cannot address.

Owns what is measured of them there until the host asks, so that it waits for the device once per step. The device's
kernels add and measure in the order that :mod:`offload.kernels.cpu_adam` defines, so results have its bits. Next:
:mod:`offload.shards.gradients` decides, :mod:`offload.shards.device_updates` uses them.
"""

from __future__ import annotations

import torch

from offload.kernels.cpu_adam import Dtype
from offload.kernels.on_device import TOTAL_BYTES, DeviceKernels
from offload.memory.arena import Buffer
from offload.planning.plan import Plan
from offload.planning.units import Where


class GradientsOnDevice:
    """Sums of squares and counts of one engine's gradients that wait on the device. See the module's text.

    Attributes:
        place: torch's device.
    """

    def __init__(self, plan: Plan, kernels: DeviceKernels, place: torch.device, totals: Buffer) -> None:
        """Begin with nothing measured; `totals` has room for what is measured of each parameter."""
        wheres = [
            (unit.index, slot)
            for unit in plan.request.units
            if unit.trainable and plan.on_device(unit)
            for slot in range(len(unit.slots))
        ]
        self.place = place
        self._kernels = kernels
        self._address = {where: totals.address + number * TOTAL_BYTES for number, where in enumerate(wheres)}
        self._units = {index for index, _ in wheres}
        self._measured: set[Where] = set()

    def __contains__(self, index: int) -> bool:
        """Tell whether the gradient of unit `index` waits on the device."""
        return index in self._units

    def take(
        self,
        where: Where,
        *,
        src: int,
        src_dtype: Dtype,
        dst: int,
        dst_dtype: Dtype,
        numel: int,
        add: bool,
        measure: bool,
    ) -> None:
        """Copy a gradient, or add it to what is there; what is measured is kept for :meth:`read`."""
        self._kernels.take_gradient(
            src=src,
            src_dtype=src_dtype,
            dst=dst,
            dst_dtype=dst_dtype,
            numel=numel,
            add=add,
            total=self._address[where] if measure else 0,
        )
        self._note(where, measured=measure)

    def measure(self, where: Where, address: int, dtype: Dtype, numel: int) -> None:
        """Measure a gradient, unless that was done since it has changed."""
        if where not in self._measured:
            self._kernels.sum_of_squares(address, dtype, numel, total=self._address[where])
            self._note(where, measured=True)

    def forget(self, where: Where) -> None:
        """Forget what was measured: the gradient is another one."""
        self._note(where, measured=False)

    def forget_all(self) -> None:
        """Forget all that was measured."""
        self._measured.clear()

    def move(self, by_bytes: int) -> None:
        """Note that the device's memory is elsewhere, and forget all that was measured."""
        self._address = {where: address + by_bytes for where, address in self._address.items()}
        self.forget_all()

    def read(self) -> dict[Where, tuple[float, int]]:
        """Wait for the device; return the sum of squares and the number of non-finite elements of all measured."""
        wheres = sorted(self._measured)
        totals = self._kernels.read_totals([self._address[where] for where in wheres])
        return dict(zip(wheres, totals, strict=True))

    def _note(self, where: Where, *, measured: bool) -> None:
        self._measured.add(where) if measured else self._measured.discard(where)
