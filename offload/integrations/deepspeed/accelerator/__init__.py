"""``deepspeed.accelerator``: the device that an engine takes if none is named.

Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.integrations.deepspeed.refusals import missing
from offload.memory.devices import resolve_device

__all__ = ["Accelerator", "get_accelerator"]


class Accelerator:
    """The device, as DeepSpeed's scripts ask for it; what is not here is asked of torch's module for it.

    So ``set_device``, ``synchronize``, ``Stream`` and, on a GPU, ``memory_allocated`` are torch's.
    """

    def __init__(self, device: torch.device) -> None:
        """Speak for `device`."""
        self._device = device
        self._torch = torch.get_device_module(device.type)

    def device_name(self, device_index: int | None = None) -> str:
        """Return the kind of the device, with a number if one is given and there are several."""
        return self._device.type if device_index is None or self._device.index is None else self._numbered(device_index)

    def current_device_name(self) -> str:
        """Return the device's name."""
        return str(self._device)

    def current_device(self) -> int:
        """Return the device's number."""
        return self._device.index or 0

    def communication_backend_name(self) -> str:
        """Return the name of torch's backend of process groups on the device."""
        return torch.distributed.get_default_backend_for_device(self._device)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random generators."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Give back memory that torch keeps and nobody has; nothing on a CPU."""
        getattr(self._torch, "empty_cache", lambda: None)()

    def is_bf16_supported(self) -> bool:
        """Tell that the engine trains bf16."""
        return True

    is_fp16_supported = is_bf16_supported

    def _numbered(self, number: int) -> str:
        return f"{self._device.type}:{number}"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(self._torch, name):
            raise missing("deepspeed.accelerator.get_accelerator()", name, _HERE)
        return getattr(self._torch, name)


_HERE = tuple(name for name in vars(Accelerator) if not name.startswith("_"))


def get_accelerator() -> Accelerator:
    """Return the device that an engine takes if none is named, as DeepSpeed's scripts ask for it."""
    return Accelerator(resolve_device(None))


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.accelerator", name, __all__)
