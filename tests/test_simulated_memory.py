"""Device memory on the simulated accelerator: as torch counts it, and where there is no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import batch, working_bytes
from simulated import LAZY, limit, running
from torch import nn

import offload
from offload import AdamW, Engine
from offload.activations import ledger
from offload.memory.devices import open_device

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MIB = 1 << 20
WIDTH = 64


class Net(nn.Module):
    """Four blocks, and a function of the user between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(torch.tanh(block(x)))
        return x


def options(model: nn.Module, activation_bytes: int = 4 * MIB) -> dict[str, Any]:
    unit_bytes = WIDTH * (WIDTH + 1) * 4
    device_bytes = activation_bytes + working_bytes(model, unit_bytes=unit_bytes)
    return {
        "device": "sim",
        "max_memory": {"device": device_bytes, "cpu": "16MiB"},
        "activation_memory": activation_bytes,
        "unit_bytes": unit_bytes,
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
    }


def test_a_device_tells_what_memory_it_has_however_much_is_free() -> None:
    device = open_device("sim")
    with limit(64 * MIB):
        taken = torch.empty(8 * MIB, dtype=torch.uint8, device="sim")
        assert device.free_bytes() <= 56 * MIB and device.total_bytes() == 64 * MIB
        del taken


def test_what_torch_caches_and_nobody_uses_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what a closed engine has left behind; a block with a tensor in it stays."""
    device, module = open_device("sim"), torch.get_device_module("sim")
    with limit(64 * MIB):
        before = device.free_bytes()
        stats = {"reserved_bytes": 20 * MIB, "active_bytes": 9 * MIB, "inactive_split_bytes": 3 * MIB}
        told = {f"{name}.all.current": size for name, size in stats.items()}
        monkeypatch.setattr(module, "memory_stats", lambda place: told, raising=False)
        assert device.free_bytes() == before + 8 * MIB


def hungry(size_bytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with a temporary that autograd keeps nothing of."""

    def between(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            torch.empty(size_bytes, dtype=torch.uint8, device="sim")
        return x

    return between


class Greedy(torch.autograd.Function):
    """Wants as much in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.empty(64 * MIB, dtype=torch.uint8, device="sim")
        return gradient


def train(engine: Engine) -> None:
    engine.backward(engine(batch(0, 4, WIDTH).to("sim")).sum())
    engine.step()


def test_temporaries_beyond_the_device_budget_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ledger knows of them: torch's own count does. Gradients leave before the two are compared."""
    monkeypatch.setattr(ledger, "TOLERANCE_BYTES", MIB)
    torch.get_device_module("sim").reset_peak_memory_stats(0)  # else only what exceeds all of this process is seen
    model = Net(hungry(3 * MIB))
    with running(LAZY), Engine(model, AdamW(), **options(model)) as engine:
        train(engine)
        model.between = hungry(9 * MIB)
        with pytest.raises(
            offload.BudgetError, match=r"took [89]\.\d\d MiB of activations and temporaries as measured but 4.00"
        ):
            train(engine)


def test_a_loss_that_is_not_finite_is_refused_by_the_step() -> None:
    """Not by backward, as on the CPU: looking at it would wait for the forward."""
    model = Net()
    with running(LAZY), Engine(model, AdamW(), **options(model)) as engine:
        before = engine.state_dict()
        engine.backward(engine(batch(0, 4, WIDTH).to("sim")).sum() * float("nan"))
        with pytest.raises(offload.NonFiniteError, match="blocks.0"):
            engine.step()
        assert all(torch.equal(engine.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("where", ["a forward", "a backward pass"])
def test_a_full_device_is_told_with_what_holds_it(where: str) -> None:
    model = Net()
    with running(LAZY):
        with Engine(model, AdamW(), **options(model)) as engine:
            before = engine.state_dict()
            used = torch.get_device_module("sim").memory_allocated(0)
            with limit(used + 8 * MIB):
                model.between = hungry(64 * MIB) if where == "a forward" else Greedy.apply
                with pytest.raises(offload.BudgetError) as caught:
                    train(engine)
            assert isinstance(caught.value, torch.OutOfMemoryError)  # who looks for torch's finds it
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
            text = str(caught.value)
            for part in (
                f"sim:0 has no room for {where}",
                "the device budget is 4.0",
                "held: arena",
                "free by the driver",
            ):
                assert part in text
            assert "torch has handed out" in text and "Torch says: sim:0 is out of memory" in text
            model.between = lambda x: x
            after = engine.state_dict()
            assert all(torch.equal(after[name], value) for name, value in before.items())
            train(engine)


def test_an_arena_for_which_the_device_has_no_room_is_told(tmp_path: Path) -> None:
    model = Net()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    used = torch.get_device_module("sim").memory_allocated(0)
    with limit(used + 4096), pytest.raises(offload.BudgetError, match="sim:0 has no room for .* of parameters"):
        Engine(model, AdamW(), **options(model))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize(("reserved", "advised"), [(None, False), (10 * MIB, False), (64 * MIB, True)])
def test_memory_in_pieces_is_advised_against(
    reserved: int | None, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.memory.device_memory import device_full

    module = torch.get_device_module("sim")
    monkeypatch.setattr(module, "memory_allocated", lambda place: 10 * MIB)
    if reserved is not None:
        monkeypatch.setattr(module, "memory_reserved", lambda place: reserved, raising=False)
    error = device_full(
        torch.OutOfMemoryError("no"), torch.device("sim", 0), what="a forward", limit_bytes=MIB, held={"arena": MIB}
    )
    assert ("expandable_segments" in str(error)) is advised


def test_an_allocator_of_the_users_may_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pluggable allocators refuse to say: nothing is measured then, and a full device is told as ever."""

    def refuse(place: object) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    def trained() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Net()
        with running(LAZY) as seen, Engine(model, AdamW(), **options(model)) as engine:
            train(engine)
            found = engine.state_dict()
        assert seen.races == []
        return found

    module = torch.get_device_module("sim")
    truth, used = trained(), module.memory_allocated(0)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        monkeypatch.setattr(module, name, refuse, raising=False)
    ours = trained()
    assert all(torch.equal(ours[name], value) for name, value in truth.items())
    model = Net(hungry(64 * MIB))
    with running(LAZY), limit(used + 8 * MIB), Engine(model, AdamW(), **options(model)) as engine:
        with pytest.raises(offload.BudgetError, match=r"no room for a forward.*free by the driver\. Lower"):
            train(engine)


# --- seconds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_clock", [False, True])
def test_seconds_are_the_devices_where_it_has_a_clock(has_clock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clocked(torch.Event):
        """Each takes a second more than the one before."""

        count = 0

        def __new__(cls, *args: Any, enable_timing: bool = False, **options: Any) -> Clocked:
            return super().__new__(cls, *args, **options)  # type: ignore[no-any-return]

        def record(self, stream: torch.Stream | None = None) -> None:
            Clocked.count += 1
            self.at_s = Clocked.count
            super().record(stream)

        def elapsed_time(self, end: Any) -> float:
            if not has_clock:
                raise RuntimeError("events have no time")
            return (end.at_s - self.at_s) * 1e3  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "Event", Clocked)
    model = Net()
    with running(LAZY), Engine(model, AdamW(), **options(model)) as engine:
        for _ in range(2):
            train(engine)
        torch.accelerator.synchronize(engine.device)
        links = engine.stats().links
        passes = 4  # two forwards, two backwards: of each at least a second, and whole ones
        if has_clock:
            assert links["compute"].seconds >= passes and links["compute"].seconds == int(links["compute"].seconds)
            assert links["h2d"].seconds >= 1 and links["d2h"].seconds >= 1
        else:
            assert links["h2d"].seconds == links["d2h"].seconds == 0 < links["compute"].seconds < passes
        assert links["h2d"].bytes > 0 and links["d2h"].bytes > 0
