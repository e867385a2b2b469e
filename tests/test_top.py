"""What engines say of themselves, and the command that shows it."""

from __future__ import annotations

import argparse
import functools
import io
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.cli import main as cli
from offload.cli import top
from offload.seeing import published
from offload.seeing.published import Publisher, read, running

STATE: dict[str, Any] = {"step": 3, "tiers": {}, "lanes": {}, "waits": {}}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Engines of other tests say nothing here."""
    folder = tmp_path / "running"
    monkeypatch.setattr(published, "folder", lambda: folder)
    return folder


@pytest.fixture
def engine() -> Iterator[offload.Engine]:
    """One that has taken a step."""
    budgets = {"device": "16MiB", "cpu": "16MiB"}
    with offload.Engine(nn.Linear(4, 4), offload.SGD(lr=0.1), device="cpu", max_memory=budgets) as engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        engine._watch._publish(engine._watch._publish_at_s)
        yield engine


# --- files ------------------------------------------------------------------------------------------------------------


def test_only_its_user_may_read_an_engines_file(own_folder: Path) -> None:
    publisher = Publisher()
    assert running() == [] and not own_folder.exists()  # before anything is said
    publisher.write(STATE)
    assert publisher.path is not None
    assert stat.S_IMODE(publisher.path.stat().st_mode) == 0o600 and stat.S_IMODE(own_folder.stat().st_mode) == 0o700
    [one] = running()
    assert one.pid == os.getpid() and one.state["step"] == 3
    publisher.write({**STATE, "step": 4, "loss": float("nan"), "more": {"norm": float("inf")}})
    assert running()[0].state["step"] == 4
    assert running()[0].state["loss"] is None and running()[0].state["more"] == {"norm": None}
    publisher.write(STATE)  # shorter than before
    assert "loss" not in running()[0].state
    publisher.close()
    publisher.close()
    publisher.write(STATE)
    assert list(own_folder.iterdir()) == []


def test_two_engines_of_a_process_have_a_file_each(own_folder: Path) -> None:
    first, second = Publisher(), Publisher()
    first.write(STATE)
    second.write({**STATE, "step": 5})
    assert sorted(one.state["step"] for one in running()) == [3, 5]
    first.close()
    assert [one.state["step"] for one in running()] == [5]
    second.close()


def test_engines_of_two_containers_with_one_home_have_a_file_each(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the numbers of their processes are the same."""
    publishers = []
    for space in ("boot pid:[1]", "boot pid:[2]"):
        monkeypatch.setattr(published, "_space", lambda space=space: space)
        monkeypatch.setattr(published, "_numbers", itertools.count(1))
        publishers.append(Publisher())
        publishers[-1].write(STATE)
    assert len({one.path for one in publishers}) == len(list(own_folder.iterdir())) == 2


