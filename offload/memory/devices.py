"""Which devices torch sees, and which of them is meant.

Owns the choice, and its errors; and the random generators of all of them. Next: :mod:`offload.build`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Return the compute device, of None CUDA's where there is one; with its index, as tensors have it.

    Besides "cpu" and "cuda", what ``torch.accelerator.current_accelerator()`` names is accepted.

    Raises:
        ConfigError: there is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = _named(name)
    kind = device.type
    if kind == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    if kind != "cuda" and (accelerator is None or kind != accelerator.type):
        other = f"{accelerator.type!r}, " if accelerator is not None and accelerator.type != "cuda" else ""
        raise ConfigError(f"device: expected {other}'cuda' or 'cpu' but got {name!r}")
    module, label = torch.get_device_module(kind), "CUDA" if kind == "cuda" else kind
    if not module.is_available():
        raise ConfigError(f"device: {name!r} was asked for but torch sees no {label} device; use device='cpu'")
    index, count = module.current_device() if device.index is None else device.index, module.device_count()
    if index >= count:
        raise ConfigError(
            f"device: expected {kind!r} with an index below {count} but got {name!r}; "
            f"torch sees {count} {label} devices"
        )
    return torch.device(kind, index)


def is_host(name: str | torch.device) -> bool:
    """Tell whether a device is the CPU; it need not be here.

    Raises:
        ConfigError: torch knows no such device.
    """
    return _named(name).type == "cpu"


def _named(name: str | torch.device) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected a torch device like 'cuda' or 'cpu' but got {name!r}") from error


def random_states() -> dict[str, torch.Tensor]:
    """Return the states of torch's random generators: of the CPU, and of accelerators that this process uses."""
    states = {"cpu": torch.get_rng_state()}
    module = _used_accelerator()
    if module is not None:
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        states.update({f"{kind.type}:{n}": module.get_rng_state(n).cpu() for n in range(module.device_count())})
    return states


def moved(states: Mapping[str, torch.Tensor], was: str, here: str) -> dict[str, torch.Tensor]:
    """Return states in which that of one device is another one's of its kind; the others keep their names."""
    if was == here or was not in states or torch.device(was).type != torch.device(here).type:
        return dict(states)
    return {name: state for name, state in states.items() if name != was} | {here: states[was]}


def set_random_states(states: Mapping[str, torch.Tensor]) -> list[str]:
    """Set the states that :func:`random_states` returned; returns the devices that this process does not use."""
    torch.set_rng_state(states["cpu"])
    module, left = _used_accelerator(), []
    kind = torch.accelerator.current_accelerator()
    for name, state in states.items():
        if name == "cpu":
            continue
        if module is None or kind is None or not any(name == f"{kind.type}:{n}" for n in range(module.device_count())):
            left.append(name)
        else:
            module.set_rng_state(state, int(name.partition(":")[2]))
    return left


def _used_accelerator() -> Any:
    """Return torch's module of the accelerator, None where there is none or nobody has used it."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return None
    module = torch.get_device_module(kind)
    usable = hasattr(module, "get_rng_state") and hasattr(module, "set_rng_state")
    return module if usable and getattr(module, "is_initialized", lambda: True)() else None
