"""Several ranks whose checkpoint is copied while training goes on: the one of that moment, on all ranks or on none."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from several_ranks import Ended, Raised, run
from test_rank_checkpoint_errors import error_of, full_error, instead
from test_rank_checkpoints import begin, compare_files
from test_stage_1 import batch

from offload import Engine
from offload.shards.held import Held

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD = 3


def engine_of(name: str, path: str, stage: int, world: int = WORLD, **more: Any) -> Engine:
    return begin(name, path, world, 1, stage=stage, background_checkpoints=True, max_memory=ROOM, **more)


ROOM = {"device": "40MiB", "cpu": "40MiB", "nvme": "64MiB"}


def train(engine: Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*batch(step * WORLD + rank)))
        engine.step()


def copy(rank: int, name: str, path: str, stage: int, saves: bool) -> dict[str, Any]:
    """Save in the background in the middle of training. Rank 1 copies when training is over, and not before."""
    may_read = threading.Event()

    def read(real: Any, *args: Any, **options: Any) -> Any:
        assert rank != 1 or may_read.wait(30), "nobody lets it read"
        return real(*args, **options)

    parameters = {"offload_param": "cpu"} if stage == 1 else {}
    with engine_of(name, path, stage, **parameters) as engine, instead(Held, "read", read):
        train(engine, rank, 0, 2)
        if saves:
            client = {"rank": rank}
            now = engine.save_checkpoint(f"{path}/saved", tag="now", client_state=client)
            later = engine.save_checkpoint(f"{path}/saved", tag="later", client_state=client, wait=False)
        train(engine, rank, 2, 4)
        found = {"digests": engine.digests()}
        if saves:
            found["done"] = later.done()
            found["latest"] = (Path(path) / "saved/latest").read_text()
            may_read.set()
            found["folders"] = str(now), str(later.wait())
            train(engine, rank, 4, 5)
            engine.save_checkpoint(f"{path}/saved", tag="closing", wait=False)  # closing waits for it
        return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("bfloat16-int8-nvme", 3),
        ("float32-float32-nvme", 1),
        pytest.param("bfloat16-float32-spill", 2, marks=pytest.mark.nightly),
    ],
)
def test_it_is_that_of_the_moment(name: str, stage: int, tmp_path: Path) -> None:
    every = run(copy, WORLD, name, str(tmp_path), stage, True)
    plain = run(copy, WORLD, name, str(tmp_path), stage, False)
    for found, other in zip(every, plain, strict=True):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["digests"] == other["digests"] == every[0]["digests"]
        assert not found["done"] and found["latest"] == "now\n"
    now, later = map(Path, every[0]["folders"])
    compare_files(later, now)
    files = {file.name for file in later.iterdir()}
    assert ("tensors-of-rank-1-00002.safetensors" in files) == (stage == 1), "what is held is in files of its own"
    assert sorted(file.name for file in later.iterdir() if file.suffix == ".json") == ["index.json"]
    assert (tmp_path / "saved/latest").read_text() == "closing\n"
    for world in (1, 2):  # each rank has the same digests
        for found in run(load, world, world, name, str(tmp_path)):
            assert not isinstance(found, (Raised, Ended)), found
            assert found["now"] == found["later"]


def load(rank: int, world: int, name: str, path: str) -> dict[str, Any]:
    with engine_of(name, path, 1, world) as engine:
        found = {}
        for tag in ("now", "later"):
            assert engine.load_checkpoint(f"{path}/saved", tag=tag) == {"rank": 0}
            found[tag] = engine.digests()
        return found


def fail(rank: int, path: str) -> dict[str, Any]:
    """Let rank 1's copies fail; return what each rank is told by whom."""
    name, odd, found = "bfloat16-float32-nvme", rank == 1, dict[str, Any]()
    with engine_of(name, path, 3) as engine:
        train(engine, rank, 0, 1)
        engine.save_checkpoint(f"{path}/saved", tag="good")
        with instead(Held, "read", full_error if odd else lambda real, *args, **options: real(*args, **options)):
            pending = engine.save_checkpoint(f"{path}/saved", tag="told", wait=False)
            train(engine, rank, 1, 2)
            found["waits"] = error_of(pending.wait)
            engine.save_checkpoint(f"{path}/saved", tag="untold", wait=False)
            train(engine, rank, 2, 3)
            found["saves"] = error_of(lambda: engine.save_checkpoint(f"{path}/saved", tag="next"))
            train(engine, rank, 3, 4)
            pending = engine.save_checkpoint(f"{path}/saved", tag="half", wait=False)
            if rank == 0:
                error_of(pending.wait)
            found["half"] = error_of(lambda: engine.save_checkpoint(f"{path}/saved", tag="next"))  # rank 0 was told
        found["left"] = sorted(one.name for one in (Path(path) / "saved").iterdir())
        found["latest"] = (Path(path) / "saved/latest").read_text()
        train(engine, rank, 4, 5)
        engine.save_checkpoint(f"{path}/saved", tag="well", wait=False).wait()
        found["digests"] = engine.digests()
        engine.load_checkpoint(f"{path}/saved")
        found["loaded"] = engine.digests()
    return found


def test_what_fails_on_one_rank_drops_it_on_all(tmp_path: Path) -> None:
    for rank, found in enumerate(run(fail, WORLD, str(tmp_path))):
        assert not isinstance(found, (Raised, Ended)), found
        for what, tag in (("waits", "told"), ("saves", "untold")):
            kind, text = found[what]
            if rank == 1:
                assert kind == "OSError" and "No space left" in text
            else:
                assert (
                    kind == "CheckpointError" and f"saved/{tag}: expected all ranks to complete it but rank 1" in text
                )
        assert found["half"][0] == ("RanksError" if rank == 0 else "OSError" if rank == 1 else "CheckpointError")
        assert found["left"] == [".lock", "good", "latest"] and found["latest"] == "good\n"
        assert found["digests"] == found["loaded"]


def end(rank: int, path: str) -> dict[str, Any]:
    """Let rank 1 be killed while it copies."""

    def kill(real: Any, *args: Any, **options: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    engine = engine_of("float32-int8-nvme", path, 1)
    train(engine, rank, 0, 1)
    engine.save_checkpoint(f"{path}/saved", tag="good")
    with instead(Held, "read", kill):
        pending = engine.save_checkpoint(f"{path}/saved", tag="new", wait=False)
        found = {"waits": error_of(pending.wait)}
    found["trains"] = error_of(lambda: train(engine, rank, 1, 2))
    found["closes"] = error_of(engine.close)
    return found


def test_a_killed_rank_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    every = run(end, WORLD, str(tmp_path))
    assert every.pop(1) == Ended(-signal.SIGKILL)
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found == every[0]
        assert found["waits"][0] == "CheckpointError" and "no word of rank 1" in found["waits"][1]
        assert found["trains"][0] == "RanksError" and "close the engine" in found["trains"][1]
        assert found["closes"] == ("nothing", "")
    assert sorted(one.name for one in (tmp_path / "saved").iterdir()) == [".lock", "good", "latest"]
    assert (tmp_path / "saved/latest").read_text() == "good\n"
