"""What bytes mean: the roles in which a unit has them. Next: :mod:`offload.planning.units`."""

from __future__ import annotations

from enum import Enum


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
    ACTIVATION = "activation"

    __hash__ = object.__hash__
