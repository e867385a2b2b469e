"""DeepSpeed as a peer of the NVMe bench, with a handle that stands in for its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.nvme import deepspeed as nvme_deepspeed
from bench.nvme.cases import compare
from bench.nvme.deepspeed import (
    DEEPSPEED,
    DEEPSPEED_ORDINARY,
    DeepSpeed,
    HandleSettings,
    deepspeed_installed,
    handle_settings,
    load_operator,
)
from bench.nvme.figures import figures_of
from offload.cli.drive.measure import ContenderError, Pattern, Sample, Workload, Workspace
from offload.cli.drive.results import Options
from offload.sizes import MIB


class FakeHandle:
    """Does at once what DeepSpeed's handle would start; `wait` without anything started would hang, so it fails."""

    def __init__(self, operator: FakeOperator, threads: int) -> None:
        self.operator = operator
        self.threads = threads
        self.pending = 0
        self.most_pending = 0
        self.moved = {"read": 0, "write": 0}
        self.memory: torch.Tensor | None = None

    def _start(self, kind: str, buffer: torch.Tensor) -> int:
        assert buffer.is_contiguous() and buffer.nbytes % self.threads == 0
        if self.operator.refuses:
            return -1
        self.pending += 1
        self.most_pending = max(self.pending, self.most_pending)
        self.moved[kind] += buffer.nbytes
        return 0

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int) -> int:
        with open(filename, "rb") as file:
            data = os.pread(file.fileno(), buffer.nbytes, file_offset)
        assert len(data) == buffer.nbytes
        ctypes.memmove(buffer.data_ptr(), data, len(data))
        return self._start("read", buffer)

    def async_pwrite(self, buffer: torch.Tensor, fd: int, file_offset: int) -> int:
        data = ctypes.string_at(buffer.data_ptr(), buffer.nbytes)
        with open(f"/proc/self/fd/{fd}", "r+b") as file:
            os.pwrite(file.fileno(), data, file_offset)
        return self._start("write", buffer)

    def wait(self) -> int:
        assert self.pending > 0
        done, self.pending = self.pending, 0
        return done

    def new_cpu_locked_tensor(self, num_elem: int, example: torch.Tensor) -> torch.Tensor:
        self.memory = torch.empty(num_elem, dtype=example.dtype)
        return self.memory

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        assert tensor is self.memory
        self.memory = None
        return True


class FakeOperator:
    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []
        self.refuses = False

    def aio_handle(
        self, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, intra_op_parallelism: int
    ) -> Any:
        assert (block_size % MIB, queue_depth > 0, single_submit, overlap_events) == (0, True, False, True)
        self.handles.append(FakeHandle(self, intra_op_parallelism))
        return self.handles[-1]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace([tmp_path], 8 * MIB, 4 * MIB) as place:
        yield place


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("object_bytes", [64 << 10, 2 * MIB])
def test_all_bytes_of_a_workload_are_moved(place: Workspace, pattern: Pattern, object_bytes: int) -> None:
    operator = FakeOperator()
    contender = DeepSpeed(operator)
    workload = Workload(pattern=pattern, total_bytes=32 * MIB, object_bytes=object_bytes)
    contender.run(workload, place)
    tuning = len(operator.handles)
    assert contender.run(workload, place).moved_bytes == 32 * MIB
    handles = operator.handles[tuning:]
    assert len(handles) == (2 if pattern is Pattern.MIXED else 1)
    share = {Pattern.READ: 0, Pattern.WRITE: 32, Pattern.MIXED: 16}[pattern] * MIB
    assert sum(handle.moved["write"] for handle in handles) == share
    assert sum(handle.moved["read"] for handle in handles) == 32 * MIB - share
    assert all(handle.pending == 0 and handle.memory is None for handle in operator.handles)
    assert all(handle.most_pending <= 256 for handle in operator.handles)


def test_what_is_written_is_the_noise_of_the_others(place: Workspace) -> None:
    DeepSpeed(FakeOperator()).run(Workload(pattern=Pattern.WRITE, total_bytes=8 * MIB, object_bytes=2 * MIB), place)
    with open(place.files[0].visible_as, "rb") as file:
        assert file.read(4 * MIB) == ctypes.string_at(place.base_address, 4 * MIB)


