"""The engine by the clock: dry runs beside real ones, the same run twice, where time goes, and models of full size."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import UNIT_BYTES, working_bytes
from simulated.clock import Actor, Drive, Operation, now, operations, spend
from simulated.engine import Cpu, engine_clock, untouched
from simulated.figures import Figures, watched
from torch import nn

from offload import AdamW, Engine
from offload.memory.accelerator import AcceleratorMover
from offload.memory.arena import Buffer
from offload.memory.transfer import Ticket
from offload.planning.hardware import DESKTOP, H200
from offload.shards.working_set import WorkingSet

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MIB = 1 << 20
HERE = Path(__file__).parent


def llama(**sizes: Any) -> nn.Module:
    """Return a Llama on the meta device, with gradient checkpointing."""
    import transformers

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, **sizes}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 200}
MIDDLE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 8192}


def trained(
    home: str, clip: float | None, micro_batches: int, *, dry: bool, units: int = 3
) -> tuple[list[Operation], int]:
    """Return what three steps of a tiny Llama did, and how many units were updated during backward.

    The device has room for the parameters of so many `units`.
    """
    model = llama(**TINY)
    if dry:
        untouched(model)
    else:
        torch.manual_seed(0)
        model.to_empty(device="cpu").apply(model._init_weights)
    with engine_clock(DESKTOP, dry=dry), tempfile.TemporaryDirectory() as folder:
        memory: dict[str, Any] = {
            "device": MIB + working_bytes(model, units=units, unit_bytes=UNIT_BYTES),
            "cpu": "16MiB",
        }
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "unit_bytes": UNIT_BYTES}
        options |= {"activation_memory": MIB, "offload_param": home, "offload_optimizer": home}
        options |= {"max_grad_norm": clip, "gradient_accumulation_steps": micro_batches}
        if home == "nvme":
            memory["nvme"] = "64MiB"
            options["nvme_path"] = folder
        ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0)).to("sim")
        with Engine(model, AdamW(lr=1e-3), **options) as engine:
            operations()
            for _ in range(3):
                for _ in range(micro_batches):
                    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                    engine.step()
            done, early = operations(), engine.stats().early_units
            engine.close(restore=False)
    return done, early


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("home", "clip", "micro_batches"), [("cpu", None, 2), ("cpu", 1e-4, 1), ("nvme", None, 1), ("nvme", 1e-4, 2)]
)
def test_dry_and_real_runs_do_the_same_at_the_same_times(home: str, clip: float | None, micro_batches: int) -> None:
    """Each operation, copy, kernel of the CPU, read and write: its lane, its bytes, its begin and end."""
    dry, early = trained(home, clip, micro_batches, dry=True)
    real = trained(home, clip, micro_batches, dry=False)
    assert dry == real[0] and early == real[1]
    assert (early > 0) == (clip is None)
    lanes = {"compute", "h2d", "d2h", "cpu"} | ({"drive read", "drive write"} if home == "nvme" else set())
    assert {done.lane for done in dry} == lanes


def test_new_parameters_are_not_read_from_the_drive_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of units that are updated behind the step; there is room for all, and nothing else moves more or less."""
    fill, filled = AcceleratorMover.fill, list[int]()

    def note(self: AcceleratorMover, source: int, target: Buffer, offset_bytes: int, size_bytes: int) -> Ticket:
        filled.append(size_bytes)
        return fill(self, source, target, offset_bytes, size_bytes)

    def moved(lane: str) -> int:
        return sum(each.size_bytes for each in done if each.lane == lane)

    monkeypatch.setattr(AcceleratorMover, "fill", note)
    done, _ = trained("nvme", 1e-4, 1, dry=True, units=100)
    ours = {lane: moved(lane) for lane in ("drive read", "drive write", "h2d", "d2h")}
    monkeypatch.setattr(WorkingSet, "begin_to_fill", lambda *_: False)
    done, _ = trained("nvme", 1e-4, 1, dry=True, units=100)
    assert filled
    ours["drive read"] += sum(filled)
    assert ours == {lane: moved(lane) for lane in ours}


