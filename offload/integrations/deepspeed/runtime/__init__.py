"""Schedules where scripts look for them: ``runtime.lr_schedules``."""

from offload.integrations.deepspeed.runtime import lr_schedules

__all__ = ["lr_schedules"]
