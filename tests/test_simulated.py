"""The simulated accelerator itself: what each schedule means, memory, copies, counters, and that races are found."""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import simulated
import torch
from simulated import EAGER, LAZY, Schedule, at_random, build, first, fixed, running
from torch import nn

pytestmark = pytest.mark.usefixtures("sim")

ALL = [*fixed(2), at_random(1)]
every_schedule = pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)


def compute(index: int = 0) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", index))


def ones(numel: int = 4) -> torch.Tensor:
    return torch.ones(numel, device="sim")


# --- schedules --------------------------------------------------------------------------------------------------------


def program() -> torch.Tensor:
    """Two side streams work on their own; the host waits for neither."""
    streams = [torch.Stream("sim:0") for _ in range(2)]
    x = ones()
    for stream in streams:
        stream.wait_stream(compute())
        with stream:
            x.add(1).record_stream(stream)
    return x


def test_eager_work_runs_at_once() -> None:
    with running(EAGER):
        program()
        assert simulated.pending() == {}


def test_lazy_work_waits_for_somebody() -> None:
    with running(LAZY) as run:
        x = program()
        assert set(simulated.pending()) == {"sim:0/0", "sim:0/1", "sim:0/2"}
        assert x.tolist() == [1.0] * 4
        assert set(simulated.pending()) == {"sim:0/1", "sim:0/2"}
        assert simulated.counts()["sim:0/1"]["kernels"] == 1
    assert any(line == "sim:0/1 add" for line in run.order)  # at the end


def test_first_streams_bring_what_they_wait_for() -> None:
    with running(first(1)):
        program()
        assert "sim:0/1" not in simulated.pending() and "sim:0/2" in simulated.pending()


def test_a_wait_brings_its_ancestors_alone() -> None:
    with running(LAZY) as run:
        side, other = torch.Stream("sim:0"), torch.Stream("sim:0")
        with side:
            x = ones().add(1)
        with other:
            ones()
        compute().wait_stream(side)
        x.mul(3)
        compute().synchronize()
        assert set(simulated.pending()) == {"sim:0/2"}
    names = [line for line in run.order if line.endswith(("add", "mul"))]
    assert names == ["sim:0/1 add", "sim:0/0 mul"]


def test_a_seed_gives_one_order() -> None:
    orders = []
    for seed in (0, 1, 1, 2):  # the first takes new memory
        with running(at_random(seed)) as run:
            for _ in range(10):
                program()
        orders.append(run.order)
    assert orders[1] == orders[2] != orders[3]


def test_unordered_operations_run_in_both_orders_in_some_schedules() -> None:
    seen = set()
    for schedule in fixed(2):
        with running(schedule) as run:
            a, b = torch.Stream("sim:0"), torch.Stream("sim:0")
            with a:
                x = ones().add(1)
            with b:
                y = ones().mul(2)
            compute().wait_stream(b), compute().wait_stream(a)
            x.add(y)
        seen.add(tuple(line for line in run.order if line in ("sim:0/1 add", "sim:0/2 mul")))
    assert len(seen) == 2


def test_events_answer() -> None:
    with running(LAZY):
        x, event = ones(), torch.Event("sim")
        assert event.query()  # nothing was recorded
        event.record(compute())
        assert not event.query()
        event.synchronize()
        assert event.query()
        assert x.device == torch.device("sim:0")


def test_a_host_that_spins_gets_on() -> None:
    with running(LAZY):
        ones().add(1)
        event = compute().record_event()
        assert any(event.query() for _ in range(1000))


# --- memory -----------------------------------------------------------------------------------------------------------


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    head = "import ctypes, simulated, torch\nsimulated.load()\n"
    here = Path(__file__).parent
    return subprocess.run([sys.executable, "-c", head + code], cwd=here, capture_output=True, text=True, check=False)


def test_the_host_cannot_touch_device_memory() -> None:
    assert run_apart("x = torch.ones(4, device='sim')\nprint(x.sum().item())").stdout == "4.0\n"
    done = run_apart("x = torch.ones(4, device='sim')\nctypes.string_at(x.data_ptr(), 4)")
    assert done.returncode == -signal.SIGSEGV


