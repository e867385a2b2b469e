"""Optimizers where scripts look for them: ``ops.adam``, ``ops.lion``, ``ops.adagrad``."""

from offload.integrations.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
