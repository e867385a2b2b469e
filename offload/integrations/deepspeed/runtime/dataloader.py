"""The repeating loader where scripts look for it."""

from offload.integrations.deepspeed.data import RepeatingLoader

__all__ = ["RepeatingLoader"]