def test_settings_that_are_tried() -> None:
    """Parts of an operation stay multiples of 4096; only large objects may be put together."""
    tensors = handle_settings(Workload(pattern=Pattern.READ, total_bytes=MIB, object_bytes=32 << 10), 4 * MIB)
    assert [(one.threads, one.operation_bytes) for one in tensors] == [(1, 0), (2, 0), (4, 0), (8, 0)]
    large = handle_settings(Workload(pattern=Pattern.READ, total_bytes=64 * MIB, object_bytes=16 * MIB), 64 * MIB)
    assert {one.operation_bytes // MIB for one in large} == {0, 32, 64}
    assert {one.block_bytes // MIB for one in large} == {1, 2} and {one.threads for one in large} == {1, 2, 4, 8}
    mixed = handle_settings(Workload(pattern=Pattern.MIXED, total_bytes=64 * MIB, object_bytes=16 * MIB), 64 * MIB)
    assert {one.operation_bytes // MIB for one in mixed} == {0, 32}  # a read and a write fit the memory together


def test_the_fastest_settings_are_used(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads are the fastest here; they are found once per case, and the twin with ordinary memory uses them."""
    asked: list[tuple[HandleSettings, bool]] = []

    def measure(
        operator: Any, settings: HandleSettings, workload: Workload, place: Workspace, *, huge_pages: bool = True
    ) -> Sample:
        asked.append((settings, huge_pages))
        return Sample(MIB, 1.0 + abs(settings.threads - 4), 0.0)

    monkeypatch.setattr(nvme_deepspeed, "_measure", measure)
    contender = DeepSpeed(FakeOperator())
    ordinary = DeepSpeed(like=contender)
    workload = Workload(pattern=Pattern.READ, total_bytes=MIB, object_bytes=64 << 10)
    contender.run(workload, place)
    tried = len(asked) - 1
    assert tried == nvme_deepspeed.TUNING_RUNS * 5  # 1, 2, 4, 8 and 16 threads
    contender.run(workload, place)
    ordinary.run(workload, place)
    assert asked[tried:] == [(HandleSettings(threads=4), huge_pages) for huge_pages in (True, True, False)]
    assert (contender.name, ordinary.name) == (DEEPSPEED, DEEPSPEED_ORDINARY)


def test_a_refusal_is_an_error_and_frees_the_memory(place: Workspace) -> None:
    operator = FakeOperator()
    operator.refuses = True
    with pytest.raises(ContenderError, match="refuses an operation of 65536 bytes"):
        DeepSpeed(operator).run(Workload(pattern=Pattern.READ, total_bytes=MIB, object_bytes=64 << 10), place)
    assert all(handle.memory is None for handle in operator.handles)


@pytest.mark.skipif(deepspeed_installed(), reason="DeepSpeed is installed")
def test_without_deepspeed() -> None:
    with pytest.raises(ContenderError, match="async_io cannot be loaded"):
        load_operator()


@pytest.mark.nightly
def test_a_run_of_the_bench_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.nvme.cases.deepspeed_installed", lambda: True)
    monkeypatch.setattr(nvme_deepspeed, "load_operator", FakeOperator)
    one = compare(Options(paths=(tmp_path,), smoke=True), lambda *_: None).paths[0]
    cases = {row.case for row in one.rows if row.contender == DEEPSPEED}
    assert {"read", "write", "mixed", "first write", "read, tensors of 64 KiB", "write, tensors of 64 KiB"} <= cases
    assert {row.case for row in one.rows if row.contender == DEEPSPEED_ORDINARY} == {"read", "write", "mixed"}
    names = {figure.name for figure in figures_of(one, (tmp_path,))}
    assert {f"mixed / {DEEPSPEED}", f"first write / {DEEPSPEED}"} <= names


def test_the_bench_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> FakeOperator:
        raise ContenderError("its operator async_io cannot be loaded: libaio.h is missing")

    monkeypatch.setattr("bench.nvme.cases.deepspeed_installed", lambda: True)
    monkeypatch.setattr(nvme_deepspeed, "load_operator", fail)
    one = compare(Options(paths=(tmp_path,), smoke=True), lambda *_: None).paths[0]
    assert DEEPSPEED not in {row.contender for row in one.rows}
    assert any("libaio.h is missing" in note for note in one.notes)
