"""Updates of units that are on a device with all they consist of: given to the device, and waited for by nobody.

Owns their order with compute: they follow all that the device was given before, and what it is given later sees their
results. So nothing is hidden or moved, and a step has no such unit left to do. Knows no hyper-parameters. The updates
of all other units are in :mod:`offload.shards.updates`. Next: :mod:`offload.optim.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.kernels import cpu_adam
from offload.kernels.on_device import DeviceKernels
from offload.memory.arena import bytes_at
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.stream import ALL_STATES, Chunk
from offload.shards.tiers import Tiers

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES


class DeviceUpdates:
    """Updates that the device of one engine makes. See the module's text."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    def makes(self, unit: Unit) -> bool:
        """Tell whether the device updates a unit."""
        return self._tiers.plan.on_device(unit)

    def make(self, units: Sequence[Unit], visit: Callable[[Chunk], None]) -> None:
        """Update units, whose gradients have arrived, as a whole: each is one chunk, at addresses of the device.

        Raises:
            RuntimeError: of the device. The unit that was begun is lost.
        """
        kernels = self._tiers.device.kernels
        if not units or kernels is None:
            return
        with self._tiers.mover.alone():
            for unit in units:
                self._make(unit, kernels, visit)

    def _make(self, unit: Unit, kernels: DeviceKernels, visit: Callable[[Chunk], None]) -> None:
        leases = Leases(self._tiers)
        try:
            access = leases.open(unit, reads=WRITTEN | {Role.GRAD}, writes=WRITTEN, on_device=True)
            chunk = Chunk(unit, 0, 0, unit.numel, access.addresses, access, leases, kernels=kernels)
            if access.fresh_states:
                self._initialise(chunk, kernels)
            visit(chunk)
        except BaseException:
            leases.abandon({unit.index})
            raise
        leases.close()

    def _initialise(self, chunk: Chunk, kernels: DeviceKernels) -> None:
        """Give states that have no content their first one: zero moments, a master equal to the parameter."""
        tiers, addresses = self._tiers, chunk.addresses
        for role in STATE_ROLES:
            if role in addresses:
                size = tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
                bytes_at(addresses[role], size, tiers.device.place).zero_()
        if chunk.unit.dtype == "float16" and Role.MASTER in addresses:
            half, word = cpu_adam.Dtype.FLOAT16, cpu_adam.Dtype.FLOAT32
            kernels.convert(addresses[Role.PARAM], half, addresses[Role.MASTER], word, chunk.numel)
