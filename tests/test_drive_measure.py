"""What measures a drive: plans of operations, and the engines on a small file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cli.drive.measure import (
    MIB,
    ContenderError,
    Ours,
    Pattern,
    Settings,
    Workload,
    Workspace,
    idle_latencies,
    latencies_under_writes,
    open_unlinked,
    plan_operations,
)
from swap.errors import SwapError, SwapFullError
from swap.io.aio import engines_available

READ = Workload(pattern=Pattern.READ, total_bytes=MIB, object_bytes=MIB)


@given(
    pattern=st.sampled_from(Pattern),
    object_mib=st.integers(1, 4),
    total_mib=st.integers(1, 40),
    memory_mib=st.integers(4, 9),
    files_mib=st.lists(st.integers(4, 12), min_size=1, max_size=3),
)
def test_plans_stay_inside(
    pattern: Pattern, object_mib: int, total_mib: int, memory_mib: int, files_mib: list[int]
) -> None:
    workload = Workload(pattern=pattern, total_bytes=total_mib * MIB, object_bytes=object_mib * MIB)
    files = [(fd, size * MIB) for fd, size in enumerate(files_mib)]
    plan = plan_operations(workload, files, 1 << 40, memory_mib * MIB)
    assert len(plan) == max(1, total_mib // object_mib)
    for index, operation in enumerate(plan):
        assert operation.fd == index % len(files)
        assert 0 <= operation.offset <= files[operation.fd][1] - operation.length
        assert 0 <= operation.address - (1 << 40) <= memory_mib * MIB - operation.length
    writes = sum(operation.write for operation in plan)
    expected = {Pattern.READ: 0, Pattern.WRITE: len(plan), Pattern.MIXED: len(plan) // 2}
    assert writes == expected[pattern]


def test_files_take_turns_in_proportion_to_their_weights() -> None:
    """Of 8 operations, 6 and 2 with weights 3 and 1; each file is used from its start on."""
    plan = plan_operations(
        Workload(pattern=Pattern.READ, total_bytes=8 * MIB, object_bytes=MIB),
        [(3, 8 * MIB), (4, 8 * MIB)],
        0,
        MIB,
        (3.0, 1.0),
    )
    assert [one.offset // MIB for one in plan if one.fd == 3] == [0, 1, 2, 3, 4, 5]
    assert [one.offset // MIB for one in plan if one.fd == 4] == [0, 1]
    assert {one.fd for one in plan[:4]} == {3, 4}


def test_objects_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="object_bytes"):
        plan_operations(READ, [(0, MIB)], 0, MIB // 2)
    with pytest.raises(ValueError, match="object_bytes"):
        plan_operations(READ, [(0, MIB // 2)], 0, MIB)


# ---- on a small file ----


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace([tmp_path], 8 * MIB, 4 * MIB) as place:
        yield place
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", engines_available())
@pytest.mark.parametrize("pattern", Pattern)
def test_our_engines_run_each_pattern(place: Workspace, engine: str, pattern: Pattern) -> None:
    workload = Workload(pattern=pattern, total_bytes=17 * MIB, object_bytes=2 * MIB)
    measured = Ours(Settings(engine=engine)).run(workload, place)
    assert measured.moved_bytes == 16 * MIB  # whole objects
    assert measured.seconds > 0 and measured.cpu_seconds >= 0


def test_what_is_written_is_the_noise_in_memory(place: Workspace) -> None:
    workload = Workload(pattern=Pattern.WRITE, total_bytes=8 * MIB, object_bytes=4 * MIB)
    Ours(Settings(engine="threads")).run(workload, place)
    with open(place.files[0].visible_as, "rb") as file:
        first, second = file.read(4 * MIB), file.read(4 * MIB)
    assert first == second  # the memory is used twice
    assert len(set(first[:4096])) > 200 and first[:MIB] != first[MIB : 2 * MIB]


def test_threads_cannot_register_buffers(place: Workspace) -> None:
    with pytest.raises(ContenderError, match=r"4 MiB cannot be registered \(ulimit -l .* liburing before 2.2\)"):
        Ours(Settings(engine="threads"), registered=True).run(READ, place)


@pytest.mark.parametrize("engine", engines_available())
def test_latencies(place: Workspace, engine: str) -> None:
    settings = Settings(engine=engine)
    Ours(settings).run(Workload(pattern=Pattern.WRITE, total_bytes=8 * MIB, object_bytes=2 * MIB), place)
    idle = idle_latencies(settings, place, 64 << 10, 5)
    assert len(idle) == 5 and min(idle) > 0
    assert all(seconds > 0 for seconds in latencies_under_writes(settings, place, MIB, 16 * MIB))


def test_new_blocks_keep_the_size(place: Workspace) -> None:
    place.make_empty()
    assert [os.fstat(file.fd).st_size for file in place.files] == [0]
    place.reserve()
    assert [os.fstat(file.fd).st_size for file in place.files] == [8 * MIB]


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match="create the directory"):
        open_unlinked(tmp_path / "missing", MIB)
    with pytest.raises(SwapError, match="not a file"):
        open_unlinked(tmp_path / "file", MIB)
    monkeypatch.setattr("swap.io.files.preallocate", lambda fd, length, first: errno.ENOSPC)
    with pytest.raises(SwapFullError, match="1 MiB .* needed but .* free .ENOSPC"):
        open_unlinked(tmp_path, MIB)


def test_descriptors_are_closed_after_a_failure(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SwapError):
        Workspace([tmp_path, tmp_path / "missing"], 4 * MIB, MIB)
    assert len(os.listdir("/proc/self/fd")) == before
