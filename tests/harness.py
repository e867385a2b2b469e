"""Runs tiny models through the engine under budgets of different shapes, and keeps everything that must be equal."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ApartDevice
from torch import nn

import offload
from offload import build
from offload.memory.errands import Errands
from offload.optim.step import Calm
from offload.planning.partition import find_units

UNIT_BYTES = 8 << 10
WIDTH = 32  # of the tests' own nets
LINEAR_BYTES = 4608  # one Linear(32, 32) of fp32 is a unit
ACTIVATION_BYTES = 24 << 20
PAGE = 4096


@dataclasses.dataclass
class Outcome:
    """What a run leaves: equal bit by bit however the bytes were placed."""

    losses: list[torch.Tensor]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]
    groups: list[dict[str, Any]]
    stats: offload.Stats
    plan: Any


_compute = ["cpu"]  # where plain modules compute, too: of a GPU's norms, other digits; see simulated.instead


def compute_on(place: str) -> None:
    """Let plain modules compute where engines do, from now on: some kernels differ between devices."""
    _compute[0] = place


def computes_on_cpu() -> bool:
    """Tell whether no other device stands for it: beside one, a thread makes updates, and nobody chooses its time."""
    return _compute[0] == "cpu"


def plain(model: nn.Module) -> nn.Module:
    """Return the model as plain PyTorch trains it."""
    return model.to(_compute[0])


def collect() -> None:
    """Collect garbage; also what autograd's thread of a device has of the last backward, until its next one."""
    torch.ones(1, device=_compute[0], requires_grad=True).sum().backward()
    gc.collect()


def let_go(engine: offload.Engine) -> None:
    """Wait until an engine's threads have dropped what they did last: whoever works for an engine keeps it alive.

    Beside an accelerator a thread makes updates, which a step leaves to it.
    """
    assert engine._manager is not None
    tiers = engine._manager.tiers
    for owner in (tiers.worker, tiers.mover, getattr(tiers.mover, "_gradients", None)):
        for threads in vars(owner).values() if owner is not None else ():
            if isinstance(threads, ThreadPoolExecutor):  # of one thread
                threads.submit(int).result()
            elif isinstance(threads, Errands) and threads._threads:
                all_of_them = threading.Barrier(len(threads._threads))
                given = [threads.submit(lambda _, met=all_of_them: met.wait(), urgent=False) for _ in threads._threads]
                for one in given:
                    one.result()


Forward = Callable[..., Any]
LossOf = Callable[[Forward, Any], torch.Tensor]


def loss_of_output(forward: Forward, batch: Any) -> torch.Tensor:
    """Return the loss of a transformers model."""
    loss: torch.Tensor = forward(**batch).loss
    return loss


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """Compute in one thread: tiny operators lose all time in the thread pool where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def working_bytes(
    model: nn.Module,
    *,
    units: int = 3,
    unit_bytes: int = UNIT_BYTES,
    dtype: str | None = None,
    whole: bool = False,
) -> int:
    """Return the page-rounded bytes of the `units` largest units (`whole` where no chunk may divide a parameter)."""
    cast = getattr(torch, dtype) if dtype else None
    tree = find_units(model, max_unit_bytes=unit_bytes, dtype=cast, whole=whole)
    sizes = sorted((-(-unit.param_bytes // PAGE) * PAGE for unit in tree.units), reverse=True)
    return sum(sizes[:units])


class _Restless(Calm):
    """Holds no step to be worth a guess."""

    def __bool__(self) -> bool:
        return False


def guess_nothing(engine: offload.Engine) -> None:
    """Have no update made during backward."""
    assert engine._step is not None
    engine._step._calm = _Restless(expected=False)


def everything_on_device() -> dict[str, Any]:
    """Options: parameters, gradients and states in the device's arena."""
    return {"device": "cpu", "max_memory": {"device": "64MiB", "cpu": "64MiB"}}


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Let engines that are made inside have an :class:`ApartDevice` where they ask for the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "open_device", lambda name: ApartDevice())
        yield


def parameters_on_device() -> dict[str, Any]:
    """Options: parameters in the device's arena, states in host memory: a step leaves updates to the next forward."""
    return {**everything_on_device(), "offload_param": "none", "offload_optimizer": "cpu"}


