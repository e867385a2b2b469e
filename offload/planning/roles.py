"""What bytes mean: the roles in which a unit has them, and how many bytes each role takes.

Bytes per element:

======== ===== ==== =================================== ======
dtype    PARAM GRAD GRAD, several micro-batches in fp32 MASTER
======== ===== ==== =================================== ======
bfloat16 2     2    4                                   2
float16  2     2    4                                   4
float32  4     4    4                                   0
======== ===== ==== =================================== ======

Each optimizer state takes 4 bytes, as bfloat16 2, as int8 1. Int8 states share 2 bytes more per 128 elements.

Next: :mod:`offload.planning.plan`.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from offload.kernels.ranges import StateKind
from offload.planning.units import Unit


class Role(Enum):
    """What bytes mean."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"  # an optimizer's first state, whatever it is called
    EXP_AVG_SQ = "exp_avg_sq"  # its second
    STATE_3 = "state_3"  # its further ones
    STATE_4 = "state_4"
    STATE_5 = "state_5"
    STATE_6 = "state_6"
    SCALES = "scales"  # of the blocks of 8-bit states

    __hash__ = object.__hash__


MOMENTS = (Role.EXP_AVG, Role.EXP_AVG_SQ, Role.STATE_3, Role.STATE_4, Role.STATE_5, Role.STATE_6)
STATE_ROLES = (Role.MASTER, *MOMENTS, Role.SCALES)  # in the order of a record


@dataclasses.dataclass(frozen=True, slots=True)
class States:
    """What an optimizer remembers of each element, beside the master weight.

    Attributes:
        names: the states' names as in torch, at most as many as there are :data:`MOMENTS`.
        kind: how they are stored.
    """

    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    kind: StateKind = StateKind.FLOAT32

    def roles(self) -> tuple[tuple[Role, str], ...]:
        """Return the role and the name of each state."""
        return tuple(zip(MOMENTS, self.names, strict=False))


ADAM_STATES = States()


def role_bytes(unit: Unit, role: Role, numel: int, *, accumulate: bool, states: States = ADAM_STATES) -> int:
    """Return the bytes of `numel` elements of `unit` in `role` (0 where it does not exist).

    Args:
        unit: the unit.
        role: the role.
        numel: elements, from the start of a block of 8-bit states on.
        accumulate: gradients are summed over micro-batches, hence kept in fp32.
        states: what the optimizer remembers.
    """
    if role is Role.PARAM:
        return numel * unit.itemsize
    if not unit.trainable:
        return 0
    if role is Role.GRAD:
        return numel * (4 if accumulate else unit.itemsize)
    if role is Role.MASTER:
        return numel * {"bfloat16": 2, "float16": 4, "float32": 0}[unit.dtype]
    if role is Role.SCALES:
        return states.kind.units_bytes(numel)
    return numel * states.kind.itemsize if MOMENTS.index(role) < len(states.names) else 0
