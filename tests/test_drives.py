"""What the bench has measured is found again, per drive, and anything odd in the file counts as not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.cache import cache_folder
from offload.memory import drives
from offload.memory.drives import Measured, recall, remember, store_options
from offload.seeing.published import running

FAST = Measured(
    engine="threads", queue_depth=16, block_bytes=1 << 18, threads=6, read_gb_s=6.0, write_gb_s=3.0, date="2026-01-01"
)
SLOW = Measured(
    engine="io_uring", queue_depth=64, block_bytes=1 << 21, threads=4, read_gb_s=1.0, write_gb_s=1.0, date="2026-01-02"
)


@pytest.fixture(autouse=True)
def two_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of our own, and two folders that count as drives of their own."""
    file = tmp_path / "cache" / "drives.json"
    monkeypatch.setattr(drives, "cache_file", lambda: file)
    monkeypatch.setattr(drives, "device_of", lambda path: {"a": "A (1:0)", "b": "B (2:0)"}.get(Path(path).name))
    for name in "abc":
        (tmp_path / name).mkdir()
    return file


def test_a_measurement_is_found_again_on_its_drive_only(tmp_path: Path, two_drives: Path) -> None:
    assert recall(tmp_path / "a") is None and store_options([tmp_path / "a"]) == {}
    assert remember(tmp_path / "a", FAST) == two_drives
    assert remember(tmp_path / "b", SLOW) == two_drives
    assert recall(tmp_path / "a") == FAST and recall(tmp_path / "b") == SLOW
    remember(tmp_path / "a", SLOW)
    assert recall(tmp_path / "a") == SLOW == recall(tmp_path / "b")
    assert [path.name for path in two_drives.parent.iterdir()] == ["drives.json"]  # nothing half-written beside it


def test_without_a_drive_nothing_is_kept(tmp_path: Path, two_drives: Path) -> None:
    assert remember(tmp_path / "c", FAST) is None and recall(tmp_path / "c") is None
    assert not two_drives.exists()


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path, two_drives: Path) -> None:
    two_drives.parent.write_text("a file where the folder should be")
    assert remember(tmp_path / "a", FAST) is None and recall(tmp_path / "a") is None


def test_a_user_without_a_home_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of drives nor of engines that run; XDG_CACHE_HOME stands in for a home."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "offload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(drives, "cache_file", lambda: cache_folder() / "drives.json")
    assert remember(tmp_path / "a", FAST) is None and recall(tmp_path / "a") is None
    assert running(cache_folder() / "running") == []


def test_shares_follow_bandwidth_and_settings_the_fastest_drive(tmp_path: Path) -> None:
    remember(tmp_path / "b", SLOW)
    assert store_options([tmp_path / "b"]) == {
        "engine": "auto",  # io_uring may be forbidden by now
        "queue_depth": 64,
        "block_bytes": 1 << 21,
        "threads": 4,
    }
    assert store_options([tmp_path / "b", tmp_path / "a"]) == {}  # one of them has not been measured
    remember(tmp_path / "a", FAST)
    both = store_options([tmp_path / "b", tmp_path / "a"])
    assert both["weights"] == [1.0, pytest.approx(4.0)]  # 2 / (1/6 + 1/3)
    assert (both["engine"], both["queue_depth"], both["block_bytes"], both["threads"]) == ("threads", 16, 1 << 18, 6)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"A (1:0)": 3}',
        '{"A (1:0)": {"engine": "io_uring"}}',
        *(
            json.dumps({"A (1:0)": {**{name: getattr(FAST, name) for name in FAST.__slots__}, **wrong}})
            for wrong in (
                {"engine": "steam"},
                {"queue_depth": 0},
                {"block_bytes": 1000},
                {"threads": "4"},
                {"read_gb_s": 0},
                {"write_gb_s": float("nan")},
                {"more": 1},
            )
        ),
    ],
)
def test_what_makes_no_sense_counts_as_not_measured(content: str, tmp_path: Path, two_drives: Path) -> None:
    two_drives.parent.mkdir()
    two_drives.write_text(content)
    assert recall(tmp_path / "a") is None
    remember(tmp_path / "a", FAST)
    assert recall(tmp_path / "a") == FAST


def test_the_engine_uses_what_was_measured(tmp_path: Path) -> None:
    remember(tmp_path / "a", FAST)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    options = {"max_memory": {"device": "1MiB", "cpu": "8MiB", "nvme": "64MiB"}, "offload_param": "nvme"}
    with offload.Engine(model, offload.AdamW(), device="cpu", nvme_path=tmp_path / "a", **options) as engine:
        store = engine._manager.tiers.store  # type: ignore[union-attr]
        assert store is not None and store.engine == "threads"
        engine.backward(engine(torch.ones(2, 16)).mean())
        assert engine.step()