def host(model: nn.Module, *, unit_bytes: int = UNIT_BYTES, whole: bool = False) -> dict[str, Any]:
    """Options: all at home in host memory, room for three units on the device."""
    device = ACTIVATION_BYTES + working_bytes(model, unit_bytes=unit_bytes, whole=whole)
    return {
        "device": "cpu",
        "max_memory": {"device": device, "cpu": "64MiB"},
        "activation_memory": ACTIVATION_BYTES,
        "unit_bytes": unit_bytes,
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
    }


def nvme(
    model: nn.Module, path: Path, *, unit_bytes: int = UNIT_BYTES, units: int = 3, whole: bool = False, **more: Any
) -> dict[str, Any]:
    """Options: parameters and states on NVMe, room for three units on the device; and `more`."""
    needed = working_bytes(model, unit_bytes=unit_bytes, units=units, dtype=more.get("dtype"), whole=whole)
    device = ACTIVATION_BYTES + needed
    return {
        "device": "cpu",
        "max_memory": {"device": device, "cpu": "16MiB", "nvme": "256MiB"},
        "activation_memory": ACTIVATION_BYTES,
        "unit_bytes": unit_bytes,
        "nvme_path": path,
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
        **more,
    }


def tight(model: nn.Module, path: Path, **more: Any) -> dict[str, Any]:
    """Options of :func:`nvme` where every linear layer of the tests' own nets is a unit."""
    return nvme(model, path, unit_bytes=LINEAR_BYTES, **more)


def batch(number: int, *shape: int) -> torch.Tensor:
    """Return the input of a step; of four rows where no shape is given."""
    return torch.randn(*(shape or (4, WIDTH)), generator=torch.Generator().manual_seed(number))


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], number: int) -> torch.Tensor:
    """Return a loss of the output for a batch; not quadratic, so that its gradient is not just the output."""
    return forward(batch(number)).sub(1).pow(4).mean()


def run(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    optimizer: Any = None,
    loss_of: LossOf = loss_of_output,
    **options: Any,
) -> Outcome:
    """Train on the batches, one micro-batch each; checks the runtime's invariants after every step."""
    losses, norms = [], []
    with offload.Engine(model, optimizer=optimizer or offload.AdamW(lr=1e-3, weight_decay=0.1), **options) as engine:
        assert engine.optimizer is not None
        for number, batch in enumerate(batches):
            torch.manual_seed(1000 + number)  # dropout: the same masks in every run
            loss = loss_of(engine, batch)
            losses.append(loss.detach().clone())
            engine.backward(loss)
            del loss
            if engine.step():
                norms.append(engine.grad_norm)
            engine._manager.check()
        packed = engine.optimizer.state_dict()
        return Outcome(
            losses,
            norms,
            engine.state_dict(),
            packed["state"],
            packed["param_groups"],
            engine.stats(),
            engine.plan,
        )


def assert_equal(ours: Outcome, truth: Outcome) -> None:
    """Compare bit by bit."""
    assert len(ours.losses) == len(truth.losses)
    for number, (a, b) in enumerate(zip(ours.losses, truth.losses, strict=True)):
        assert torch.equal(a, b), f"loss {number}: {a.item()!r} and {b.item()!r}"
    assert ours.norms == (pytest.approx(truth.norms, rel=1e-3) if _compute[0] == "cuda" else truth.norms)
    assert_same_tensors(ours.parameters, truth.parameters)
    assert ours.states.keys() == truth.states.keys()
    for position, state in ours.states.items():
        assert_same_tensors(state, truth.states[position])
    assert ours.groups == truth.groups


def everything(engine: offload.Engine) -> dict[str, torch.Tensor]:
    """Return copies of parameters, buffers and states, masters included."""
    assert engine.optimizer is not None
    found: dict[str, Any] = dict(engine.state_dict())
    for position, state in engine.optimizer.state_dict()["state"].items():
        found |= {f"{position}.{name}": value for name, value in state.items()}
    return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def assert_same_tensors(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> None:
    """Compare two dicts of tensors bit by bit."""
    assert ours.keys() == truth.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == truth[name].dtype, name
        assert torch.equal(tensor, truth[name]), f"{name} differs"
