"""Adam and AdamW with DeepSpeed's arguments."""

from offload.integrations.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
