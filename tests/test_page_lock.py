"""Page-locking through CUDA's runtime, of which there is none here: what it is asked for, and what a failure leaves."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import pytest
import torch

from offload.memory import page_lock
from offload.memory.budget import Tier
from offload.memory.page_lock import LockedArena

PLACE = torch.device("cuda", 1)
MIB = 1 << 20


class Runtime:
    """Of CUDA, with the device that is current; `status` is what registering returns, behind `most` calls that work."""

    def __init__(self, status: int, most: int | None = None) -> None:
        self.status = status
        self.most = most
        self.current = 0
        self.calls: list[tuple[str, int, int]] = []  # name, device that was current, flags

    def cudart(self) -> Runtime:
        return self

    @contextlib.contextmanager
    def device(self, place: torch.device) -> Iterator[None]:
        before, self.current = self.current, place.index
        yield
        self.current = before

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.calls.append(("register", self.current, flags))
        return 2 if self.most is not None and len(self.calls) > self.most else self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current, 0))
        return 0


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Errors of the runtime that were taken back."""
    found: list[bool] = []
    monkeypatch.setattr(page_lock, "_forget_error", lambda: found.append(True))
    return found


def test_memory_is_locked_for_all_devices_from_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool]
) -> None:
    runtime = Runtime(0)
    monkeypatch.setattr(torch, "get_device_module", lambda place: runtime)
    arena = LockedArena(Tier.HOST, MIB, PLACE)
    assert not arena.elastic  # what is locked cannot be given back in parts
    arena.close()
    arena.close()
    assert runtime.calls == [("register", 1, 1), ("unregister", 1, 0)] and forgotten == []


def test_a_failure_is_told_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(2)
    monkeypatch.setattr(torch, "get_device_module", lambda place: runtime)
    arena = LockedArena(Tier.HOST, MIB, PLACE)
    assert arena.elastic and forgotten == [True]
    assert "1.00 MiB could not be page-locked for cuda:1 (error 2 of cudaHostRegister)" in caplog.text
    arena.close()
    assert runtime.calls == [("register", 1, 1)]


def test_memory_is_locked_in_pieces_as_far_as_the_system_lets_us(
    monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    """What is locked stays so. Copies are cut where pieces end: CUDA copies no memory of two, or locked in part."""
    runtime = Runtime(0, most=2)
    monkeypatch.setattr(torch, "get_device_module", lambda place: runtime)
    monkeypatch.setattr(page_lock, "PIECE_BYTES", MIB)
    arena = LockedArena(Tier.HOST, 3 * MIB + 4096, PLACE)
    assert arena.locked_bytes == 2 * MIB and not arena.elastic and forgotten == [True]
    assert "1.00 MiB of 3.00 MiB could not be page-locked for cuda:1 (error 2 of cudaHostRegister)" in caplog.text
    base = arena.base_address
    assert arena.spans(base + MIB, MIB) == [(0, MIB)]
    assert arena.spans(base + MIB, 2 * MIB) == [(0, MIB), (MIB, 2 * MIB)]
    assert arena.spans(base + 2 * MIB, MIB) == [(0, MIB)]
    assert arena.spans(base + 4096, 2 * MIB) == [
        (0, MIB - 4096),
        (MIB - 4096, 2 * MIB - 4096),
        (2 * MIB - 4096, 2 * MIB),
    ]
    arena.close()
    assert [name for name, _, _ in runtime.calls] == ["register"] * 3 + ["unregister"] * 2


def test_pages_are_brought_in_by_several_threads_before_they_are_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system locks in one thread, and would bring them in there."""
    runtime = Runtime(0)
    monkeypatch.setattr(torch, "get_device_module", lambda place: runtime)
    monkeypatch.setattr(page_lock, "TOUCHED_BYTES", MIB)
    arena = LockedArena(Tier.HOST, 3 * MIB + 4096, PLACE)
    assert arena.locked_bytes == 3 * MIB + 4096
    assert resident_pages(arena.base_address, 3 * MIB + 4096) == 3 * 256 + 1
    arena.close()


def resident_pages(address: int, size_bytes: int) -> int:
    found = (ctypes.c_ubyte * (size_bytes // 4096))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), found) == 0
    return sum(byte & 1 for byte in found)


@pytest.mark.parametrize("status", [0, 2])
def test_a_trial_says_why_it_is_refused(monkeypatch: pytest.MonkeyPatch, forgotten: list[bool], status: int) -> None:
    runtime = Runtime(status)
    monkeypatch.setattr(torch, "get_device_module", lambda place: runtime)
    assert page_lock.refusal(PLACE, MIB) == (f"error {status} of cudaHostRegister" if status else None)
    assert [name for name, _, _ in runtime.calls] == ["register"] + ["unregister"] * (not status)


def test_without_a_runtime_there_is_no_error_to_take_back() -> None:
    page_lock._forget_error()
