"""Seconds of a step beside an accelerator: what the formula says, and what the engine takes by the clock."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import pytest
import torch
from simulated.engine import engine_clock, untouched
from simulated.figures import watched
from test_simulated_clock_engine import llama

from offload import AdamW, Config, Engine
from offload.planning.hardware import DESKTOP, H200, Hardware
from offload.planning.lanes import COMPUTE, D2H, H2D, READ, TAKE, UPDATE, WRITE, Lanes, Moment, Process
from offload.planning.partition import find_units
from offload.planning.timing import timing_of
from offload.planning.work import work_of
from offload.request import unit_bytes_of

SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 32768}


@dataclasses.dataclass(frozen=True)
class Case:
    """Homes of parameters and states on a machine, and tokens of one of so many micro-batches."""

    machine: Hardware
    param: str
    states: str
    tokens: int
    micro_batches: int = 1
    clips: bool = False
    host: float = 0.9  # of host memory

    def __str__(self) -> str:
        text = f"{self.machine.name} {self.param} {self.states} {self.micro_batches}x{self.tokens}"
        return text + " clips" * self.clips + (f" {self.host:g}" if self.host < 0.9 else "")


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
    Case(H200, "none", "none", 8192),
]


def by_clock_and_by_formula(case: Case) -> tuple[float, float]:
    machine = case.machine
    memory: dict[str, Any] = {
        "device": int(machine.device_bytes * 0.9),
        "cpu": int(machine.host_bytes * case.host),
    }
    with engine_clock(machine, dry=True, updates=case.states == "none") as watch, tempfile.TemporaryDirectory() as path:
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": case.param}
        options |= {"gradient_accumulation_steps": case.micro_batches, "max_grad_norm": 1e-3 if case.clips else None}
        if case.states == "nvme":
            memory["nvme"] = "400GB"
            options |= {"nvme_path": path}
        with Engine(untouched(llama(**SIZES)), AdamW(lr=1e-3), offload_optimizer=case.states, **options) as engine:
            ids = torch.zeros(1, case.tokens, dtype=torch.int64, device="sim")

            def step() -> None:
                for _ in range(case.micro_batches):
                    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                    engine.step()

            took_s, plan = watched(watch, machine, step).step_s, engine.plan
            engine.close(restore=False)
    model = llama(**SIZES)
    tree = find_units(model, max_unit_bytes=unit_bytes_of(Config(), memory["device"]))
    model.config.use_cache = False
    work = work_of(model, (1, case.tokens), tree=tree)
    told = timing_of(plan, work, machine, micro_batches=case.micro_batches, clips=case.clips)
    return took_s, told.step_s


@pytest.mark.usefixtures("sim", "single_torch_thread")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_formula_is_what_the_clock_says(case: Case) -> None:
    took_s, told_s = by_clock_and_by_formula(case)
    assert told_s == pytest.approx(took_s, rel=0.05)


# --- lanes, by hand -----------------------------------------------------------------------------------------------


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
