"""Adagrad with DeepSpeed's arguments."""

from offload.integrations.deepspeed.optimizers import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
