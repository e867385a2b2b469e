"""Where a model lives, as the commands that make an engine take it: budgets, tiers, the drive.

Owns the options that these commands share. Must not import torch, so that ``--help`` is quick. Next:
:mod:`offload.config` has all of the engine's options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from offload.cli.options import option
from offload.config import tier_named, values_of

memory = functools.partial(option, "memory (sizes such as 700MiB, 8GiB, 80%; default: what is free)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlacementSettings:
    """Options of :class:`offload.Config` that a command line has; None leaves one to the file, or to its default."""

    dtype: str | None = field(
        default=None, metadata=memory("bfloat16, float16 or float32; default: the model's", "NAME")
    )
    device: str | None = field(default=None, metadata=memory("cuda or cpu; default: cuda where there is one", "NAME"))
    device_memory: str | None = field(default=None, metadata=memory("of the device, activations included", "SIZE"))
    activation_memory: str | None = field(default=None, metadata=memory("part of it kept for activations", "SIZE"))
    cpu_memory: str | None = field(default=None, metadata=memory("of the host", "SIZE"))
    nvme_memory: str | None = field(default=None, metadata=memory("of the drive", "SIZE"))
    nvme_path: list[Path] | None = field(default=None, metadata=memory("folder on the drive; repeatable", "DIR"))
    offload_param: str | None = field(
        default=None, metadata=memory("auto, none, cpu or nvme: force where parameters live", "TIER")
    )
    config: Path | None = field(default=None, metadata=memory("JSON file with options of offload.Config", "FILE"))

    def options(self) -> dict[str, Any]:
        """Return the options that are set, on top of those in the file `config`.

        Raises:
            ConfigError: the file cannot be read.
        """
        options: dict[str, Any] = values_of(self.config)
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        given.pop("config", None)
        tiers = ("device", "cpu", "nvme")
        budgets = {tier: given.pop(f"{tier}_memory") for tier in tiers if f"{tier}_memory" in given}
        if budgets:
            given["max_memory"] = _on_top(budgets, options.get("max_memory"))
        return options | given


def _on_top(budgets: dict[str, Any], given: Any) -> Any:
    """Return the budgets of a file with others on top. What is no mapping stays, so that the engine refuses it."""
    if given is not None and not isinstance(given, Mapping):
        return given
    return {key: value for key, value in (given or {}).items() if tier_named(key) not in budgets} | budgets
