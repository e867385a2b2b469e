"""Activations that leave a device whose memory is its own: the same bits however late or early copies are."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_equal, everything_on_device
from harness import run as train
from simulated import EAGER, LAZY, Schedule, at_random, fixed, running
from simulated.instead import MOVER_STREAMS
from test_leaving import MIB, WIDTH, loss_of, net, options, rows
from test_leaving import small_ones_leave as small_ones_leave  # a fixture
from test_simulated_mutations import leave_out
from torch import nn

import offload
from offload.activations import ledger
from offload.errors import StateError
from offload.module import gradient_hooks

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread", "small_ones_leave")

ACTIVATION = 64 << 10  # bytes


class Calm(nn.Module):
    """Without chance, whose bits are a device's own."""

    def __init__(self, checkpointing: bool | None) -> None:
        super().__init__()
        self.net = net(checkpointing)
        for block in self.net.blocks:
            block[-1] = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


ACCELERATOR, LEAVING = "offload.memory.accelerator", "offload.activations.leaving"
# what is left out -> module, function, its text, what is there instead
WAITS = {
    "a storage leaves behind compute that makes it": (
        ACCELERATOR, "AcceleratorMover.save",
        "self._follow(stream, [*self._ordering.computed(), self._device.event()])", "pass",
    ),
    "it comes back behind who had the memory before": (
        ACCELERATOR, "AcceleratorMover.restore", "self._follow(self._ahead, [self._device.event()])", "pass"
    ),
    "compute waits until it is there": (
        ACCELERATOR, "_Restored.use", "self._device.current_stream().wait_event(self._event)", "pass"
    ),
    "its memory stays until the copy is over": (
        LEAVING, "LeavingActivations._begin_going", "record.going = ticket, held",
        "record.going = ticket, SavedActivation(torch.empty(1), None)",
    ),
}  # fmt: skip

MODES = {
    "offload": [("none", {"activation_cpu_memory": "8MiB", "activation_nvme_memory": 0})]
    + [("cpu", {"activation_cpu_memory": "512KiB", "activation_nvme_memory": "8MiB"})],
    "recompute": [(home, {"activations": "recompute"}) for home in ("none", "cpu", "nvme")],
}
OTHERS = [each for each in (*fixed(MOVER_STREAMS), at_random(0), at_random(1)) if each not in (LAZY, EAGER)]
EACH = [LAZY, EAGER, *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)]


def run(place: str, checkpointing: bool | None, **given: Any) -> Any:
    data = [rows(number).to(place) for number in range(3)]
    return train(Calm(checkpointing), data, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **given)


@pytest.mark.few
@pytest.mark.parametrize(("mode", "checkpointing"), [("offload", None), ("offload", True), ("recompute", None)])
@pytest.mark.parametrize("schedule", EACH, ids=lambda each: each.name)
def test_the_same_bits_under_every_schedule(
    schedule: Schedule, mode: str, checkpointing: bool | None, tmp_path: Path
) -> None:
    truth = run("cpu", checkpointing, **everything_on_device())
    for home, room in MODES[mode]:
        with running(schedule) as seen:
            ours = run("sim", checkpointing, **options(tmp_path, home=home, device="sim", **room))
        ours.losses = [loss.cpu() for loss in ours.losses]
        assert_equal(ours, truth)
        assert seen.races == []
        if mode == "offload" and checkpointing is None:
            assert ours.stats.links["d2h"].bytes > MIB


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_seen(wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = run("cpu", None, **everything_on_device())
    leave_out(WAITS[wait], monkeypatch)
    room = {"activation_cpu_memory": "8MiB", "activation_nvme_memory": 0, "device": "sim"}
    same = False
    with running(LAZY) as seen, contextlib.suppress(offload.NonFiniteError, StateError):
        ours = run("sim", None, **options(tmp_path, **room))
        same = all(torch.equal(ours.parameters[name], truth.parameters[name]) for name in truth.parameters)
    assert seen.races or not same


class TwoStreams(nn.Module):
    """Every other block computes on a stream of its own."""

    def __init__(self, side: torch.Stream | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)
        )
        self.side = [side]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.side[0]
        for number, block in enumerate(self.blocks):
            if side is None or number % 2 == 0:
                x = x + block(x)
                continue
            current = torch.accelerator.current_stream()
            side.wait_stream(current)
            with side:
                y = x + block(x)
            current.wait_stream(side)
            y.record_stream(current)
            x.record_stream(side)
            x = y
        return x


class Branch(nn.Module):
    """A branch without parameters computes on a stream of its own, beside blocks of the other one."""

    def __init__(self, side: torch.Stream | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))
        self.side = [side]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side, current = self.side[0], torch.accelerator.current_stream() if self.side[0] else None
        x = self.blocks[0](x)
        if side is not None:
            side.wait_stream(current)
        with side or contextlib.nullcontext():
            a = torch.tanh(2 * torch.tanh(x))  # autograd alone keeps what the inner one has made
        b = x
        for block in self.blocks[1:]:
            b = b + block(b)
        if current is not None:
            current.wait_stream(side)
            a.record_stream(current)
            x.record_stream(side)
        return a + b


