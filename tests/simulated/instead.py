"""Lets tests that were written for the CPU run on the simulated device: ``pytest --device sim --schedule lazy``.

Where such a test names the CPU as the device of an engine, it gets the simulated one. Batches follow the model there,
and tensors are compared on the CPU. What holds on the CPU alone is marked ``cpu`` with the reason,
and does not run so.

``--device cuda`` takes a GPU. Its kernels round otherwise than those that such tests compare them with, so tensors are
equal there as far as rounding lets them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from simulated import EAGER, LAZY, Run, Schedule, at_random, first, fixed, load, running

MARK = "cpu"
FILES = {  # and how many of their tests run on the device, at least, nightly ones among them
    "wrappers": 40,
    "parity": 220,
    "engine": 130,
    "backward_updates": 60,
    "forward_updates": 50,
    "checkpoint": 130,
    "optimizers": 75,
    "bad_input": 130,
    "reference_models": 20,
    "leaving": 20,
    "activations": 20,
    "recomputing": 5,
    "chunk_loss": 5,
}
# Not run on a GPU: they compare more digits with plain PyTorch than its kernels share, or what must not be equal.
DIGITS = frozenset(
    {
        "test_a_loss_on_gathered_parameters",
        "test_a_penalty_on_all_weights_needs_no_room_for_them_all",
        "test_accumulation_averages",
        "test_an_optimizer_is_that_of_torch",
        "test_bits_are_those_of_a_plain_loop",
        "test_clipping_scales_to_the_norm",
        "test_float16_overflow_skips_and_loses_nothing",
        "test_gather_keeps_masters_of_elements_that_do_not_change",
        "test_groups_and_scheduler_of_a_torch_optimizer",
        "test_interrupt_in_a_checkpointed_segment",  # torch 2.11 does not put hooks back either, in plain training
        "test_masters_beside_the_states_of_other_optimizers",  # torch's Adagrad has no states after a move
        "test_one_loss_through_two_engines",
        "test_optimizer_step_with_closure",
        "test_placement_never_changes_the_result",  # that of other states may be as near
        "test_scheduler_and_hooks_on_the_engines_optimizer",
    }
)
TURNS = "in turn"
# Relative and absolute, of tensors that kernels of two devices have computed, by bytes of an element.
TOLERANCES = {2: (5e-2, 5e-3), 4: (2e-3, 2e-4), 8: (2e-3, 2e-4)}
MOVER_STREAMS = 4  # it makes one for gradients, two for uploads, and one for what is settled


def schedule_of(name: str, turn: int = 0) -> Schedule:
    """Return the schedule of a name: "lazy", "eager", "first 1", "seed 3", or "in turn", of all fixed ones.

    Raises:
        ValueError: there is none of that name.
    """
    all_fixed = fixed(MOVER_STREAMS)
    if name == TURNS:
        return all_fixed[turn % len(all_fixed)]
    by_name = {schedule.name: schedule for schedule in (LAZY, EAGER)}
    found = re.fullmatch(r"(first|seed) (\d+)", name)
    if name in by_name:
        return by_name[name]
    if found is None:
        raise ValueError(f"--schedule: expected lazy, eager, 'first N', 'seed N' or 'in turn' but got {name!r}")
    return (first if found[1] == "first" else at_random)(int(found[2]))


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not of these files or holds on the CPU alone; let the others' engines be on the device."""
    files = {f"test_{name}.py" for name in FILES}
    digits = DIGITS if config.getoption("device") == "cuda" else frozenset()

    def is_out(item: pytest.Item) -> bool:
        name = getattr(item, "originalname", item.name)
        return item.path.name not in files or item.get_closest_marker(MARK) is not None or name in digits

    out = [item for item in items if is_out(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
    install(config.getoption("device"))


def install(kind: str = "sim") -> None:
    """Let engines that are made for the CPU compute on the simulated device, or a GPU, for the rest of the process."""
    import torch
    from harness import compute_on
    from torch import nn

    from offload.memory import devices
    from offload.module import refusals

    if kind == "sim":
        load()
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins
        torch.use_deterministic_algorithms(True, warn_only=True)
    compute_on(kind)
    place, cpu = torch.device(kind, 0), torch.device("cpu")
    resolve, refuse, call = devices.resolve_device, refusals.refuse_batch, nn.Module.__call__

    def resolve_device(name: str | torch.device | None) -> torch.device:
        found = resolve(name)
        return place if found == cpu else found

    def refuse_batch(args: Any, kwargs: Any, device: torch.device) -> None:
        if device == place:
            args, kwargs = _moved((args, kwargs), place)
        refuse(args, kwargs, device)

    def call_module(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameter = next(self.parameters(), None)
        if parameter is not None and parameter.device == place:
            args, kwargs = _moved((args, kwargs), place)
        return call(self, *args, **kwargs)

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def compare(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _moved((args, kwargs), cpu)
            return function(*args, **kwargs)

        return compare

    devices.resolve_device = resolve_device
    refusals.refuse_batch = refuse_batch
    nn.Module.__call__ = call_module  # type: ignore[method-assign]
    torch.equal, torch.allclose = on_cpu(torch.equal if kind == "sim" else _about_equal), on_cpu(torch.allclose)


def _moved(value: Any, place: Any) -> Any:
    """Return `value` with the tensors of the other device, CPU or simulated, at `place`."""
    import torch
    from torch.utils import _pytree

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.device != place and leaf.device.type in ("cpu", "sim", "cuda"):
            return leaf.to(place)
        return leaf

    return _pytree.tree_map(move, value)


def _about_equal(ours: Any, theirs: Any) -> bool:
    """Tell whether two tensors are equal, those of floating point as far as kernels of two devices round alike."""
    import torch

    if not ours.is_floating_point() or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return bool(torch.eq(ours, theirs).all()) if ours.shape == theirs.shape else False
    relative, absolute = TOLERANCES[max(2, ours.element_size())]
    return torch.allclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True)


@contextlib.contextmanager
def scheduled(schedule: Schedule) -> Iterator[Run]:
    """Run a test under a schedule; it fails where accesses are not ordered."""
    with running(schedule) as seen:
        yield seen
    if seen.races:
        pytest.fail(f"under {schedule.name}, nothing orders: " + "; ".join(seen.races[:5]))