def test_what_updates_have_filled_gives_way_though_states_are_on_their_way_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has room for three blocks of eight, and all states of a step fit into staging, where they stay long.

    Parameters are written before states, so that what is filled can go. Otherwise a unit in three is filled.
    """
    fill, filled = AcceleratorMover.fill, list[int]()

    def note(self: AcceleratorMover, source: int, target: Buffer, offset_bytes: int, size_bytes: int) -> Ticket:
        filled.append(size_bytes)
        return fill(self, source, target, offset_bytes, size_bytes)

    monkeypatch.setattr(AcceleratorMover, "fill", note)
    model: Any = untouched(llama(**{**MIDDLE, "num_hidden_layers": 8}))
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    most = 2 * model.lm_head.weight.nbytes + 3 * block
    with engine_clock(DESKTOP, dry=True), tempfile.TemporaryDirectory() as folder:
        memory = {"device": 1024 * MIB + most, "cpu": "8GiB", "nvme": "32GiB"}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "activation_memory": 1024 * MIB}
        options |= {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": folder, "max_grad_norm": 1e-4}
        with Engine(model, AdamW(lr=1e-3), **options) as engine:
            ids = torch.zeros(1, 512, dtype=torch.int64, device="sim")
            for _ in range(3):
                engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                engine.step()
            engine.drain()
            engine.close(restore=False)
    assert sum(filled) > 0.6 * 3 * sum(parameter.nbytes for parameter in model.parameters())


def test_a_run_depends_on_nothing_of_its_process() -> None:
    """Equal to the last digit: the same again, and in a process whose hashes have another seed."""
    code = """
        import simulated
        simulated.load()
        from test_simulated_clock_engine import digest
        print(digest())
    """
    ours = digest()
    assert digest() == ours
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == ours, done.stderr


def digest() -> str:
    """Return what tells of all that a run did."""
    return hashlib.sha256(repr(trained("nvme", None, 1, dry=True)).encode()).hexdigest()


def engine_figures(
    sizes: dict[str, Any], tokens: int, home: str, *, updates: bool, trains: bool = True, states: str = "cpu"
) -> Figures:
    """Return the figures of an engine, with parameters and states on the device ("none") or in host memory."""
    with engine_clock(H200, dry=True, updates=states == "none") as watch:
        model = untouched(llama(**sizes))
        memory = {"device": int(H200.device_bytes * 0.9), "cpu": int(H200.host_bytes * 0.9)}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": home}
        with Engine(model, AdamW(lr=1e-3), offload_optimizer=states, **options) as engine:
            ids = torch.zeros(1, tokens, dtype=torch.int64, device="sim")

            def step() -> None:
                with torch.set_grad_enabled(trains):
                    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
                if trains:
                    engine.backward(loss)
                    engine.step() if updates else engine.zero_grad()

            figures = watched(watch, H200, step)
            engine.close(restore=False)
    return figures


def plain_figures(sizes: dict[str, Any], tokens: int, *, trains: bool = True) -> Figures:
    """Return the figures of plain torch, everything on the device, without updates."""
    with engine_clock(H200, dry=True) as watch:
        model = llama(**sizes).to_empty(device="sim")
        ids = torch.zeros(1, tokens, dtype=torch.int64, device="sim")

        def step() -> None:
            with torch.set_grad_enabled(trains):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if trains:
                loss.backward()
                model.zero_grad()

        return watched(watch, H200, step)


def test_an_evaluation_of_what_is_resident_takes_what_plain_torch_takes() -> None:
    ours = engine_figures(MIDDLE, 32768, "none", updates=False, trains=False)
    plain = plain_figures(MIDDLE, 32768, trains=False)
    assert ours.busy_s["compute"] == pytest.approx(plain.busy_s["compute"])
    assert ours.step_s <= 1.02 * plain.step_s


def test_with_states_on_the_device_it_waits_for_nothing() -> None:
    """Compute, what updates read and write, and the copy of what was measured; no more.

    Per parameter, a gradient is measured (2 bytes), and updated with it (2) are both halves of the master (2 + 2) and
    the moments (4 + 4), which are read and written.
    """
    figures = engine_figures(MIDDLE, 32768, "none", updates=True, states="none")
    assert figures.used > 0.99
    numel = sum(parameter.numel() for parameter in llama(**MIDDLE).parameters())
    more = figures.moved_bytes["compute"] - plain_figures(MIDDLE, 32768).moved_bytes["compute"]
    assert more / numel == pytest.approx(2 + 2 + 2 * 12, rel=1e-3)
    assert set(figures.moved_bytes) == {"compute", "d2h"} and figures.moved_bytes["d2h"] < 4096


@pytest.mark.parametrize("vocabulary", [256, 16384])
def test_what_goes_beside_the_end_of_a_backward_pass(vocabulary: int) -> None:
    """The device is slower than the CPU here, and the host far ahead: it waits in the step, or for the ring before.

    So all units but the last ones are updated when the step begins. Then the forward waits for the embedding's update,
    and what is fetched meanwhile takes bandwidth from it: two units, until they are there.
    """
    sizes = {**MIDDLE, "num_hidden_layers": 8, "vocab_size": vocabulary}
    with engine_clock(DESKTOP, dry=True):
        model = untouched(llama(**sizes))
        memory = {"device": int(DESKTOP.device_bytes * 0.9), "cpu": int(DESKTOP.host_bytes * 0.9)}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": "cpu"}
        with Engine(model, AdamW(lr=1e-3), offload_optimizer="cpu", **options) as engine:
            ids = torch.zeros(1, 16384, dtype=torch.int64, device="sim")
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                before = engine.stats().early_units
                operations()
                engine.step()
            units, early = engine.plan.request.units, engine.stats().early_units - before
            engine(input_ids=ids, use_cache=False)
            done = operations()
            engine.close(restore=False)
    assert early >= len(units) - 2
    embedding = next(each.begin for each in done if each.name == "index_select")
    fetched = sum(each.size_bytes for each in done if each.lane == "h2d" and each.begin < embedding)
    assert fetched <= units[0].param_bytes + 4 * units[1].param_bytes, "and two more that follow those"


@pytest.mark.parametrize("home", ["none", "cpu"])
def test_the_time_of_the_device_is_told_to_the_last_part(home: str) -> None:
    figures = engine_figures(MIDDLE, 4096, home, updates=True)
    assert figures.busy_s["compute"] + sum(figures.idle_s["compute"].values()) == pytest.approx(figures.step_s)
    assert 0 < figures.used <= 1 and 0 < figures.reached <= 1
    assert figures.moved_bytes["h2d"] > 0 and figures.moved_bytes["d2h"] > 0


def test_parameters_on_the_device_come_back_unit_by_unit() -> None:
    """Each unit is sent once, from its spare memory, also where the next forward updates it: chunks would be more."""
    model = llama(**MIDDLE)
    with engine_clock(H200, dry=True):
        memory = {"device": int(H200.device_bytes * 0.9), "cpu": int(H200.host_bytes * 0.9)}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": "none"}
        with Engine(untouched(model), AdamW(lr=1e-3), offload_optimizer="cpu", **options) as engine:
            ids = torch.zeros(1, 8192, dtype=torch.int64, device="sim")
            early = []
            for _ in range(3):
                operations()
                engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                engine.step()
                early.append(engine.stats().early_units)
            engine(input_ids=ids, labels=ids, use_cache=False)
            sent = sorted(each.size_bytes for each in operations() if each.lane == "h2d" and each.size_bytes > MIB)
            units = sorted(unit.param_bytes for unit in engine.plan.request.units if unit.param_bytes > MIB)
            engine.close(restore=False)
    assert 0 < early[2] - early[1] < len(units), "the forward updates some"
    assert set(sent) == set(units)


def test_figures_are_work_over_time() -> None:
    figures = Figures(4.0, {"compute": 3.0}, {"compute": 3.0, "drive": 3.6}, {}, {}, {}, (1,), 0)
    assert figures.used == 0.75 and figures.binding == "drive" and figures.reached == 0.9


def test_kernels_share_host_memory_with_copies() -> None:
    """Alone at 62.72 GB/s; beside a copy at 25 GB/s, of 71.68 GB/s are left 46.68."""
    size = 100_000_000
    assert DESKTOP.update_bytes_s == pytest.approx(62.72e9) and DESKTOP.host_bytes_s == pytest.approx(71.68e9)
    for copies, rate in ((False, 62.72e9), (True, 46.68e9)):
        with engine_clock(DESKTOP, dry=True):
            cpu = Cpu(DESKTOP)
            if copies:
                host = torch.empty(size, dtype=torch.uint8).pin_memory()
                device = torch.empty(size, dtype=torch.uint8, device="sim")
                device.copy_(host, non_blocking=True)
                spend(1e-4)  # it has begun
            begin = now()
            cpu.run("kernel", 62.72e6)  # within the 4 ms of the copy
            assert now() - begin == pytest.approx(62.72e6 / rate, rel=1e-3)


def test_a_copy_that_begins_beside_a_kernel_takes_of_what_is_left_of_it() -> None:
    """Half of a millisecond goes by at 62.72 GB/s; 46.68 GB/s are left for the other half of the bytes."""
    host = torch.empty(100_000_000, dtype=torch.uint8).pin_memory()
    with engine_clock(DESKTOP, dry=True):
        cpu, begin = Cpu(DESKTOP), now()
        device = torch.empty(host.numel(), dtype=torch.uint8, device="sim")

        def copy(actor: Actor) -> None:
            actor.sleep(begin + 5e-4)
            device.copy_(host, non_blocking=True)

        copies = Actor("copies", copy)
        cpu.run("kernel", 62.72e6)
        assert now() - begin == pytest.approx(5e-4 + 31.36e6 / 46.68e9, rel=0.01)
        copies.join()


def test_what_a_drive_moves_beside_a_kernel_takes_of_its_memory() -> None:
    """20 GB/s leave 51.68."""
    with engine_clock(DESKTOP, dry=True):
        cpu = Cpu(DESKTOP)
        drive = Drive(read=20e9, write=1e9, mixed=1e9, latency_s=0.0)
        cpu.drives.append(drive)
        drive.start("read", 100_000_000)
        begin = now()
        cpu.run("kernel", 62.72e6)
        assert now() - begin == pytest.approx(62.72e6 / 51.68e9, rel=0.01)
        drive.close()


def test_kernels_of_two_threads_share_the_memory() -> None:
    ends = list[float]()
    with engine_clock(DESKTOP, dry=True):
        cpu = Cpu(DESKTOP)

        def work(actor: Actor) -> None:
            cpu.run("kernel", 62.72e6)
            ends.append(now())

        begin, actors = now(), [Actor(str(number), work) for number in range(2)]
        for actor in actors:
            actor.join()
    assert ends == pytest.approx([begin + 2e-3] * 2, rel=0.05)


def test_a_model_of_full_size_takes_no_memory() -> None:
    """70 B parameters: 140 GB, with states 1.1 TB."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    machine = dataclasses.replace(H200, host_bytes=2e12)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with engine_clock(machine, dry=True):
        model = untouched(llama(**sizes, num_attention_heads=64, num_key_value_heads=8))
        memory = {"device": "60GB", "cpu": int(machine.host_bytes)}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "offload_param": "cpu"}
        with Engine(model, AdamW(lr=1e-3), offload_optimizer="cpu", **options) as engine:
            ids = torch.zeros(1, 1024, dtype=torch.int64, device="sim")
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
            engine.close(restore=False)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 1 << 20  # of 1024 bytes
