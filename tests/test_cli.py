"""The command line, and a fine-tuning run over a small fake with the engine's public face.

The fake trains a bag of embeddings with plain torch, so that losses really fall; the real engine has its own tests, and
one run through it is at the end.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.cli import main as cli
from offload.cli import models
from offload.cli.finetune import report
from offload.cli.finetune import run as finetune
from offload.cli.finetune.data import Data
from offload.cli.finetune.logs import NoLog
from offload.cli.finetune.progress import Progress, RssMeter
from offload.cli.finetune.sequences import Cut, orders
from offload.cli.finetune.settings import EngineSettings, FinetuneError, Settings, settings_of
from offload.cli.finetune.text import first_sentences, make_windows, read_text, split_text
from offload.errors import ConfigError
from offload.meta_models import positions_of
from offload.sizes import short_bytes
from offload.stats import LINKS, LinkStats, Stats

CPU = torch.device("cpu")
VOCABULARY = 16


class FakeEngine:
    """A next-token table trained with plain SGD, and counters that grow by known amounts per call."""

    grad_norm = 1.5
    plan = "a plan"
    device = CPU

    def __init__(self) -> None:
        self.table = torch.nn.Parameter(torch.zeros(VOCABULARY, VOCABULARY))
        self.optimizer = torch.optim.SGD([self.table], lr=5.0)
        self.training = True
        self.forwards: list[bool] = []
        self.steps = 0
        self.drained = True
        self.closed = False

    def __call__(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        assert self.training or self.drained, "what a step has left to do would count to the evaluation"
        self.forwards.append(self.training)
        logits = self.table[input_ids]
        loss = None
        if labels is not None:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss, logits=logits)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.drained = False

    def drain(self) -> None:
        self.drained = True

    def train(self, mode: bool = True) -> None:
        self.training = mode

    def eval(self) -> None:
        self.training = False

    def stats(self) -> Stats:
        # 100 bytes and 2 s on nvme_read, and 1 s of compute, per forward
        count = len(self.forwards)
        links = {name: LinkStats(0, 0.0) for name in LINKS}
        links["nvme_read"] = LinkStats(100 * count, 2.0 * count)
        links["compute"] = LinkStats(0, 1.0 * count)
        sizes = {"device": 1 << 20, "cpu": 2 << 20, "nvme": 3 << 20}
        return Stats(self.steps, 0, links, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0, 0, 0, 0, 0.0, 0, sizes, sizes, sizes, 1.0)

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        raise NotImplementedError

    def close(self, *, restore: bool | None = None) -> None:
        self.closed = True


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "model": Path("m"),
        "data": Path("t"),
        "steps": 6,
        "sequence_length": 8,
        "evaluation_sequences": 2,
        "evaluations": 2,
        "warmup_steps": 0,
    }
    return Settings(**{**values, **changes})


def encode(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


# --- text ---


def test_windows_do_not_overlap_and_keep_the_end_back() -> None:
    text = "".join(chr(ord("a") + i % 7) for i in range(1000))
    windows = make_windows(encode, text, settings(eval="0.1"))
    # 900 tokens to train on are 112 windows of 8; of the 100 held out 12 fit and 2 are wanted: the first and the last
    assert windows.train.shape == (112, 8)
    assert windows.train.flatten().tolist() == encode(text[:896])
    assert windows.held_out.tolist() == [encode(text[900:908]), encode(text[988:996])]


def test_text_is_cut_between_paragraphs() -> None:
    text = "a" * 90 + "\n\n" + "b" * 28
    assert split_text(text, 0.3) == ("a" * 90 + "\n\n", "b" * 28)
    assert split_text("a" * 100, 0.3) == ("a" * 70, "a" * 30)


def test_short_text_is_refused_with_the_counts() -> None:
    with pytest.raises(FinetuneError, match=r"at least 8 tokens .* got 18 and 2"):
        make_windows(encode, "a" * 20, settings(eval="0.1"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe", "UTF-8"), (b" \n", "is empty"), (None, "cannot be read")],
)
def test_unusable_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FinetuneError, match=message):
        read_text(path)


def test_prompt_is_the_beginning_of_a_long_paragraph() -> None:
    assert first_sentences("short\n\n" + "w " * 9, words=3) == "w w w"
    assert first_sentences("only three words", words=10) == "only three words"


def test_every_window_is_seen_once_per_epoch_in_an_order_drawn_from_the_seed() -> None:
    def order(seed: int) -> list[int]:
        supply = orders(6, settings(batch_size=4, seed=seed))
        return [number for _ in range(3) for number in next(supply)]

    first = order(1)
    assert sorted(first[:6]) == sorted(first[6:]) == list(range(6))
    assert first == order(1) != order(2)


# --- training ---


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    run = settings(steps=10, warmup_steps=2)
    factors = [finetune.learning_rate_factor(done, run) for done in range(11)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    # half of the cosine: 0.1 + 0.9 / 2
    assert factors[6] == pytest.approx(0.55)
    assert factors[10] == pytest.approx(0.1)


def data_of_a_pattern() -> Data:
    windows = make_windows(encode, "abcdefgh" * 40, settings(eval="0.2"))
    return Data(Cut(windows.train), Cut(windows.held_out), windows.prompt, [], "")


@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_lowers_the_held_out_loss_and_counts_only_steps(accumulation: int) -> None:
    engine, out = FakeEngine(), io.StringIO()
    run = settings(gradient_accumulation_steps=accumulation)
    ticks = iter(range(1000))
    training = finetune.train(
        engine,
        data_of_a_pattern(),
        run,
        Progress(out, steps=run.steps),
        CPU,
        log=NoLog(),
        clock=lambda: float(next(ticks)),
    )
    assert [step for step, _ in training.evaluations] == [0, 3, 6]
    assert training.evaluations[0][1] == pytest.approx(math.log(VOCABULARY))  # a table of zeros is uniform
    assert training.evaluations[-1][1] < 0.8 * training.evaluations[0][1]
    assert [record.step for record in training.steps] == [1, 2, 3, 4, 5, 6]
    assert training.seconds == 6.0  # one tick per step: evaluations are not in it
    assert engine.steps == 6 * accumulation
    # three evaluations of two sequences run in evaluation mode, and are in no link's bytes
    assert engine.forwards.count(False) == 6
    links = training.meter.per_step(run.steps)
    assert links["nvme_read"] == report.LinkReport(100.0 * accumulation, 2.0 * accumulation)
    assert training.meter.binding_link == "nvme_read"
    assert engine.training


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"save_every": 2}, "save_every: no output folder"),
        ({"resume": True}, "resume: no output folder"),
        ({"save_every": -1, "output": Path("o")}, "save_every and eval_every: expected whole numbers >= 0"),
        ({"resume": "maybe", "output": Path("o")}, 'resume: expected True, False or "auto" but got'),
        ({"keep_checkpoints": 0}, "keep_checkpoints: expected a whole number >= 1"),
    ],
)
def test_checkpoints_that_cannot_be_asked_for(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(FinetuneError, match=text):
        settings(**changes)


def test_sample_follows_the_most_likely_token_and_stops() -> None:
    engine = FakeEngine()
    with torch.no_grad():
        for token, following in ((1, 2), (2, 3), (3, 4)):
            engine.table[token, following] = 1.0
    assert finetune.continue_text(engine, torch.tensor([0, 1]), 2, CPU, None) == [2, 3]
    assert finetune.continue_text(engine, torch.tensor([0, 1]), 9, CPU, 4) == [2, 3]
    assert set(engine.forwards) == {False}


# --- progress ---


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_three_steps(stream: io.StringIO) -> str:
    progress = Progress(stream, steps=3)
    for step in (1, 2, 3):
        used = {"device": 5 << 20, "cpu": 1 << 30, "nvme": 0}
        progress.step(report.StepRecord(step, 2.5, None, 1e-3, 2.0, 100), used, "compute")
    progress.close()
    return stream.getvalue()


def test_terminal_rewrites_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = show_three_steps(Terminal())
    assert shown.count("\n") == 1
    last = shown.rsplit("\r", 1)[1].strip()
    assert last == "step 3/3 | loss 2.5000 | 50 tokens/s | device 5 MiB  cpu 1 GiB  nvme 0 B | bound by compute"


def test_narrow_terminal_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert max(len(line) for line in show_three_steps(Terminal()).rstrip("\n").split("\r")) <= 39


def screen(shown: str) -> list[str]:
    """Return the lines that stand on a terminal in the end."""
    lines = []
    for line in shown.split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines


def test_notes_stand_above_the_line_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(stream, steps=3)
    progress.note("before")
    for step in (1, 2):
        progress.step(report.StepRecord(step, 2.5, None, 1e-3, 2.0, 100), {"device": 5 << 20}, "compute")
        progress.note(f"after {step}")
    progress.close()
    progress.close()
    progress.note("end")
    assert screen(stream.getvalue()) == [
        "before",
        "after 1",
        "after 2",
        "step 2/3 | loss 2.5000 | 50 tokens/s |",
        "end",
        "",
    ]


def test_file_gets_plain_lines_now_and_then() -> None:
    shown = show_three_steps(io.StringIO())
    assert "\r" not in shown
    lines = shown.splitlines()
    assert [line.split(" |")[0] for line in lines] == ["step 1/3", "step 3/3"]
    assert lines[0].endswith("4.0 s left")


# --- report ---


def make_report(**changes: Any) -> report.Report:
    values: dict[str, Any] = {
        "model": "tiny",
        "parameters": 1_500_000,
        "tokens_per_step": 512,
        "steps": [report.StepRecord(i + 1, 4.0 - 0.2 * i, 1.0, 1e-4, 2.0, 512) for i in range(4)],
        "evaluations": [(0, 4.0), (4, 3.5)],
        "prompt": "Once",
        "sample_before": "upon a time",
        "sample_after": "",
        "train_seconds": 8.0,
        "total_seconds": 75.0,
        "memory": report.MemoryReport(400 << 20, 900 << 20, 500 << 20),
        "peak_bytes": {"device": 300 << 20, "cpu": 150 << 20, "nvme": 2 << 30},
        "budget_bytes": {"device": 300 << 20, "cpu": 200 << 20, "nvme": 3 << 30},
        "links": {"nvme_read": report.LinkReport(1 << 30, 0.5), "compute": report.LinkReport(0, 1.5)},
        "binding_link": "compute",
        "settings": {"text": Path("x")},
        "machine": {},
    }
    return report.Report(**{**values, **changes})


def test_report_shows_the_figures() -> None:
    text = report.render(make_report())
    for expected in (
        "4.0000 before, 3.5000 after (perplexity 54.6, 33.1)",
        "256 tokens/s; 4 steps of 512 tokens in 8.0 s; the whole run 1 min 15 s",
        "RSS peak 500 MiB over the 400 MiB of interpreter and libraries; budget 500 MiB + 64 MiB: within",
        "peak 300 MiB of 300 MiB",
        "1 GiB in  0.500 s  25 % of the time",
        "upon a time",
        "(nothing)",
    ):
        assert expected in text, text


def test_report_says_when_the_budget_was_exceeded() -> None:
    # 400 MiB of baseline, 500 MiB of budget, 64 MiB of head-room
    limit = (400 + 500 + 64) << 20
    exact = make_report(memory=report.MemoryReport(400 << 20, limit, 500 << 20))
    above = make_report(memory=report.MemoryReport(400 << 20, limit + 1, 500 << 20))
    assert exact.memory.within_budget and not above.memory.within_budget
    assert "EXCEEDED" in report.render(above)
    assert "no budget given" in report.render(make_report(memory=report.MemoryReport(1, 2, None)))


def test_json_report_is_plain_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report.write_json(make_report(evaluations=[(0, float("nan")), (4, 3.5)]), path)
    values = json.loads(path.read_text())
    assert values["loss_before"] is None and values["loss_after"] == 3.5
    assert values["tokens_per_second"] == 256.0 and values["settings"] == {"text": "x"}
    assert set(values) >= {field.name for field in dataclasses.fields(report.Report)}
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_leaves_no_half_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")

    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    for write, name in ((report.write_json, "report.json"), (report.write_plot, "loss.png")):
        with pytest.raises(ConfigError, match=f"--output: expected a file that can be written but got .*{name}"):
            write(make_report(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.write_plot(make_report(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_running_median() -> None:
    # of 1 2 6, of 1 2 6 3, of all, of 2 6 3 0, of 6 3 0
    assert report.smoothed([1.0, 2.0, 6.0, 3.0, 0.0], width=5) == [2.0, 2.5, 2.0, 2.5, 3.0]
    assert report.smoothed([], width=5) == []


def test_plot_leaves_outliers_out_and_held_out_losses_in() -> None:
    steps = [report.StepRecord(i + 1, 3.0 if i else 99.0, None, 1e-4, 1.0, 512) for i in range(40)]
    low, high = report.loss_range(make_report(steps=steps))
    # training losses in the middle are 3.0; held out are 4.0 and 3.5; a margin of 0.15
    assert (low, high) == pytest.approx((2.85, 4.15))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (64 << 10, "64 KiB"),
        (1000 << 10, "0.977 MiB"),
        (812 << 20, "812 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert short_bytes(size) == text


def test_durations_for_people() -> None:
    assert [report.duration_text(seconds) for seconds in (8.24, 65, 7380)] == ["8.2 s", "1 min 05 s", "2 h 03 min"]


def test_rss_meter_sees_a_peak_that_is_gone() -> None:
    meter = RssMeter()
    block = bytearray(b"x" * (96 << 20))
    del block
    meter.close()
    assert meter.peak_bytes() - meter.baseline_bytes >= 64 << 20


# --- command line ---


@pytest.mark.few
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--json"], ["--version"], ["--help"]])
def test_output_that_nobody_reads_ends_it_quietly(words: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offload", *words],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode == cli.EXIT_PIPE or words == ["--help"]  # argparse itself suppresses errors of its output


def test_output_that_has_no_room_is_told() -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "offload", "--version"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == os.EX_IOERR
    assert done.stderr == "offload: error: output: No space left on device; free space, or write it elsewhere\n"


REQUIRED = ["finetune", "--model", "m", "--text", "t"]


def test_arguments_become_settings(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"threads": 2, "max_memory": {"cpu": "1GiB", "nvme": "9GiB"}}')
    words = [
        *REQUIRED,
        *("--config", str(config), "--device-memory", "700MiB", "--nvme-memory", "4GiB", "--nvme-path", "/a"),
        *("--nvme-path", "/b", "--dtype", "float32", "--max-grad-norm", "0", "--steps", "7"),
    ]
    made = settings_of(cli.build_parser().parse_args(words))
    assert made.steps == 7 and made.max_grad_norm is None and made.model == Path("m")
    assert made.engine_options == {
        "threads": 2,
        "max_memory": {"device": "700MiB", "cpu": "1GiB", "nvme": "4GiB"},
        "nvme_path": [Path("/a"), Path("/b")],
        "dtype": "float32",
    }


def test_a_budget_comes_in_place_of_the_one_that_a_file_has_under_another_name(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"max_memory": {"0": "8GiB", "host": "2GiB"}}')
    words = [*REQUIRED, "--config", str(config), "--device-memory", "700MiB"]
    made = settings_of(cli.build_parser().parse_args(words))
    assert made.engine_options["max_memory"] == {"device": "700MiB", "host": "2GiB"}


def test_budgets_of_a_file_that_are_no_object_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text = tmp_path / "config.json", tmp_path / "t.txt"
    text.write_text("words")
    words = ["finetune", "--model", str(tmp_path), "--text", str(text), "--config", str(config)]
    for content, message in (('{"max_memory": "8GiB"}', "max_memory: expected a mapping"), ("[" * 100_000, "as JSON")):
        config.write_text(content)
        assert cli.main([*words, "--device-memory", "4GiB"]) != 0
        assert message in capsys.readouterr().err


def test_nothing_is_set_that_was_not_asked_for() -> None:
    made = settings_of(cli.build_parser().parse_args(REQUIRED))
    assert made == Settings(model=Path("m"), data=Path("t")) and made.engine_options == {}


def test_help_names_every_option_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["finetune", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    fields = [*dataclasses.fields(Settings), *dataclasses.fields(EngineSettings)]
    missing = [field.name for field in fields if f"--{field.name.replace('_', '-')} " not in shown]
    assert left.value.code == 0 and missing == ["engine_options"]
    assert "optimizer steps (default: 100)" in shown and "clip to it; 0 does not clip (default: 1.0)" in shown
    assert "UTF-8 text --" in shown and "None" not in shown and "False" not in shown


def test_every_option_reaches_its_setting_with_its_type() -> None:
    """Each number is asked for as one more than its default, each path as its own name, each switch as on."""
    words, expected = [], {}
    others: dict[str, Any] = {"loss_on": "all", "peft": "lora", "log": "wandb", "eval": "eval", "prompt": "prompt"}
    others |= {"lora_rank": 3, "lora_alpha": 5, "evaluation_sequences": 7}
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        if field.name in ("engine_options", "evaluations"):  # the latter contradicts eval_every
            continue
        if field.name in others:
            expected[field.name] = others[field.name]
            words += [option, str(others[field.name])]
        elif field.name == "lora_targets":
            expected[field.name] = ["a", "b"]
            words += [option, "a", option, "b"]
        elif field.default is False:
            words += [option]
            expected[field.name] = True
        elif isinstance(field.default, (int, float)):
            expected[field.name] = field.default + (0.5 if isinstance(field.default, float) else 1)
            words += [option, str(expected[field.name])]
        else:
            words += [option, field.name]
            expected[field.name] = Path(field.name)
    assert settings_of(cli.build_parser().parse_args(["finetune", *words])) == Settings(**expected)
    assert settings_of(cli.build_parser().parse_args([*REQUIRED, "--evaluations", "9"])).evaluations == 9
    assert settings_of(cli.build_parser().parse_args([*REQUIRED, "--packing", "joined"])).packing == "joined"


def test_every_engine_option_reaches_the_engine(tmp_path: Path) -> None:
    (tmp_path / "config").write_text('{"dtype": "float32", "threads": 3}')
    names = [field.name for field in dataclasses.fields(EngineSettings) if field.name != "config"]
    switch = "background_checkpoints"
    words = [f"--{name.replace('_', '-')}{'' if name == switch else f'={name}'}" for name in names]
    made = settings_of(cli.build_parser().parse_args([*REQUIRED, *words, "--config", str(tmp_path / "config")]))
    budgets = {"device": "device_memory", "cpu": "cpu_memory", "nvme": "nvme_memory"}
    plain = {name: name for name in names if name not in budgets.values()}
    paths = {name: [Path(name)] for name in ("nvme_path", "run_dir")}
    expected = {"threads": 3, **plain, switch: True, **paths, "max_memory": budgets}
    assert made.engine_options == expected


@pytest.mark.parametrize("name", ["max_grad_norm", "gradient_accumulation_steps"])
def test_a_file_does_not_say_what_the_run_says(name: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f'{{"{name}": 4}}')
    given = cli.build_parser().parse_args([*REQUIRED, "--config", str(tmp_path / "config")])
    word = f"--{name.replace('_', '-')}"
    with pytest.raises(FinetuneError, match=f"{name}: expected it as {word} but .*; pass {word}"):
        settings_of(given)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> None:
        (tmp_path / "missing" / "folder").mkdir()

    assert cli.guarded(make) == 1
    assert re.search(r"^offload: error: \S+/missing/folder: No such file.*; name another", capsys.readouterr().err)

    def fail() -> None:
        raise OSError("nobody's file")

    with pytest.raises(OSError, match="nobody's"):
        cli.guarded(fail)


def test_an_option_of_another_command_is_told_by_the_one_that_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    """It is not suggested: it is what was typed."""
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "--model", "x", "--nvme-memory", "1GiB"])
    error = capsys.readouterr().err
    assert left.value.code == 2 and "usage: offload plan" in error and "did you mean '--nvme-memory'" not in error
    assert "offload plan: error: unrecognized arguments: --nvme-memory 1GiB" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-memry", "1GiB"], "did you mean '--device-memory'?"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--max-grad-norm", "x"], "argument --max-grad-norm: invalid float value: 'x'"),
        (["--save-model=yes"], "argument --save-model: ignored explicit argument 'yes'"),
    ],
)
def test_wrong_calls_leave_with_two(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([*REQUIRED, *words])
    assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "error: --steps: expected a whole number >= 1 but got 0"),
        (["--sequence-length", "1"], "--sequence-length"),
        (["--evaluations", "0"], "--evaluations: expected a whole number >= 1 but got 0"),
        (["--eval", "1"], "--eval: expected a share in [0, 1) or a file but got 1"),
        (["--eval", "nan"], "--eval: expected a share in [0, 1) or a file but got nan"),
        (["--warmup-steps", "-1"], "--sample-tokens, --warmup-steps, --save-every and --eval-every: expected"),
        (["--lora-rank", "4"], "--lora-rank: expected peft beside it but got none; add --peft lora"),
        (["--peft", "lora", "--lora-alpha", "0"], "--lora-alpha: expected a whole number >= 1 but got 0"),
        (["--eval-every", "2", "--evaluations", "2"], "--eval-every: expected it or evaluations but got both"),
        (["--log", "jsonl"], "--log: no folder is given; add --log-dir or --output"),
        (["--log-dir", "d"], "--log-dir: expected log beside it"),
        (["--eval", "0", "--eval-every", "2"], "--eval-every: expected something to evaluate on but got eval 0"),
        (["--save-model"], "--save-model: no output folder"),
        (["--resume"], "--resume: no output folder"),
        (["--offload-param", "nvme"], "--offload-param nvme: --nvme-path is missing; name a directory on the drive"),
        (["--nvme-memory", "1GiB"], "--nvme-memory: a budget without a drive; name a directory on it with --nvme-path"),
        (["--dtype", "bfloat61"], "did you mean 'bfloat16'"),
        (["--state-dtype", "int7"], "did you mean 'int8'"),
        (["--device-memory", "7 potatoes"], "--device-memory: unknown unit"),
        (["--config", "missing.json"], "config file missing.json"),
        (["--config", "/dev/null"], "cannot be read as JSON"),
        ([], "--model m: expected a folder with config.json"),
    ],
)
def test_errors_are_one_line_and_leave_with_one(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*REQUIRED, *words]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("offload: error: ") and error.count("\n") == 1


def test_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "text").write_text("some text")
    assert cli.main(["finetune", "--model", str(tmp_path / "no"), "--text", str(tmp_path / "text")]) == 1
    assert "expected a folder with config.json" in capsys.readouterr().err


def weights(file: Path, dtype: torch.dtype, numel: int = 1024) -> int:
    """Write a file with one tensor of two rows; returns its bytes."""
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2, numel // 2, dtype=dtype)}, file)
    return file.stat().st_size


@pytest.mark.parametrize(
    ("method", "dtype", "more"),
    [
        ("bitsandbytes", torch.uint8, 0),
        ("fp8", torch.float8_e4m3fn, 1024),  # a byte becomes two
        ("mxfp4", torch.uint8, 3072),  # two elements become four bytes
        ("mxfp4", torch.bfloat16, 0),
    ],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_has_to_be_in_memory_needs_what_it_takes_there(
    method: str, dtype: torch.dtype, more: int, sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that nobody reads count nothing; what is dequantized while it is read is larger than its file."""
    pytest.importorskip("accelerate")
    if method == "fp8" and torch.cuda.is_available():
        pytest.skip("a GPU may compute with weights of 8 bits")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    name = "model-1.safetensors" if sharded else "model.safetensors"
    size = weights(tmp_path / name, dtype) + more
    if sharded:
        index = {"weight_map": {"weight": name, "other": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights(tmp_path / "consolidated.safetensors", dtype)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    free = [size]
    monkeypatch.setattr("offload.memory.limits.free_host_bytes", lambda: free[0])
    models._require_memory(tmp_path, "its weights are quantized")
    free[0] = size - 1
    with pytest.raises(ConfigError, match="of free memory, where all of it has to be because its weights"):
        models._require_memory(tmp_path, "its weights are quantized")


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "cpu"),
        ({"load_in_8bit": True}, "cpu"),
        ({"quant_method": "gptq"}, None),
    ],
)
def test_weights_of_bitsandbytes_are_not_read_onto_a_gpu(
    how: dict[str, Any], place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one, transformers takes it unless told otherwise."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": how}))
    seen: list[Any] = []

    def load(folder: Path, **options: Any) -> None:
        seen.append(options.get("device_map"))
        raise OSError("enough seen")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(ConfigError, match="enough seen"):
        models.read_causal_model(tmp_path)
    assert seen == [place]