def test_engines_of_other_users_are_neither_shown_nor_removed(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher()
    publisher.write(STATE)
    path = own_folder / "another.engine"
    path.write_bytes(published.packed({**running()[0].state, "start": "1"}))
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert running() == [] and path.exists()
    monkeypatch.undo()
    monkeypatch.setattr(published, "folder", lambda: own_folder)
    assert len(running()) == 1 and not path.exists()
    publisher.close()


def test_files_of_processes_that_have_ended_are_removed(own_folder: Path) -> None:
    """By number and start: the number may be another process's by now."""
    publisher = Publisher()
    publisher.write(STATE)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = dict(running()[0].state)
    for name, changes in (
        ("ended", {"pid": ended.pid}),
        ("another", {"start": "1"}),
    ):
        (own_folder / f"{name}.engine").write_bytes(published.packed({**mine, **changes}))
    elsewhere = own_folder / "elsewhere.engine"
    elsewhere.write_bytes(published.packed({**mine, "space": "another machine"}))
    assert [one.path for one in running()] == [publisher.path]
    assert sorted(own_folder.iterdir()) == sorted([elsewhere, publisher.path])  # nobody here knows whether it runs
    os.utime(elsewhere, (0, 0))
    assert [one.path for one in running()] == [publisher.path] and not elsewhere.exists()
    publisher.close()


def test_a_new_engine_forgets_what_a_killed_one_has_left(own_folder: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from offload.seeing import published\n"
        f"published.folder = lambda: Path({str(own_folder)!r})\n"
        "one = published.Publisher(); one.write({'step': 1, 'tiers': {}, 'lanes': {}, 'waits': {}})\n"
    )
    subprocess.run([sys.executable, "-c", code + "os.kill(os.getpid(), signal.SIGKILL)"], check=False)
    assert len(list(own_folder.iterdir())) == 1
    subprocess.run([sys.executable, "-c", code], check=True)  # ends without closing: its own file goes, too
    assert list(own_folder.iterdir()) == []


def test_a_forked_child_does_not_remove_its_parents_file(own_folder: Path) -> None:
    publisher = Publisher()
    publisher.write(STATE)
    assert publisher._file is not None and publisher.path is not None
    published._remove(os.dup(publisher._file), publisher.path, os.getpid() + 1)
    assert publisher.path.exists()
    publisher.close()


@pytest.mark.parametrize("content", [b"", b"\n", b"00000000 5\n", b"zz 3\n{}", b"\xff" * 100, b"00000000 -1\n{}"])
def test_what_is_no_such_file_is_not_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.engine"
    path.write_bytes(content)
    assert read(path) is None
    path.write_bytes(published.packed({"version": published.VERSION + 1, "pid": 1}))
    assert read(path) is None


def test_a_reader_in_the_middle_of_writes_gets_one_of_them_whole(own_folder: Path) -> None:
    publisher = Publisher()
    publisher.write(STATE)
    assert publisher.path is not None
    over = threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            publisher.write({**STATE, "step": number, "text": str(number) * (number % 700)})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            one = read(publisher.path)
            if one is not None and "text" in one.state:
                assert one.state["text"] == str(one.state["step"]) * (one.state["step"] % 700)
    finally:
        over.set()
        writer.join()
        publisher.close()


def test_an_engine_trains_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "folder", lambda: Path("/dev/null/running"))
    budgets = {"device": "16MiB", "cpu": "16MiB"}
    with offload.Engine(nn.Linear(4, 4), offload.SGD(), device="cpu", max_memory=budgets) as engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        assert engine.step()


def test_an_engine_may_be_invisible(own_folder: Path) -> None:
    budgets = {"device": "16MiB", "cpu": "16MiB"}
    with offload.Engine(nn.Linear(4, 4), device="cpu", max_memory=budgets, visible=False):
        assert running() == []
    assert not own_folder.exists()


