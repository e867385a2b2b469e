"""Seconds of a step beside an accelerator: what the formula says, and what the engine takes by the clock."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulated.engine import engine_clock, untouched
from simulated.figures import Figures, watched
from test_simulated_clock_engine import llama
from torch import nn

import offload
from offload import AdamW, Config, Engine
from offload.planning.hardware import DESKTOP, H200, Hardware
from offload.planning.lanes import COMPUTE, D2H, H2D, READ, TAKE, UPDATE, WRITE, Lanes, Moment, Process
from offload.planning.partition import find_units
from offload.planning.played_activations import PlayedActivations, Saved
from offload.planning.timing import Timing, timing_of
from offload.planning.waits import Gradient, awaited_of
from offload.planning.work import work_of
from offload.request import unit_bytes_of

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 32768}


@dataclasses.dataclass(frozen=True)
class Case:
    """Homes of parameters and states on a machine, and tokens of one of so many micro-batches.

    With `rooms`, activations leave: bytes of the device, of host memory and of the drive for them. Nothing is
    checkpointed then.
    """

    machine: Hardware
    param: str
    states: str
    tokens: int
    micro_batches: int = 1
    clips: bool = False
    host: float = 0.9  # of host memory
    rooms: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        text = f"{self.machine.name} {self.param} {self.states} {self.micro_batches}x{self.tokens}"
        text += " clips" * self.clips + (f" {self.host:g}" if self.host < 0.9 else "")
        return text + ("" if self.rooms is None else " ".join((" activations", *self.rooms)))


CASES = [
    Case(DESKTOP, "cpu", "cpu", 6144),
    Case(DESKTOP, "cpu", "cpu", 16384),
    Case(DESKTOP, "cpu", "cpu", 6144, host=0.075),  # without spare memory
    Case(H200, "none", "cpu", 8192),
    Case(H200, "cpu", "cpu", 16384),
    Case(DESKTOP, "cpu", "nvme", 24576),
    Case(DESKTOP, "nvme", "nvme", 24576),
    Case(DESKTOP, "cpu", "nvme", 8192, micro_batches=3),
    Case(DESKTOP, "cpu", "nvme", 24576, clips=True),
    Case(DESKTOP, "auto", "auto", 2048, host=0.052),  # one unit has states on NVMe
    Case(DESKTOP, "auto", "auto", 2048, clips=True, host=0.052),
    Case(DESKTOP, "auto", "auto", 2048, host=0.04),
    Case(H200, "none", "none", 8192),
    Case(H200, "none", "cpu", 16384, rooms=("60GiB", "100GiB", "0")),
    Case(H200, "none", "cpu", 8192, clips=True, rooms=("16GiB", "100GiB", "0")),
    Case(DESKTOP, "none", "cpu", 4096, rooms=("10GiB", "60GiB", "0")),
    Case(DESKTOP, "cpu", "cpu", 8192, rooms=("14GiB", "60GiB", "0")),
    Case(DESKTOP, "cpu", "nvme", 8192, rooms=("10GiB", "30GiB", "0")),
    Case(DESKTOP, "cpu", "cpu", 4096, rooms=("10GiB", "4GiB", "100GB")),
    Case(DESKTOP, "nvme", "nvme", 8192, rooms=("10GiB", "8GiB", "100GB")),
]


def net(case: Case) -> nn.Module:
    model = llama(**SIZES)
    if case.rooms:
        model.gradient_checkpointing_disable()
    return model


def activations_of(case: Case) -> dict[str, Any]:
    if case.rooms is None:
        return {}
    names = ("activation_memory", "activation_cpu_memory", "activation_nvme_memory")
    return {"activations": "offload", **dict(zip(names, case.rooms, strict=True))}


def by_clock_and_by_formula(case: Case) -> tuple[Figures, Timing]:
    machine = case.machine
    memory: dict[str, Any] = {
        "device": int(machine.device_bytes * 0.9),
        "cpu": int(machine.host_bytes * case.host),
    }
    with engine_clock(machine, dry=True, updates=case.states == "none") as watch, tempfile.TemporaryDirectory() as path:
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": case.param}
        options |= {"gradient_accumulation_steps": case.micro_batches, "max_grad_norm": 1e-3 if case.clips else None}
        if case.states in ("nvme", "auto") or (case.rooms and case.rooms[2] != "0"):
            memory["nvme"] = "400GB"
            options |= {"nvme_path": path}
        options |= activations_of(case)
        with Engine(untouched(net(case)), AdamW(lr=1e-3), offload_optimizer=case.states, **options) as engine:
            ids = torch.zeros(1, case.tokens, dtype=torch.int64, device="sim")

            def step() -> None:
                for _ in range(case.micro_batches):
                    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                    engine.step()

            took, plan = watched(watch, machine, step), engine.plan
            engine.close(restore=False)
    model = net(case)
    model.config.use_cache = False
    if case.rooms:  # which are rehearsed
        options |= {"offload_param": case.param, "offload_optimizer": case.states, "nvme_path": None, "device": "cuda"}
        told = offload.plan(model, optimizer=AdamW(lr=1e-3), batch=(1, case.tokens), hardware=machine, **options)
        return took, told.timing
    tree = find_units(model, max_unit_bytes=unit_bytes_of(Config(), memory["device"]))
    work = work_of(model, (1, case.tokens), tree=tree)
    return took, timing_of(plan, work, machine, micro_batches=case.micro_batches, clips=case.clips)


@pytest.mark.usefixtures("sim", "single_torch_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_is_what_the_clock_says(case: Case) -> None:
    took, told = by_clock_and_by_formula(case)
    assert told.step_s == pytest.approx(took.step_s, rel=0.05)


@pytest.mark.usefixtures("sim", "single_torch_thread")
@pytest.mark.parametrize(("micro_batches", "host"), [(1, 0.015), (3, 0.02)])
def test_gradients_at_home_on_the_drive_are_read_and_written_by_each_micro_batch(
    micro_batches: int, host: float
) -> None:
    """As the clock has it: bytes to the last one, and seconds. All states are there, too: 0.9 G of 10 bytes."""
    took, told = by_clock_and_by_formula(Case(DESKTOP, "cpu", "nvme", 8192, micro_batches=micro_batches, host=host))
    assert told.moved.drive_write > 10e9
    moved = took.moved_bytes
    assert (moved["drive read"], moved["drive write"]) == (told.moved.drive_read, told.moved.drive_write)
    assert told.step_s == pytest.approx(took.step_s, rel=0.05)


# --- gradients and lanes, by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "awaited"),
    [
        (100, set()),  # nobody waits before the step
        (14, {2}),  # the second unit waits for all of the first one
        (9, {1, 2, 4}),  # and within a unit, what has come of it leaves together
        (4, {0, 1, 2, 3, 4}),  # one at a time
    ],
)
def test_the_host_waits_for_gradients_when_the_next_one_has_no_room(room: int, awaited: set[int]) -> None:
    come = [Gradient(unit, 1.0, 1 / 3, size) for unit in (1, 0) for size in (4, 4, 2)]
    assert awaited_of(come, room) == awaited


class Two(nn.Module):
    """Two products of one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 4, bias=False), nn.Linear(4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, 2)."""
        out: torch.Tensor = self.second(self.first(x))
        return out


def test_gradients_come_in_the_order_of_backward_behind_their_products() -> None:
    """A product of the second layer takes 48 operations, and that of the first 192: nobody asks for its input's."""
    model = nn.Sequential(Two(), nn.Linear(2, 2))
    work = work_of(model, [torch.ones(3, 8)], tree=find_units(model, max_unit_bytes=1 << 20))
    assert work.parts is not None
    assert {unit: part.gradients for unit, part in work.parts[1].items()} == {
        0: ((8, pytest.approx(96 / 288)), (32, 1.0)),
        1: ((2, 1.0), (4, 1.0)),
    }
    assert not any(part.gradients for part in work.parts[0].values())


