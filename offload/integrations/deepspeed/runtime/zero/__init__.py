"""``deepspeed.zero`` where scripts look for its parts."""

from offload.integrations.deepspeed.runtime.zero import partition_parameters
from offload.integrations.deepspeed.zero import GatheredParameters, Init

__all__ = ["GatheredParameters", "Init", "partition_parameters"]