def test_an_engine_says_how_it_is(engine: offload.Engine, own_folder: Path) -> None:
    [one] = running()
    stats, state = engine.stats(), one.state
    assert state["step"] == 1 and state["model"].startswith("Linear: 1 units") and state["device"] == str(engine.device)
    assert {name: tier["budget"] for name, tier in state["tiers"].items()} == stats.budget_bytes
    assert state["tiers"]["device"]["used"] <= state["tiers"]["device"]["peak"] <= stats.budget_bytes["device"]
    assert 0 < state["lanes"]["compute"]["share"] <= 1
    assert one.path.stat().st_size <= 4096
    engine.close()
    assert running() == [] and list(own_folder.iterdir()) == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_shows_an_engine_once(engine: offload.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once"]) == 0
    shown = capsys.readouterr().out
    assert f"process {os.getpid()} (" in shown and "Linear: 1 units" in shown and "  step 1, " in shown
    assert "of    16 MiB, peak" in shown and "compute     [" in shown and "computing waited for" in shown
    assert cli.main(["top", str(os.getpid())]) == 0  # no terminal: once, too
    assert capsys.readouterr().out.splitlines()[2] == shown.splitlines()[2]


def test_a_narrow_terminal_shows_sizes(engine: offload.Engine) -> None:
    lines = top.screen(running(), 48)
    assert max(map(len, lines)) <= 48
    assert any(re.fullmatch(r"  device +\[#*\s*\] [\d.]+ \w+ of 16 MiB, peak.*", line) for line in lines), lines
    assert any(line.endswith(">") for line in lines), "what is cut off says so"


def test_a_low_terminal_says_how_much_it_does_not_show(engine: offload.Engine) -> None:
    whole = top.screen(running() * 3, 80)
    for rows in range(1, len(whole) + 2):
        shown = top.screen(running() * 3, 80, rows)
        assert len(shown) == min(rows, len(whole))
        more = len(whole) - rows + 1
        assert shown[-1] == (f"... {more} more lines; top PID shows one process" if more > 1 else whole[-1])
        assert len(shown) < 3 or shown[1:-1] == whole[1 : len(shown) - 1]


def test_json_is_for_scripts(engine: offload.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)
    assert one["pid"] == os.getpid() and one["step"] == 1 and one["age_seconds"] >= 0
    assert one["tiers"]["cpu"]["budget"] == 16 << 20
    assert cli.main(["top", "--json", "--run", one["file"]]) == 0
    assert json.loads(capsys.readouterr().out)[0]["file"] == one["file"]


def test_it_refuses_by_name_where_no_engine_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once"]) == 1
    assert "top: expected an engine of this user that runs on this machine but found none;" in capsys.readouterr().err
    publisher = Publisher()
    publisher.write(STATE)
    assert cli.main(["top", "1", "--once"]) == 1
    assert f"in process 1 but found none; engines run in {os.getpid()}" in capsys.readouterr().err
    assert publisher.path is not None
    copy = tmp_path / "copy"
    os.mkfifo(tmp_path / "pipe")  # reading it would wait
    copy.write_bytes(published.packed({**running()[0].state, "start": "1"}))
    for path, message in (
        (copy, f"that of {copy}, process {os.getpid()}, does not run here"),
        (tmp_path / "no", "No such file"),
        (Path(__file__), "which is something else"),
        (tmp_path / "pipe", "which is something else"),
    ):
        assert cli.main(["top", "--run", str(path)]) == 1
        assert message in capsys.readouterr().err
    publisher.close()


@pytest.mark.parametrize("words", [["x"], ["1", "--run", "f"], ["--every", "0"], ["--every", "nan"]])
def test_wrong_calls_leave_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["top", *words])
    assert left.value.code == 2


def test_a_screen_is_drawn_again_until_no_engine_runs(engine: offload.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "6")
    looks: list[float] = []

    def look() -> list[published.Running]:
        found = running()
        if not found:
            raise offload.StateError("none")
        return found

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            engine.close()

    out = io.StringIO()
    top.watch(look, out, every_s=0.5, sleep=sleep)
    assert looks == [0.5] * 3
    screens = out.getvalue().split("\x1b[H")[1:]
    assert len(screens) == 3
    for shown in screens:
        lines = shown.replace("\x1b[K", "").removesuffix("\x1b[J").splitlines()
        assert len(lines) <= 5 and max(map(len, lines)) <= 40


def test_the_end_of_the_engine_whose_file_is_named_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    publisher, out = Publisher(), Terminal()
    publisher.write(STATE)
    monkeypatch.setattr(top, "watch", functools.partial(top.watch, sleep=lambda _: publisher.close()))
    arguments = argparse.Namespace(run=publisher.path, pid=None, every=1.0, once=False, json=False)
    top.run(arguments, out)
    assert out.getvalue().count("engines: 1") == 1
    with pytest.raises(offload.ConfigError, match="No such file"):
        top.run(arguments, out)


def test_a_name_cannot_command_the_terminal() -> None:
    publisher = Publisher()
    publisher.write({**STATE, "model": "a\x1b]0;title\x07b\nc"})
    lines = top.screen(running(), 80)
    assert "  a?]0;title?b?c" in lines
    publisher.close()


def test_it_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from offload.cli.main import main; print(main(['top']), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "1 False\n" and "found none" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_half_written_file_is_not_read(tmp_path: Path) -> None:
    """Its head is of one write and its content of another one, as long."""
    file = tmp_path / "half.engine"
    state = {**STATE, "version": published.VERSION, "pid": os.getpid(), "start": "", "space": ""}
    content = published.packed(state)
    file.write_bytes(content)
    assert read(file) is not None
    file.write_bytes(content.replace(b'"step": 3', b'"step": 4'))
    assert read(file) is None
