"""The set-up scripts that are more than a list of commands: preparing the text, and doing it all or not at all."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import missing_for_gpu

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("prepare")


def test_entries_are_kept_and_contents_dropped(prepare: ModuleType) -> None:
    long = "word " * 20
    raw = f"   Contents\n\n   {long}\n\n   :hack: n.\n\n   {long}\n   {long}\n\n   P\n\n   :two:\n"
    assert prepare.jargon_entries(raw) == f":hack: n.\n\n{(long * 2).strip()}\n\n:two:\n"
    with pytest.raises(prepare.PrepareError, match="no entries"):
        prepare.jargon_entries("nothing")


def test_fallback_text_is_large_enough_to_train_on(prepare: ModuleType) -> None:
    assert len(prepare.topics_prose().split()) > 30_000


def test_text_falls_back_and_says_so(
    prepare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise sys.modules["fetch_deb"].FetchError("apt-get not found")

    monkeypatch.setattr(prepare, "fetch", refuse)
    assert prepare.build_once(tmp_path / "text", prepare.build_text)
    assert "pydoc_data" in (tmp_path / "text/SOURCE").read_text()
    assert "apt-get not found" in capsys.readouterr().out
    assert not prepare.build_once(tmp_path / "text", prepare.build_text)


def test_failure_leaves_nothing(prepare: ModuleType, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepare.build_once(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_wheels_name_the_versions_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of "all" they are told, with the reason; one that was named is an error."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    wheels = importlib.import_module("wheels")

    def start(command: str, *words: str, quiet: bool = False) -> str:
        if "3.12" not in command:
            raise OSError(command)
        return f"/{command}\n"

    monkeypatch.setattr(wheels, "_run", start)
    found, missing = wheels._interpreters(["all"])
    assert found == ["/python3.12"] and len(missing) == len(wheels.VERSIONS) - 1
    assert missing[-1] == "python3.14: not on this machine"
    with pytest.raises(wheels.WheelError, match=r"^python3\.14: not on this machine$"):
        wheels._interpreters(["3.12", "3.14"])


def test_the_gpu_check_names_what_is_missing(tmp_path: Path) -> None:
    if missing_for_gpu() is None:
        pytest.skip("there is a GPU")
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and "CUDA" in done.stderr and "nothing was run" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_gpu_check_tells_what_has_failed_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    gpu_check = importlib.import_module("gpu_check")
    check = gpu_check.Check("cpu", gpu_check.SMOKE, tmp_path, tmp_path)

    def fail() -> None:
        raise RuntimeError("no such link")

    check.section("links", fail)
    check.section("late", dict, needs_s=1e9)
    check.section("next", lambda: {"figure": 1})
    assert check.failed == ["links"] and check.result["links"]["failed"] == "RuntimeError: no such link"
    assert "left out" in check.result["late"] and check.result["next"]["figure"] == 1
    assert gpu_check.page(check.result, check.failed).startswith("gpu check: FAILED: links")
