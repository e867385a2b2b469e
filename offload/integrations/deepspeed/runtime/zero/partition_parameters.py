"""Names that scripts take to find out whether a parameter is there. Here, reading a parameter brings it."""

import enum

from offload.integrations.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]


class ZeroParamStatus(enum.Enum):
    """Where DeepSpeed has a parameter, in its ``ds_status``, which no parameter has here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3