def played(*processes: Process, lanes: Lanes) -> float:
    """Return when all have ended."""
    for process in processes:
        lanes.begin(process)
    lanes.run()
    return lanes.now_s


def job(lane: str, amount: float) -> Process:
    yield lane, amount


def test_lanes_go_side_by_side_and_each_does_one_job_at_a_time() -> None:
    lanes = Lanes(DESKTOP)
    assert played(job(H2D, 25e9), job(H2D, 25e9), job(COMPUTE, 1.5), lanes=lanes) == pytest.approx(2.0)


def test_copies_take_host_memory_from_updates_and_gradients_share_the_cpu() -> None:
    """Alone 62.72 GB/s; beside a copy at 25 GB/s, 46.68 GB/s are left."""
    assert played(job(UPDATE, 62.72e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.0)
    assert played(job(UPDATE, 46.68e9), job(D2H, 25e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.0)
    assert played(job(UPDATE, 31.36e9), job(TAKE, 31.36e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.0)


def test_reads_and_writes_share_the_drive() -> None:
    """7 GB/s and 5 GB/s alone, 6 GB/s together: 3.5 and 2.5."""
    assert played(job(READ, 7e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.0)
    assert played(job(READ, 3.5e9), job(WRITE, 2.5e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.0)
    assert played(job(READ, 7e9), job(WRITE, 2.5e9), lanes=Lanes(DESKTOP)) == pytest.approx(1.5)


SAVED = {0: 4_000_000_000, 1: 4_000_000_000}  # bytes that two units keep


def turned(saved: Saved, forward_s: float, backward_s: float, *, steps: int = 3) -> tuple[float, float, float]:
    """Return the seconds of the last forward and backward, and what has stayed."""
    lanes = Lanes(DESKTOP)
    activations, times = PlayedActivations(lanes, DESKTOP, saved), [0.0]

    def passes() -> Process:
        for _ in range(steps):
            for index in saved.kept_bytes:
                yield from activations.forward(index, forward_s / 2)
            times.append(lanes.now_s)
            activations.turn()
            for index in reversed(saved.kept_bytes):
                yield from activations.backward(index, backward_s / 2)
            times.append(lanes.now_s)

    played(passes(), lanes=lanes)
    assert len(times) == 2 * steps + 1
    return times[-2] - times[-3], times[-1] - times[-2], activations.stayed_bytes


SIZE = st.one_of(st.integers(0, 3), st.integers(0, 10**11))


@given(
    st.lists(SIZE, min_size=1, max_size=5), SIZE, st.floats(0, 1), SIZE, st.booleans(), st.sampled_from([0, 1e-6, 1])
)
def test_activations_of_any_size_come_to_an_end(
    kept: list[int], near: int, last_share: float, host: int, has_drive: bool, compute_s: float
) -> None:
    """Nobody waits for ever, and no room is left taken."""
    saved = Saved(dict(enumerate(kept)), near, int(near * last_share), host, host * 3 // 4 if has_drive else host)
    lanes = Lanes(DESKTOP)
    activations, done = PlayedActivations(lanes, DESKTOP, saved), list[int]()

    def passes() -> Process:
        for number in range(3):
            activations.turn()
            for index in reversed(range(len(kept) + 1)):  # one of them keeps nothing
                yield from activations.backward(index, compute_s)
            for index in range(len(kept) + 1):
                yield from activations.forward(index, compute_s / 2)
            done.append(number)
        activations.turn()
        for index in reversed(range(len(kept))):
            yield from activations.backward(index, compute_s)

    played(passes(), lanes=lanes)
    assert done == [0, 1, 2]
    assert (activations._near, activations._host, activations._resting_bytes) == (0, 0, 0)


def test_activations_go_beside_compute_or_hold_it_up() -> None:
    """Of 8 GB, one stays and one more may be under way, at 25 GB/s."""
    saved = Saved(SAVED, int(2e9), int(1e9), int(100e9), int(100e9))
    forward_s, backward_s, stayed = turned(saved, 1.0, 2.0)
    assert (forward_s, backward_s) == pytest.approx((1.0, 2.0)) and stayed <= 0.25e9
    forward_s, backward_s, stayed = turned(saved, 0.1, 0.1)
    assert stayed == pytest.approx(1e9, rel=0.3)
    assert forward_s == pytest.approx((8e9 - 1e9 - stayed) / 25e9, rel=0.15)
    assert backward_s == pytest.approx((8e9 - 1e9 - stayed) / 25e9, rel=0.15)


def test_activations_that_host_memory_has_no_room_for_wait_for_the_drive() -> None:
    """Of 8 GB, seven leave: behind four, the drive begins at 5 GB/s, and two have to be written for the last."""
    saved = Saved(SAVED, int(2e9), int(1e9), int(5e9), int(4e9))
    forward_s, backward_s, _ = turned(saved, 0.1, 0.1)
    assert forward_s == pytest.approx(4e9 / 25e9 + 2e9 / 5e9, rel=0.1)
    assert (8e9 - 2e9) / 25e9 < backward_s < (8e9 - 2e9) / 25e9 + 2e9 / 3e9


def test_a_process_waits_for_a_moment() -> None:
    lanes, moment = Lanes(DESKTOP), Moment()

    def first() -> Process:
        yield COMPUTE, 1.0
        lanes.come(moment)

    def second() -> Process:
        yield moment
        yield H2D, 25e9
        yield moment
        yield COMPUTE, 0.0

    assert played(second(), first(), lanes=lanes) == pytest.approx(2.0)