@every_schedule
def test_new_memory_is_nan(schedule: Schedule) -> None:
    with running(schedule) as run:
        assert torch.empty(1000, device="sim").isnan().all().item()
    assert run.races == []


def freed_under_a_reader(keep: bool) -> tuple[torch.Tensor, list[str]]:
    """A side stream reads what the default stream may have freed."""
    with running(first(0)) as run:
        side, x = torch.Stream("sim:0"), ones(1000)
        side.wait_stream(compute())
        with side:
            y = x.add(1)
        if keep:
            x.record_stream(side)
        del x
        side.synchronize()
        return y.cpu(), run.races or simulated.load().races()


def test_freed_memory_is_poisoned_in_stream_order() -> None:
    result, races = freed_under_a_reader(keep=False)
    assert result.isnan().all()
    assert races == ["free writes on sim:0/0 what add reads on sim:0/1"]
    result, races = freed_under_a_reader(keep=True)
    assert result.eq(2).all() and races == []


@every_schedule
def test_memory_is_reused_in_the_order_of_its_stream(schedule: Schedule) -> None:
    with running(schedule) as run:
        x = ones(1000)
        y, address = x.add(1), x.data_ptr()
        del x
        z = torch.zeros(1000, device="sim")
        assert z.data_ptr() == address
        assert y.eq(2).all().item() and z.eq(0).all().item()
    assert run.races == []


def test_a_limit_is_out_of_memory() -> None:
    used = torch.get_device_module("sim").memory_allocated()
    with simulated.limit(used + 10_000):
        kept = torch.empty(5_000, dtype=torch.uint8, device="sim")
        assert torch.get_device_module("sim").mem_get_info()[1] == used + 10_000
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory: 8192 bytes were wanted"):
            torch.empty(8_000, dtype=torch.uint8, device="sim")
        torch.empty(8_000, dtype=torch.uint8, device="sim:1")
        del kept
        torch.empty(8_000, dtype=torch.uint8, device="sim")


# --- copies -----------------------------------------------------------------------------------------------------------


def test_page_locked_memory_is_read_when_the_copy_runs() -> None:
    with running(LAZY):
        source = torch.ones(4).pin_memory()
        x = source.to("sim", non_blocking=True)
        source.zero_()
        assert x.tolist() == [0.0] * 4


def test_pageable_memory_is_read_within_the_call() -> None:
    with running(LAZY):
        source = torch.ones(4)
        x = source.to("sim", non_blocking=True)
        source.zero_()
        assert x.tolist() == [1.0] * 4


def test_only_copies_into_page_locked_memory_are_late() -> None:
    with running(LAZY) as run:
        x, late, now = ones(), torch.zeros(4).pin_memory(), torch.zeros(4)
        late.copy_(x, non_blocking=True)
        assert late.tolist() == [0.0] * 4
        now.copy_(x, non_blocking=True)
        assert now.tolist() == late.tolist() == [1.0] * 4
    assert run.total("blocking_copies") == 1


def test_page_locked_memory_is_kept_for_a_queued_copy() -> None:
    with running(LAZY) as run:
        source = torch.ones(1000).pin_memory()
        x = source.to("sim", non_blocking=True)
        del source
        torch.zeros(1000).pin_memory()
        assert x.eq(1).all().item()
    assert run.races == []


def test_memory_of_others_can_be_page_locked() -> None:
    module, host = torch.get_device_module("sim"), torch.zeros(4096)
    assert not host.is_pinned()
    module.host_register(host.data_ptr(), host.nbytes)
    assert host.is_pinned() and host[1024:].is_pinned()
    with pytest.raises(RuntimeError, match="page-locked already"):
        module.host_register(host.data_ptr() + 64, 64)
    with running(LAZY) as run:
        x = host.to("sim", non_blocking=True)
        module.host_unregister(host.data_ptr())
    assert run.races == ["the host unlocks what h2d reads on sim:0/0"]
    assert x.eq(0).all().item() and not host.is_pinned()
    with pytest.raises(RuntimeError, match="not page-locked"):
        module.host_unregister(host.data_ptr())


