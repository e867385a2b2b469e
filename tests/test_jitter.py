"""Sleeps at random calls: where, and in which threads."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
from jitter import jittering


@pytest.fixture
def package(tmp_path: Path) -> ModuleType:
    """A function of a package of its own."""
    file = tmp_path / "package" / "module.py"
    file.parent.mkdir()
    file.write_text("def call():\n    pass\n")
    module = ModuleType("module")
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module


def test_calls_of_the_package_wait_in_all_threads(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = []
    monkeypatch.setattr("jitter.time.sleep", lambda seconds: slept.append((threading.get_ident(), seconds)))
    with jittering(1.0, (str(tmp_path / "package"),)):
        package.call()
        thread = threading.Thread(target=package.call)
        thread.start()
        thread.join()
    package.call()  # not any more
    assert sys.getprofile() is None and threading.getprofile() is None
    assert [ident for ident, _ in slept] == [threading.get_ident(), thread.ident]
    assert all(0.0 <= seconds < 3e-3 for _, seconds in slept)


def test_nothing_waits_elsewhere_or_by_default(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitter.time.sleep", lambda seconds: pytest.fail("it waited"))
    with jittering(1.0, (str(tmp_path / "another"),)):
        package.call()
    with jittering(0.0, (str(tmp_path / "package"),)):
        package.call()
        assert sys.getprofile() is None
