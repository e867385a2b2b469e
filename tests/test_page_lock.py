"""Page-locking through CUDA's runtime, of which there is none here: what it is asked for, and what a failure leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from offload.memory import accelerator
from offload.memory.accelerator import LockedArena
from offload.memory.budget import Tier

PLACE = torch.device("cuda", 1)
MIB = 1 << 20


class Runtime:
    """Of CUDA, with the device that is current; `status` is what registering returns."""

    def __init__(self, status: int) -> None:
        self.status = status
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
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current, 0))
        return 0


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Errors of the runtime that were taken back."""
    found: list[bool] = []
    monkeypatch.setattr(accelerator, "_forget_error", lambda: found.append(True))
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


def test_without_a_runtime_there_is_no_error_to_take_back() -> None:
    accelerator._forget_error()