def test_memory_that_two_calls_have_locked_is_not_copied_at_once() -> None:
    """As by CUDA, where it is an invalid argument."""
    module, host = torch.get_device_module("sim"), torch.zeros(4096)
    for begin in (1024, 2048):
        module.host_register(host[begin:].data_ptr(), 4096)
    for begin, end in ((0, 1025), (1024, 2049), (2048, 3073)):
        with pytest.raises(RuntimeError, match="invalid argument"):
            host[begin:end].to("sim")
    for begin, end in ((0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)):
        assert host[begin:end].to("sim").eq(0).all().item()
    for begin in (1024, 2048):
        module.host_unregister(host[begin:].data_ptr())


@every_schedule
def test_devices_wait_for_each_other_around_a_copy(schedule: Schedule) -> None:
    with running(schedule) as run:
        x = torch.ones(100, device="sim:1")
        y = x.add(1).to("sim:0")
        x.zero_()
        assert y.eq(2).all().item() and y.device.index == 0 and x.device.index == 1
        compute(1).synchronize()
    assert run.races == []


# --- operators --------------------------------------------------------------------------------------------------------


def trained(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
        nn.functional.cross_entropy(model(x.to(device, dtype)), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@every_schedule
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_have_the_cpus_bits(dtype: torch.dtype, schedule: Schedule) -> None:
    with running(schedule) as run:
        ours = trained("sim:1", dtype)
    assert all(map(torch.equal, ours, trained("cpu", dtype)))
    assert run.races == []


def test_random_numbers_do_not_depend_on_who_sets_the_generator_of_the_cpu_meanwhile() -> None:
    """Checkpointing does so in the thread that computes, while another one has an operator run."""
    torch.sim.manual_seed(3)
    expected = nn.functional.dropout(torch.ones(1 << 16, device="sim")).cpu()
    state = torch.get_rng_state()

    def compute_again() -> torch.Tensor:
        torch.sim.manual_seed(3)
        return nn.functional.dropout(torch.ones(1 << 16, device="sim")).cpu()

    with ThreadPoolExecutor(1) as pool:
        for _ in range(50):
            running_there = pool.submit(compute_again)
            while not running_there.done():
                torch.set_rng_state(state)
            assert torch.equal(running_there.result(), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_depend_on_the_order_of_calls_alone() -> None:
    drawn = []
    for schedule in ALL:
        with running(schedule):
            torch.manual_seed(3)
            x = nn.functional.dropout(torch.ones(100, device="sim"))
            drawn.append((x.cpu(), torch.randn(5, device="sim").cpu()))
    assert all(torch.equal(a, drawn[0][0]) and torch.equal(b, drawn[0][1]) for a, b in drawn)
    assert 20 < drawn[0][0].count_nonzero() < 80


def test_results_whose_shape_depends_on_values_make_the_host_wait() -> None:
    with running(LAZY) as run:
        assert ones().nonzero().shape == (4, 1)
    assert run.total("sync:aten::nonzero") == 1


def test_counters_are_kept_per_stream() -> None:
    with running(EAGER) as run:
        up = torch.Stream("sim:0")
        source = torch.ones(256).pin_memory()
        with up:
            x = source.to("sim", non_blocking=True)
        up.synchronize()
        x.cpu()
        up.record_event().synchronize()
        torch.accelerator.synchronize("sim:0")
    assert run.counts["sim:0/1"] == {
        "h2d_copies": 1,
        "h2d_bytes": 1024,
        "synchronizations": 1,
        "records": 1,
        "event_synchronizations": 1,
    }
    assert run.counts["sim:0/0"]["d2h_bytes"] == 1024 and run.counts["sim:0/0"]["device_synchronizations"] == 1


@pytest.mark.usefixtures("single_torch_thread")
def test_a_kernel_has_the_threads_that_the_test_wants_now_whoever_has_it_run() -> None:
    """The test's own number stays what it was set to; another thread that waits computes with it, too."""
    seen: list[int] = []
    with running(LAZY), ThreadPoolExecutor(1) as other:
        for wanted in (3, 1):
            torch.set_num_threads(wanted)
            for wait in (lambda: other.submit(compute().synchronize).result(), compute().synchronize):
                simulated.load().launch(0, "look", lambda: seen.append(torch.get_num_threads()), [], 0)
                wait()
                assert torch.get_num_threads() == wanted
    assert seen == [3, 3, 1, 1]


@pytest.mark.usefixtures("single_torch_thread")
@pytest.mark.parametrize("transposed", [False, True])
@every_schedule
def test_convolutions_have_the_bits_of_the_cpu(schedule: Schedule, transposed: bool) -> None:
    """Groups, strides, and a bias: forward and backward."""
    torch.manual_seed(0)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    truth = kind(4, 6, 3, stride=2, padding=1, groups=2)
    x = torch.randn(2, 4, 7, 5)
    found = []
    with running(schedule) as run:
        for place in ("cpu", "sim"):
            model, given = copy.deepcopy(truth).to(place), x.detach().to(place).requires_grad_()
            made = model(given)
            made.sum().backward()
            found.append([each.cpu() for each in (made, given.grad, model.weight.grad, model.bias.grad)])
    assert run.races == []
    assert all(map(torch.equal, *found))


def test_integers_are_counted() -> None:
    values = torch.tensor([3, 1, 3, 0], dtype=torch.int32)
    counted = torch.histc(values.to("sim"), bins=4, min=0, max=3)
    assert counted.dtype == torch.int32 and counted.tolist() == [1, 1, 0, 2]


# --- the checker ------------------------------------------------------------------------------------------------------


def on_two_streams(between: Callable[[torch.Stream], None]) -> list[str]:
    """Write on a side stream what the default stream reads, in a schedule that happens to be right."""
    with running(EAGER) as run:
        side, x = torch.Stream("sim:0"), ones()
        side.wait_stream(compute())
        with side:
            x.mul_(2)
        between(side)
        x.add(1)
        compute().synchronize()
    return run.races


def test_a_race_names_both_operations_also_when_bits_are_right() -> None:
    assert on_two_streams(lambda side: None) == ["add reads on sim:0/0 what mul writes on sim:0/1"]


@pytest.mark.parametrize(
    "between",
    [
        lambda side: compute().wait_stream(side),
        lambda side: compute().wait_event(side.record_event()),
        lambda side: side.synchronize(),
        lambda side: side.record_event().synchronize(),
        lambda side: torch.accelerator.synchronize("sim:0"),
    ],
)
def test_what_was_waited_for_is_no_race(between: Callable[[torch.Stream], None]) -> None:
    assert on_two_streams(between) == []


def test_parts_that_do_not_overlap_are_no_race() -> None:
    with running(EAGER) as run:
        side, x = torch.Stream("sim:0"), ones(64)
        side.wait_stream(compute())
        with side:
            x[:32].mul_(2)
        x[32:].mul_(3)
        side.synchronize()
    assert run.races == []


# --- the build --------------------------------------------------------------------------------------------------------


def test_what_is_built_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.library() == build.library()


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(simulated.CannotBuild, match="no C\\+\\+ compiler \\(no-such-compiler\\)"):
        build.library()


def test_memory_that_is_given_back_is_gone() -> None:
    """What was freed and is not given back is handed out again; nobody can use what was."""
    code = """
        import torch, simulated
        simulated.load()
        empty, numel = torch.get_device_module("sim").empty_cache, 1 << 16
        first = torch.ones(numel, device="sim")
        place = first.data_ptr()
        del first
        second = torch.ones(numel, device="sim")
        assert second.data_ptr() == place
        empty()
        assert second.sum().item() == numel
        shadow = simulated.load().shadow(place)
        del second
        empty()
        assert torch.ones(numel, device="sim").data_ptr() != place
        print("used", flush=True)
        import ctypes
        ctypes.string_at(shadow, 4 * numel)
    """
    command, here = [sys.executable, "-c", textwrap.dedent(code)], Path(__file__).parent
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.stdout == "used\n" and done.returncode == -signal.SIGSEGV, done.stderr