@pytest.mark.parametrize("schedule", [LAZY, EAGER, at_random(0)], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", [TwoStreams, Branch])
def test_streams_of_the_user(kind: type[TwoStreams] | type[Branch], schedule: Schedule, tmp_path: Path) -> None:
    """What has come back may lie in memory of the other stream, and is freed there.

    What another stream makes leaves when it is made: before the two meet, and though no parameter is used on that one.
    """
    data, rule = [rows(number) for number in range(3)], offload.AdamW(lr=1e-2)
    truth = train(kind(None), data, optimizer=rule, loss_of=loss_of, **everything_on_device())
    room = {"activation_cpu_memory": "8MiB", "activation_nvme_memory": 0, "device": "sim"}
    with running(schedule) as seen:
        model, there = kind(torch.Stream("sim:0")), [each.to("sim") for each in data]
        ours = train(model, there, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **options(tmp_path, **room))
    ours.losses = [loss.cpu() for loss in ours.losses]
    assert_equal(ours, truth)
    assert seen.races == []


class Hungry(Calm):
    """Takes `temporary` bytes more in its last unit."""

    class Last(nn.Linear):
        temporary = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.empty(self.temporary, dtype=torch.uint8, device=x.device)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(None)
        self.last = self.Last(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(x))


@pytest.mark.parametrize("short", [1, 3])
def test_less_is_near_where_temporaries_need_the_room(
    short: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four activations, two have to be there; if more than two are too many, the micro-batch is refused."""
    monkeypatch.setattr(ledger, "TOLERANCE_BYTES", 0)
    monkeypatch.setattr(gradient_hooks, "WORTH_SAMPLING_BYTES", 0)  # or the peak may be taken for that of gradients
    data, device = [rows(number) for number in range(3)], torch.get_device_module("sim")
    truth = train(Hungry(), data, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **everything_on_device())
    gc.collect()  # tensors of a test before, which would go in the middle of what is measured
    room: dict[str, Any] = {"activation_cpu_memory": "8MiB", "activation_nvme_memory": 0, "device": "sim"}
    room["max_memory"] = {"device": 4 * MIB, "cpu": "32MiB"}
    data = [each.to("sim") for each in data]
    device.reset_peak_memory_stats(0)
    model, before = Hungry(), device.memory_allocated(0)
    with running(LAZY), offload.Engine(model, offload.AdamW(lr=1e-2), **options(tmp_path, **room)) as engine:
        model.last.temporary = engine._parts.activations.room_bytes - (4 - short) * ACTIVATION
        for number, x in enumerate(data):
            loss = loss_of(engine, x)
            if short > 2:
                with pytest.raises(offload.BudgetError, match=r"took 4.01 MiB .* but 3.80 MiB are left"):
                    engine.backward(loss)
                return
            engine.backward(loss)
            engine.step()
            assert torch.equal(loss.detach().cpu(), truth.losses[number])
        assert device.max_memory_allocated(0) - before <= 4 * MIB, "since the first, after which it is counted anew"
    assert caplog.text.count("activations that leave take up to") == 1


class Holds(Hungry):
    """Somebody else has what its blocks have made, as long as the forward takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        for block in self.net.blocks:
            x = x + block(x)
            made.append(x)
        return self.last(x) + 0 * made[0]


@pytest.mark.parametrize(("kind", "host"), [(Hungry, "16KiB"), (Holds, "8MiB")])
def test_what_has_to_be_near_is_not_counted_on(
    kind: type[Hungry], host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What finds no room elsewhere is refused at once; what somebody else has, when it has taken too much again."""
    monkeypatch.setattr(ledger, "TOLERANCE_BYTES", 0)
    room: dict[str, Any] = {"activation_cpu_memory": host, "activation_nvme_memory": 0, "device": "sim"}
    room["max_memory"] = {"device": 4 * MIB, "cpu": "32MiB"}
    torch.get_device_module("sim").reset_peak_memory_stats(0)
    model, data = kind(), [rows(number).to("sim") for number in range(4)]
    with running(LAZY), offload.Engine(model, offload.AdamW(lr=1e-2), **options(tmp_path, **room)) as engine:
        model.last.temporary = engine._parts.activations.room_bytes - 8 * ACTIVATION
        for number, x in enumerate(data):
            try:
                engine.backward(loss_of(engine, x))
            except offload.BudgetError as error:
                assert "a micro-batch took" in str(error)
                assert number == 0 if kind is Hungry else number <= 2
                return
            engine.step()
    pytest.fail("a budget that was exceeded each time was told once")


class Beside(Calm):
    """Multiplies by what is computed, and differentiated, on the CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = torch.full((WIDTH, 512), 0.5, requires_grad=True).exp().sqrt().mean()
        return super().forward(x) * beside.to(x.device)


def test_what_is_saved_on_the_cpu_stays_there(tmp_path: Path) -> None:
    data = [rows(number) for number in range(3)]
    truth = train(Beside(None), data, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **everything_on_device())
    room = {"activation_cpu_memory": "8MiB", "activation_nvme_memory": 0, "device": "sim"}
    with running(LAZY) as seen:
        there = [each.to("sim") for each in data]
        ours = train(
            Beside(None), there, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **options(tmp_path, **room)
        )
    ours.losses = [loss.cpu() for loss in ours.losses]
    assert_equal(ours, truth)
    assert seen.races == []
