"""The thread pool of csrc/cpu_adam, forks, the choice of instruction set, and the bench."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import benches
import pytest
from kernel_arrays import (
    HYPER,
    ISAS,
    Shard,
    Variant,
    automatic,
)

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, MasterKind

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


# ---- threads and processes ---------------------------------------------------------------------------------


def test_concurrent_calls_from_several_threads() -> None:
    cpu_adam.set_num_threads(3)
    variant = Variant(Dtype.BFLOAT16, MasterKind.SPLIT)
    start = Shard.random(variant, 300_001, 13, classes=False)
    want = start.copy()
    for _ in range(5):
        want.step(HYPER)
    results = [start.copy() for _ in range(4)]

    def work(shard: Shard) -> None:
        for _ in range(5):
            shard.step(HYPER)

    threads = [threading.Thread(target=work, args=(shard,)) for shard in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shard in results:
        want.assert_same(shard, "concurrent")


def test_thread_count_may_change_while_calls_run() -> None:
    start = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 300_001, 14, classes=False)
    want, got = start.copy(), start.copy()
    for threads in (1, 4, 2, 3, 1):
        cpu_adam.set_num_threads(1)
        want.step(HYPER)
        cpu_adam.set_num_threads(threads)
        assert cpu_adam.num_threads() == threads
        got.step(HYPER)
    want.assert_same(got, "changing thread count")


def in_child(work: Callable[[], bool]) -> int:
    """Fork, run `work` in the child with a deadline, return the child's wait status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_pool() -> None:
    cpu_adam.set_num_threads(2)
    start = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 300_001, 15, classes=False)
    want = start.copy().step(HYPER)
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [start.copy().step(HYPER) for _ in iter(stop.is_set, True)])
    busy.start()  # so that forks also happen in the middle of a step

    def work() -> bool:
        for _ in range(3):
            got = start.copy().step(HYPER)
            want.assert_same(got, "after fork")
        return True

    try:
        assert [in_child(work) for _ in range(5)] == [0] * 5
    finally:
        stop.set()
        busy.join()
    want.assert_same(start.copy().step(HYPER), "in the parent, after the forks")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_threads_start_at_the_first_call_that_needs_them() -> None:
    code = """
import array, os
from offload.kernels import cpu_adam
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
cpu_adam.set_num_threads(3)
data = array.array("f", [1.0]) * 300000
cpu_adam.sum_of_squares(data.buffer_info()[0], cpu_adam.Dtype.FLOAT32, 1000)
assert threads() == before
assert cpu_adam.sum_of_squares(data.buffer_info()[0], cpu_adam.Dtype.FLOAT32, 300000) == (300000.0, 0)
assert threads() == before + 2
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_environment_variable_forces_a_path(isa: str) -> None:
    result = run_python("from offload.kernels import cpu_adam; print(cpu_adam.isa())", OFFLOAD_CPU_ADAM_ISA=isa)
    assert result.stdout.strip() == isa, result.stderr


def test_unknown_path_in_the_environment_names_the_choices() -> None:
    code = "from offload.kernels import cpu_adam; print('imported'); cpu_adam.isa()"
    result = run_python(code, OFFLOAD_CPU_ADAM_ISA="sse9")
    assert "imported" in result.stdout
    assert f"ValueError: OFFLOAD_CPU_ADAM_ISA: expected one of {', '.join(ISAS)}" in result.stderr
    assert "sse9" in result.stderr


@pytest.mark.nightly
def test_the_bench_runs(tmp_path: Path) -> None:
    report, _ = benches.run("cpu_adam", tmp_path, "--smoke")
    assert report["isa"] == cpu_adam.isa()
    assert {"commit", "machine"} <= set(report)
    assert len(report["table"]) >= 25
    assert len(report["figures"]) >= 8
    assert all(row["milliseconds"] > 0 for row in report["table"])


def test_the_last_one_who_asks_for_threads_decides_until_it_is_closed() -> None:
    cpu_adam.set_num_threads(5)
    first, second = cpu_adam.Threads(2), cpu_adam.Threads(3)
    assert cpu_adam.num_threads() == 3
    first.close()
    assert cpu_adam.num_threads() == 3
    third = cpu_adam.Threads(4)
    third.close()
    assert cpu_adam.num_threads() == 3
    second.close()
    assert cpu_adam.num_threads() == 5
    cpu_adam.set_num_threads(1)
    for one in (first, second, third):
        one.close()
    assert cpu_adam.num_threads() == 1
    with pytest.raises(ValueError, match="threads: expected 1 or more"):
        cpu_adam.Threads(0)
    assert cpu_adam.num_threads() == 1
