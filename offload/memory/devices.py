"""Which devices torch sees, and which of them is meant.

Owns the choice, and its errors. Next: :mod:`offload.build`.
"""

from __future__ import annotations

import torch

from offload.errors import ConfigError
from offload.memory.accelerator import AcceleratorDevice
from offload.memory.cpu import CpuDevice
from offload.memory.device import Device


def gpus() -> list[tuple[str, int, tuple[int, int]]]:
    """Return name, bytes and compute capability of the GPUs that torch sees."""
    found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return [
        (gpu.name, gpu.total_memory, (gpu.major, gpu.minor)) for gpu in map(torch.cuda.get_device_properties, found)
    ]


def open_device(name: str | torch.device | None) -> Device:
    """Return the compute device, of None the best there is.

    Raises:
        ConfigError: there is no such device.
    """
    place = resolve_device(name)
    return CpuDevice() if place.type == "cpu" else AcceleratorDevice(place)


def resolve_device(name: str | torch.device | None) -> torch.device:
    """Return the compute device, of None the best there is; one of CUDA with its index, as tensors have it.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a torch device like 'cuda' or 'cpu' but got {name!r}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"device: expected 'cuda' or 'cpu' but got {name!r}")
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {name!r} was asked for but torch sees no CUDA device; use device='cpu'")
    index, count = torch.cuda.current_device() if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"device: expected 'cuda' with an index below {count} but got {name!r}; torch sees {count} CUDA devices"
        )
    return torch.device("cuda", index)
