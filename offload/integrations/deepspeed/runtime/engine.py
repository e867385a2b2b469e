"""The engine where scripts look for its class."""

from offload.integrations.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
