"""Updates of units that are on a device with all they consist of: given to the device, and waited for by nobody.

Owns their order with compute: they follow all that the device was given before, and what it is given later sees their
results. So nothing is hidden or moved, and a step has no such unit left to do. Knows no hyper-parameters. The updates
of all other units are in :mod:`offload.shards.updates`. Next: :mod:`offload.optim.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from offload.kernels import cpu_adam
from offload.kernels.on_device import DeviceKernels, Stepper
from offload.kernels.step import StepArrays
from offload.memory.arena import bytes_at
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.stream import ALL_STATES, Chunk
from offload.shards.tiers import Tiers
from offload.spans import UPDATE
from offload.spec import Hyper

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES


class _Steps:
    """The steps that chunks were visited with, for the device to be given all at once."""

    def __init__(self) -> None:
        self.made: list[tuple[StepArrays, Hyper]] = []

    def step(self, arrays: StepArrays, hyper: Hyper) -> None:
        """Note one."""
        self.made.append((arrays, hyper))


class DeviceUpdates:
    """Updates that the device of one engine makes. See the module's text."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def makes(self, unit: Unit) -> bool:
        """Tell whether the device updates a unit."""
        return self._tiers.plan.on_device(unit)

    def make(self, units: Sequence[Unit], visit: Callable[[Chunk], None]) -> None:
        """Update units, whose gradients have arrived: each parameter is one chunk, at addresses of the device.

        Raises:
            RuntimeError: of the device. The units that were begun are lost.
        """
        if not units:
            return
        kernels, there = self._tiers.device.kernels, self._tiers.gradients_there
        assert kernels is not None and there is not None
        leases, steps = Leases(self._tiers), _Steps()
        begun: set[int] = set()
        mover = self._tiers.mover
        with mover.alone():
            try:
                for unit in units:
                    begun.add(unit.index)
                    self._visit(unit, there.parts(unit, 0, unit.numel), leases, kernels, steps, visit)
                moment = mover.begin_computing()
                kernels.steps(steps.made)
                if moment is not None:
                    mover.end_computing(UPDATE, moment)
            except BaseException:
                leases.abandon(begun)
                raise
            leases.close()

    def _visit(
        self,
        unit: Unit,
        gradients: Sequence[tuple[int, int, int]],
        leases: Leases,
        kernels: DeviceKernels,
        steps: Stepper,
        visit: Callable[[Chunk], None],
    ) -> None:
        chunk_bytes = self._tiers.chunk_bytes
        access = leases.open(unit, reads=WRITTEN | {Role.GRAD}, writes=WRITTEN, on_device=True)
        if access.fresh_states:
            self._initialise(unit, access.addresses, kernels)
        for number, (begin, numel, gradient) in enumerate(gradients):
            starts = {role: at + chunk_bytes(unit, role, 0, begin) for role, at in access.addresses.items()}
            starts[Role.GRAD] = gradient
            visit(Chunk(unit, number, begin, begin + numel, starts, access, leases, kernels=steps))

    def _initialise(self, unit: Unit, addresses: Mapping[Role, int], kernels: DeviceKernels) -> None:
        """Give states that have no content their first one: zero moments, a master equal to the parameter."""
        tiers = self._tiers
        for role in STATE_ROLES:
            if role in addresses:
                size = tiers.chunk_bytes(unit, role, 0, unit.numel)
                bytes_at(addresses[role], size, tiers.device.place).zero_()
        if unit.dtype == "float16" and Role.MASTER in addresses:
            half, word = cpu_adam.Dtype.FLOAT16, cpu_adam.Dtype.FLOAT32
            kernels.convert(addresses[Role.PARAM], half, addresses[Role.MASTER], word, unit.numel)
