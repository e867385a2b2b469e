"""Lion with DeepSpeed's arguments."""

from offload.integrations.deepspeed.optimizers import DeepSpeedCPULion, FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