@pytest.mark.parametrize("words", [["generate", "--prompt", "a"], ["merge", "--adapter", "a", "--out", "o"]])
def test_commands_without_transformers_say_what_to_install(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main([*words, "--model", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("offload: error: transformers: expected to be installed") and error.count("\n") == 1


def test_unknown_option_in_a_file_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"offload_optimiser": "cpu"}')
    assert cli.main([*REQUIRED, "--config", str(tmp_path / "config.json")]) == 1
    assert "did you mean 'offload_optimizer'" in capsys.readouterr().err


def test_interruption_leaves_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "run", interrupted)
    assert cli.main(REQUIRED) == 130
    assert "interrupted" in capsys.readouterr().err


def test_module_runs_as_a_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith("offload ")


# --- the real engine ---


def make_model_folder(folder: Path) -> None:
    """Write a two-layer Llama with a byte-level tokenizer of 256 letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).to(torch.bfloat16).save_pretrained(folder)


def test_run_through_three_tiers_is_the_run_in_memory(tmp_path: Path) -> None:
    """The same losses, samples and saved model wherever the parameters and states live."""
    pytest.importorskip("transformers")
    make_model_folder(tmp_path / "model")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "swap").mkdir()

    def run(output: str, **options: Any) -> tuple[report.Report, str]:
        out = io.StringIO()
        made = finetune.run(
            settings(
                model=tmp_path / "model",
                data=tmp_path / "text",
                output=tmp_path / output,
                save_model=True,
                sequence_length=32,
                lr=1e-2,
                sample_tokens=4,
                gradient_accumulation_steps=2,
                engine_options={"device": "cpu", **options},
            ),
            stream=out,
        )
        return made, out.getvalue()

    memory, _ = run("memory", max_memory={"device": "64MiB", "cpu": "64MiB"})
    offloaded, shown = run(
        "offloaded",
        max_memory={"device": "64MiB", "cpu": "64MiB", "nvme": "64MiB"},
        nvme_path=tmp_path / "swap",
        offload_param="nvme",
        offload_optimizer="nvme",
    )
    assert offloaded.loss_after < offloaded.loss_before
    assert [record.loss for record in offloaded.steps] == [record.loss for record in memory.steps]
    assert offloaded.evaluations == memory.evaluations
    assert offloaded.sample_after == memory.sample_after
    assert offloaded.links["nvme_write"].bytes_per_step > 0 and memory.links["nvme_write"].bytes_per_step == 0
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("memory", "offloaded")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert json.loads((tmp_path / "offloaded/report.json").read_text())["steps"][0]["loss"] == memory.steps[0].loss
    assert (tmp_path / "offloaded/loss.png").is_file()
    page = (tmp_path / "offloaded/report.html").read_text()
    assert "<svg" in page and "report.html" in shown
    assert re.search(r"Lanes of the last (\d+ steps|step)<", page), "and not of the evaluation behind them"
    assert list((tmp_path / "swap").iterdir()) == []
    assert "nvme" in shown and "held-out loss" in shown


def test_a_run_may_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    make_model_folder(tmp_path / "model")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    before = sorted(tmp_path.rglob("*"))
    line = ["finetune", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--device", "cpu"]
    line += ["--device-memory", "64MiB", "--cpu-memory", "64MiB", "--sequence-length", "32", "--steps", "2"]
    assert cli.main([*line, "--evaluation-sequences", "2", "--sample-tokens", "2"]) == 0
    assert "continued after" in capsys.readouterr().out and sorted(tmp_path.rglob("*")) == before


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 256}


@pytest.mark.parametrize(
    ("kind", "changes", "positions"),
    [
        ("llama", {"max_position_embeddings": 24, "intermediate_size": 32}, None),  # computes them
        ("bloom", {}, None),
        ("gpt2", {"n_positions": 24}, 24),
        ("gptj", {"n_positions": 24, "rotary_dim": 4}, 24),  # a table, although nobody learns it
        ("opt", {"max_position_embeddings": 24, "ffn_dim": 32, "word_embed_proj_dim": 16}, 24),  # in rows 2 to 25
        ("roberta", {"max_position_embeddings": 26, "intermediate_size": 32, "is_decoder": True}, 24),  # the same
    ],
)
def test_positions_that_have_an_end(kind: str, changes: dict[str, Any], positions: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **SMALL, **changes)
    with torch.device("meta"):
        assert positions_of(transformers.AutoModelForCausalLM.from_config(config)) == positions


def make_run_of_24_positions(folder: Path, **changes: Any) -> Settings:
    """Return what runs a GPT-2 that is written to a folder, with the tokenizer of a Llama."""
    transformers = pytest.importorskip("transformers")
    make_model_folder(folder / "model")
    config = transformers.AutoConfig.for_model("gpt2", **SMALL, n_positions=24)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    values: dict[str, Any] = {"sequence_length": 24, "steps": 1, "save_model": True, "output": folder / "output"}
    values["engine_options"] = {"device": "cpu", "max_memory": {"device": "64MiB", "cpu": "64MiB"}}
    return settings(model=folder / "model", data=folder / "text", prompt="the quick ", **{**values, **changes})


def test_a_sample_ends_where_positions_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, lengths = finetune.continue_text, []

    def counted(*args: Any) -> list[int]:
        made = real(*args)
        lengths.append(len(made))
        return made

    monkeypatch.setattr(finetune, "continue_text", counted)
    run = make_run_of_24_positions(tmp_path)
    finetune.run(run, stream=io.StringIO())
    assert lengths == [15, 15]  # behind 10 tokens: the model has read 24, and nobody reads the last one
    finetune.run(dataclasses.replace(run, prompt="the quick " * 3), stream=io.StringIO())
    assert lengths[2:] == [0, 0]
    with pytest.raises(FinetuneError, match=r"sequence_length: expected at most 24, the positions .* but got 25"):
        finetune.run(dataclasses.replace(run, sequence_length=25), stream=io.StringIO())


def test_what_is_generated_ends_where_positions_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run_of_24_positions(tmp_path)
    line = ["generate", "--model", str(tmp_path / "model"), "--device", "cpu", "--device-memory", "64MiB"]
    line += ["--cpu-memory", "64MiB", "--temperature", "0", "--prompt"]
    assert cli.main([*line, "the quick ", "--max-new-tokens", "15"]) == 0
    assert "positions" not in capsys.readouterr().err
    assert cli.main([*line, "the quick ", "--max-new-tokens", "16"]) == 0
    assert "at most 15 new tokens: the model has 24 positions" in capsys.readouterr().err
    assert cli.main([*line, "the quick " * 3]) != 0
    assert "prompt: expected at most 24 tokens, the model's positions, but got 30" in capsys.readouterr().err


@pytest.mark.parametrize("cached", [True, False])
def test_the_model_that_is_written_caches_as_the_one_that_was_read(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run_of_24_positions(tmp_path, sample_tokens=0)
    file = run.model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_cache": cached}))
    real, found = finetune.take_step, []

    def looked_at(engine: Any, *args: Any) -> float:
        found.append(engine.module.config.use_cache)
        return real(engine, *args)

    monkeypatch.setattr(finetune, "take_step", looked_at)
    finetune.run(run, stream=io.StringIO())
    assert found == [False]
    assert json.loads((tmp_path / "output" / "model" / "config.json").read_text())["use_cache"] == cached


def test_the_last_sample_costs_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was trained is written before it, and so is the report."""
    real, calls = finetune.continue_text, []

    def failing(*args: Any) -> list[int]:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(finetune, "continue_text", failing)
    with pytest.raises(KeyboardInterrupt):
        finetune.run(make_run_of_24_positions(tmp_path), stream=io.StringIO())
    assert (tmp_path / "output" / "model" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "output" / "report.json").read_text())["steps"][0]["step"] == 1


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    """Interrupted after the fourth of six steps; the resumed run has the whole report, and the same weights."""
    pytest.importorskip("transformers")
    make_model_folder(tmp_path / "model")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)

    def run(output: str, **changes: Any) -> report.Report:
        tiers = {"max_memory": {"device": "64MiB", "cpu": "64MiB", "nvme": "64MiB"}, "background_checkpoints": True}
        tiers |= {"nvme_path": tmp_path, "offload_optimizer": "nvme"}
        given = {"save_model": True, "sequence_length": 32, "lr": 1e-2, "sample_tokens": 4, "warmup_steps": 2}
        places = {"model": tmp_path / "model", "data": tmp_path / "text", "output": tmp_path / output}
        engine_options = {"device": "cpu", **tiers}
        return finetune.run(
            settings(**given, **places, gradient_accumulation_steps=2, engine_options=engine_options, **changes),
            stream=io.StringIO(),
        )

    whole = run("whole")
    real = Progress.step

    def interrupted(self: Progress, record: report.StepRecord, *args: Any) -> None:
        if record.step == 5:
            raise KeyboardInterrupt
        real(self, record, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run("parts", save_every=2)
    with pytest.raises(FinetuneError, match="resume: expected seed 0.*but got 1"):
        run("parts", resume=True, seed=1)
    with pytest.raises(FinetuneError, match=r"resume: expected weight_decay 0\.1 but got 0\.2"):
        run("parts", resume=True, weight_decay=0.2)
    with pytest.raises(FinetuneError, match=r"expected no run there but checkpoints has step-.*; pass --resume"):
        run("parts", save_every=2)
    resumed = run("parts", save_every=2, resume=True)
    assert [(r.step, r.loss, r.lr) for r in resumed.steps] == [(r.step, r.loss, r.lr) for r in whole.steps]
    assert (resumed.evaluations, resumed.sample_before, resumed.sample_after) == (
        [tuple(one) for one in whole.evaluations],
        whole.sample_before,
        whole.sample_after,
    )
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    kept = sorted(path.name for path in (tmp_path / "parts" / "checkpoints").iterdir())
    assert kept == [".lock", "latest", "step-00000004", "step-00000006"]
    shutil.rmtree(tmp_path / "parts" / "model")
    complete = run("parts", resume=True)  # what was not written, or is lost, is written
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert (complete.steps, complete.evaluations) == (resumed.steps, resumed.evaluations)
    assert (complete.sample_after, complete.links) == (whole.sample_after, {})
    with pytest.raises(FinetuneError, match="resume: expected at most 4 steps behind the run but got 6; ask for as"):
        run("parts", resume=True, steps=4)
    longer = run("parts", resume=True, steps=8)  # goes on as a run of eight steps would
    rates = [1e-2 * finetune.learning_rate_factor(done, settings(steps=8, warmup_steps=2)) for done in (6, 7)]
    assert [record.lr for record in longer.steps[6:]] == rates


def test_a_durable_run_is_the_run_that_was_never_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted inside the fifth of six steps, between commits; ``--resume auto`` begins, and goes on."""
    pytest.importorskip("transformers")
    make_model_folder(tmp_path / "model")
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 200)

    def run(name: str, *words: str, steps: int = 6) -> tuple[int, Any]:
        line = ["finetune", "--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--save-model"]
        line += ["--output", str(tmp_path / name), "--sequence-length", "32", "--lr", "1e-2", "--sample-tokens", "4"]
        line += ["--steps", str(steps), "--gradient-accumulation-steps", "2", "--warmup-steps", "2"]
        line += ["--evaluations", "2", "--evaluation-sequences", "2"]
        line += [
            "--device",
            "cpu",
            "--device-memory",
            "16MiB",
            "--cpu-memory",
            "16MiB",
            "--nvme-memory",
            "64MiB",
            *words,
        ]
        code = cli.main(line)
        found = tmp_path / name / "report.json"
        return code, json.loads(found.read_text()) if found.is_file() else None

    where = ["--run-dir", str(tmp_path / "run")]
    assert run("none", *where, "--resume")[0] == 1  # there is nothing to go on with
    code, whole = run("whole", "--nvme-path", str(tmp_path), "--offload-param", "nvme", "--offload-optimizer", "nvme")
    assert code == 0
    real = Progress.step

    def interrupted(self: Progress, record: report.StepRecord, *args: Any) -> None:
        if record.step == 5:
            raise KeyboardInterrupt
        real(self, record, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "step", interrupted)
        assert run("parts", *where, "--resume", "auto") == (130, None)
    assert run("parts", *where) == (1, None)  # a run is there, and nobody said to go on with it
    assert run("parts", *where, "--resume", "--seed", "1") == (1, None)
    code, resumed = run("parts", *where, "--resume", "auto")
    assert code == 0
    for name in ("evaluations", "sample_before", "sample_after"):
        assert resumed[name] == whole[name], name
    kept = ("step", "loss", "lr")
    assert [[row[key] for key in kept] for row in resumed["steps"]] == [
        [row[key] for key in kept] for row in whole["steps"]
    ]
    weights = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "parts")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    capsys.readouterr()
    code, complete = run("other", *where, "--resume", "auto")  # all steps are taken: it writes what this folder lacks
    assert code == 0 and (tmp_path / "other" / "model" / "model.safetensors").read_bytes() == weights[0].read_bytes()
    assert complete["sample_after"] == whole["sample_after"] and complete["links"] == {}
    shown = capsys.readouterr().out
    assert "resumed after step 6, and all are taken; ask for more with --steps\n" in shown and "page:" not in shown


def test_records_of_a_long_run_are_thinned() -> None:
    steps = [report.StepRecord(number, 1.0, None, 0.1, 1.0, 1) for number in range(1, 5001)]
    few = report.thinned(steps)
    assert len(few) <= 1026 and (few[0].step, few[-1].step) == (1, 5000)
    assert report.thinned(steps[:1000]) == steps[:1000]
    again = report.thinned([*few, *(report.StepRecord(number, 1.0, None, 0.1, 1.0, 1) for number in range(5001, 9001))])
    assert len(again) <= 2000 and again[-1].step == 9000
