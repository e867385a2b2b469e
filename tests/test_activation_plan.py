"""Activations in the plan: bytes as an engine moves them, seconds of both ways, and what "auto" chooses."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_ranks
import torch
from harness import assert_equal, everything_on_device
from test_leaving import MIB, Net, loss_of, net, options, rows, run
from test_leaving import small_ones_leave as small_ones_leave  # a fixture
from torch import nn

import offload
from offload import deciding, predicting, rehearsing
from offload.activations import leaving
from offload.activations.away import Away
from offload.cli.main import main
from offload.meta_models import made_on_meta, shortened
from offload.module.recomputing import can_recompute
from offload.planning.choosing import choose
from offload.planning.hardware import DESKTOP, Hardware
from offload.planning.plan import Plan
from offload.planning.timing import timing_of
from offload.planning.work import work_of

pytestmark = pytest.mark.usefixtures("single_torch_thread", "small_ones_leave")

LINKS = ("nvme_read", "nvme_write", "h2d", "d2h")
ROOMS = [("8MiB", 0), ("512KiB", "8MiB"), ("256KiB", 0)]  # all in host memory; some on the drive; some stay
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
SMALL = {"activation_memory": "512KiB"}  # of the device: not all fits


class Loss(nn.Module):
    """The net with its loss, as models of transformers have it."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.net = net(checkpointing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        return loss_of(self.net, x)


def room(host: str, drive: str | int) -> dict[str, Any]:
    return {"activation_cpu_memory": host, "activation_nvme_memory": drive}


def forecast(path: Path, module: nn.Module | None = None, **more: Any) -> offload.Forecast:
    module = Loss() if module is None else module
    given = options(path, **more)
    if "hardware" in more:
        del given["device"]  # that machine has an accelerator
    return offload.plan(module, offload.AdamW(lr=1e-2), batch=[rows(0)], **given)


def links_of(stats: offload.Stats) -> dict[str, int]:
    return {link: stats.links[link].bytes for link in LINKS}


def micro_batch(engine: offload.Engine, number: int = 0) -> dict[str, int]:
    """Run one, with no copy under way between forward and backward; returns the bytes per link."""
    before = links_of(engine.stats())
    loss = engine(rows(number))
    engine._parts.activations.has_left()
    engine.backward(loss)
    del loss
    after = links_of(engine.stats())
    return {link: after[link] - before[link] for link in LINKS}


# --- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [None, False])
@pytest.mark.parametrize(("host", "drive"), ROOMS)
def test_bytes_are_known_beforehand(host: str, drive: str | int, checkpointing: bool | None, tmp_path: Path) -> None:
    """And those that the first step has measured are the same."""
    found = forecast(tmp_path, Loss(checkpointing), **room(host, drive))
    with offload.Engine(
        Loss(checkpointing), offload.AdamW(lr=1e-2), **options(tmp_path, **room(host, drive))
    ) as engine:
        assert engine.plan.activation_step_bytes == {}
        moved = micro_batch(engine)
        engine.step()
        plan = engine.plan
    assert moved["d2h"] >= 4 * 65536 and (checkpointing is False or (moved["nvme_write"] > 0) == bool(drive))
    for planned in (found.plan, plan):
        assert {link: planned.step_bytes[link] for link in LINKS} == moved
        assert planned.activation_step_bytes == {link: size for link, size in moved.items() if size}
        assert "moved of activations, per micro-batch: " in str(planned)
    assert json.loads(json.dumps(found.to_dict()))["plan"]["activation_step_bytes"] == found.plan.activation_step_bytes


T5 = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
ATTENTION = {  # dropout and a bias that is trained need all scores on a CPU, and a mask is kept in another dtype
    "causal": ("LlamaConfig", LLAMA),
    "dropout": ("LlamaConfig", {**LLAMA, "attention_dropout": 0.1}),
    "mask": ("MistralConfig", {**LLAMA, "sliding_window": 32}),
    "bias": ("T5Config", {**T5, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_bytes_are_those_of_the_simulation_of_a_transformer(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, sizes = ATTENTION[kind]
    auto = transformers.AutoModelForSeq2SeqLM if kind == "bias" else transformers.AutoModelForCausalLM
    model = auto.from_config(getattr(transformers, config)(**sizes)).train()
    model.config.use_cache = False
    given = options(tmp_path, **room("8MiB", 0)) | {"activation_memory": "2MiB"}
    found = offload.plan(model, offload.AdamW(), batch=(1, 256), **given)
    ids = torch.zeros(1, 256, dtype=torch.int64)
    with offload.Engine(model, offload.AdamW(), **given) as engine:
        loss = engine(input_ids=ids, labels=ids).loss
        engine._parts.activations.has_left()
        engine.backward(loss)
        moved = engine.stats().links
        assert moved["d2h"].bytes == found.plan.step_bytes["d2h"] > MIB
        assert moved["h2d"].bytes == found.plan.step_bytes["h2d"]


def test_nothing_is_counted_where_nothing_leaves(tmp_path: Path) -> None:
    for mode in ("keep", "recompute"):
        found = forecast(tmp_path, activations=mode)
        assert found.plan.activation_step_bytes == {} and found.plan.step_bytes["d2h"] == 0
        with offload.Engine(Loss(), offload.AdamW(), **options(tmp_path, activations=mode)) as engine:
            micro_batch(engine)
            engine.step()
            assert engine.plan.step_bytes == found.plan.step_bytes


# --- seconds ----------------------------------------------------------------------------------------------------------


def test_seconds_of_links_count_what_leaves_and_comes_back(tmp_path: Path) -> None:
    kept, moving = (
        forecast(tmp_path, activations=mode, hardware="desktop", **given)
        for mode, given in (("keep", {}), ("offload", room("512KiB", "8MiB")))
    )
    assert kept.timing is not None and moving.timing is not None
    added = moving.plan.activation_step_bytes
    assert moving.timing.moved.d2h - kept.timing.moved.d2h == added["d2h"]
    assert moving.timing.moved.h2d - kept.timing.moved.h2d == added["h2d"]
    assert moving.timing.moved.drive_write - kept.timing.moved.drive_write == added["nvme_write"]
    assert moving.timing.moved.drive_read - kept.timing.moved.drive_read == added["nvme_read"]
    seconds = moving.timing.seconds["d2h"] - kept.timing.seconds["d2h"]
    assert seconds == pytest.approx(added["d2h"] / DESKTOP.d2h_bytes_s)


def test_the_threads_of_a_cpu_copy_instead_of_computing(tmp_path: Path) -> None:
    found = forecast(tmp_path, **room("512KiB", "8MiB"))
    assert found.work is not None and found.plan.request.device_is_host
    added = found.plan.activation_step_bytes
    work = dataclasses.replace(found.work, measured_s=(1.0, 2.0))
    kept = dataclasses.replace(found.plan, activation_step_bytes={})
    kept_s, moving_s = (
        timing_of(plan, work, DESKTOP, micro_batches=2, clips=False).seconds["compute"] for plan in (kept, found.plan)
    )
    copied = 2 * (added["d2h"] + added["h2d"])  # of both micro-batches
    assert copied > 0 and moving_s - kept_s == pytest.approx(2 * copied / DESKTOP.host_bytes_s)  # read, and written


def test_every_micro_batch_moves_them(tmp_path: Path) -> None:
    found = forecast(tmp_path, hardware="desktop", **room("512KiB", "8MiB"))
    assert found.work is not None
    plan, added = found.plan, found.plan.activation_step_bytes
    once, thrice = (timing_of(plan, found.work, DESKTOP, micro_batches=n, clips=False).moved for n in (1, 3))
    assert thrice.drive_write - once.drive_write == 2 * added["nvme_write"]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_leaves_in_a_forward_has_no_time_in_backward(clips: bool, micro_batches: int, tmp_path: Path) -> None:
    """With a slow drive, a forward takes as long as its writes, and a backward as long as its reads."""
    found = forecast(tmp_path, hardware="desktop", **room("512KiB", "8MiB"))
    assert found.work is not None
    plan = dataclasses.replace(found.plan, activation_step_bytes={"nvme_write": 100 * MIB, "nvme_read": 1})
    work = dataclasses.replace(found.work, measured_s=(1.0, 5.0))
    slow = dataclasses.replace(
        DESKTOP, drive_write_bytes_s=50 * MIB, drive_read_bytes_s=50 * MIB, drive_mixed_bytes_s=50 * MIB
    )
    seconds = timing_of(plan, work, slow, micro_batches=micro_batches, clips=clips).step_s
    assert seconds == pytest.approx(micro_batches * (2.0 + 5.0), rel=0.01)  # one span alone would say 6


def test_recomputing_costs_a_forward_of_the_blocks(tmp_path: Path) -> None:
    kept, again = (forecast(tmp_path, activations=mode, hardware="desktop") for mode in ("keep", "recompute"))
    assert kept.work is not None and again.work is not None
    assert kept.work.forward == again.work.forward
    more = sum(again.work.backward.values()) - sum(kept.work.backward.values())
    assert more > 0.5 * sum(kept.work.forward.values())
    assert again.work.peak_bytes < kept.work.peak_bytes
    assert "forward" not in vars(Loss().net.blocks[0])


def test_the_command_takes_the_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers").LlamaConfig(**LLAMA).save_pretrained(tmp_path)
    call = ["plan", "--model", str(tmp_path), "--batch", "1x512", "--hardware", "desktop", "--device", "64MiB"]
    call += ["--activation-memory", "2MiB"]
    found = {}
    for mode in ("keep", "offload", "recompute", "auto"):
        assert main([*call, "--json", "--activations", mode]) == 0
        found[mode] = json.loads(capsys.readouterr().out)
    assert found["recompute"]["flops"] > found["keep"]["flops"] == found["offload"]["flops"]
    assert found["recompute"]["activation_bytes"] < found["keep"]["activation_bytes"]
    assert found["offload"]["plan"]["activation_step_bytes"]["d2h"] > 0
    assert found["offload"]["bytes"]["d2h"] > found["keep"]["bytes"]["d2h"]
    assert any("activations: auto: " in note for note in found["auto"]["plan"]["notes"])


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["8MiB", "1MiB", "256KiB"])
def test_what_the_device_holds_is_what_did_not_leave(host: str, tmp_path: Path) -> None:
    """The less room there is elsewhere, the more stays; what leaves and comes back is not there in between."""
    wide = forecast(tmp_path, activation_memory="1MiB", **room("8MiB", 0)).work
    found = forecast(tmp_path, activation_memory="1MiB", **room(host, 0))
    assert wide is not None and found.work is not None
    assert found.work.peak_bytes == wide.peak_bytes >= found.work.device_bytes >= wide.device_bytes
    away = found.plan.activation_step_bytes.get("d2h", 0)
    assert found.work.device_bytes >= found.work.peak_bytes - away


def test_a_batch_that_cannot_leave_does_not_fit_and_each_remedy_does(tmp_path: Path) -> None:
    """A quarter of host memory passes storages on to the drive: larger ones stay, and the plan says so."""
    small = {"max_memory": {"device": "704KiB", "cpu": "32MiB", "nvme": "32MiB"}, "activation_memory": "448KiB"}
    given = {**options(tmp_path, hardware="desktop", **room("128KiB", "8MiB")), **small, "device": None}

    def planned(**more: Any) -> offload.Forecast:
        return offload.plan(Loss(False), offload.AdamW(), batch=[rows(0)], **{**given, **more})

    found = planned()
    assert found.work is not None and not found.fits
    assert found.missing_bytes == found.work.device_bytes - found.plan.activation_bytes
    assert found.to_dict()["remedies"] == list(found.remedies)
    assert all(f"  fits with {remedy}" in str(found) for remedy in found.remedies)
    *_, last = found.remedies
    assert last.startswith('max_memory["device"]="')
    larger = planned(max_memory={**small["max_memory"], "device": last.split('"')[3]})
    assert larger.fits and not larger.remedies
    assert planned(**room("1MiB", "8MiB")).fits  # where the storages may pass


LAST = {"max_memory": {"device": "3MiB", "cpu": "64MiB"}, "hardware": "desktop", "activation_memory": "1500KiB"}


@pytest.mark.parametrize("asked", ["keep", "offload"])
def test_where_nothing_else_does_the_longest_sequence_that_fits_is_named(asked: str) -> None:
    """With one row and what saves most; the one of twice the length was tried, and does not fit."""
    config = pytest.importorskip("transformers").LlamaConfig(**{**LLAMA, "num_hidden_layers": 6})
    given = {**LAST, "activations": asked}
    found = offload.plan(config, batch=(2, 8192), checkpointing=asked == "keep", **given)
    assert not found.fits
    sizes = [match for text in found.remedies if (match := re.match(r"micro-batches of 1x(\d+) and (.*)", text))]
    assert len(sizes) == 1, found.remedies
    length, options = int(sizes[0][1]), sizes[0][2].split(" and ")
    assert 1 < length < 8192 and "checkpointing=True" in options
    assert asked == "offload" or 'activations="offload"' in options
    given["activations"], chunks = "offload", "chunk_loss=True" in options

    def fits(size: int, *, chunk_loss: bool) -> bool:
        return offload.plan(config, batch=(1, size), checkpointing=True, chunk_loss=chunk_loss, **given).fits

    assert fits(length, chunk_loss=chunks)
    assert not fits(2 * length, chunk_loss=False) and not fits(2 * length, chunk_loss=True)


@pytest.mark.parametrize("asked", ["keep", "offload"])
def test_a_model_of_few_blocks_never_needs_more(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So what it has no room for need not be tried with all blocks, and no answer changes."""
    config = pytest.importorskip("transformers").LlamaConfig(**{**LLAMA, "num_hidden_layers": 6})
    given = {**LAST, "activations": asked, "checkpointing": asked == "keep"}
    for batch in ((2, 8192), (4, 256), (2, 64)):
        found = offload.plan(config, batch=batch, **given)
        with monkeypatch.context() as patch:
            patch.setattr(predicting, "shortened", lambda model: model)
            assert offload.plan(config, batch=batch, **given).to_dict() == found.to_dict()
    whole = made_on_meta(config, checkpointing=False, chunked=False)
    few = shortened(made_on_meta(config, checkpointing=False, chunked=False))
    assert 0 < work_of(few, (2, 64)).peak_bytes < work_of(whole, (2, 64)).peak_bytes
    assert work_of(few, (2, 64)).flops < work_of(whole, (2, 64)).flops


def test_nothing_is_planned_or_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """No micro-batch of a model in a mode, with the same room elsewhere; and no homes for the same budgets."""
    ran: list[tuple[object, ...]] = []
    planned: list[tuple[object, ...]] = []
    inner, make = rehearsing.work_of, predicting.make_plan

    class Noting(rehearsing.Rehearsal):
        def __init__(self, **rooms: int) -> None:
            super().__init__(**rooms)
            self.rooms = tuple(rooms.values())

    def work(module: nn.Module, batch: Any, watch: Any = None, **asked: Any) -> Any:
        ran.append((module, batch, can_recompute(module), watch and watch.__self__.rooms))
        return inner(module, batch, watch, **asked)

    def plan(request: Any, cut: Any) -> Any:
        planned.append((*request.budgets.values(), request.activations, request.activation_bytes))
        return make(request, cut)

    monkeypatch.setattr(rehearsing, "work_of", work)
    monkeypatch.setattr(rehearsing, "Rehearsal", Noting)
    monkeypatch.setattr(predicting, "make_plan", plan)
    config = pytest.importorskip("transformers").LlamaConfig(**LLAMA)
    assert not offload.plan(config, batch=(2, 8192), checkpointing=True, activations="offload", **LAST).fits
    assert len(ran) == len(set(ran)) > 10
    assert len(planned) == len(set(planned)) > 3


def test_where_not_even_one_token_fits_that_is_said() -> None:
    """The gradient of the embedding, 16384 x 64 in 16 bits, is larger than what there is for activations."""
    config = pytest.importorskip("transformers").LlamaConfig(**{**LLAMA, "vocab_size": 16384})
    given = {**LAST, "max_memory": {"device": "6MiB", "cpu": "64MiB"}}
    found = offload.plan(config, batch=(1, 64), **given)
    assert found.plan.activation_bytes < 16384 * 64 * 2
    assert [remedy.partition("=")[0] for remedy in found.remedies] == ['max_memory["device"]']
    alone = dataclasses.replace(found, remedies=())
    assert alone.remedy().endswith("; no change that was tried does, sequences of one token included")
    of_tensors = dataclasses.replace(alone, tokens=None)  # nobody could try a smaller batch of them
    assert of_tensors.remedy().endswith("; no change that was tried does; take a smaller batch")


def test_a_change_that_options_refuse_keeps_no_other_one_from_being_tried() -> None:
    """What leaves passes in room for activations, and here is none."""
    config = pytest.importorskip("transformers").LlamaConfig(**LLAMA)
    found = offload.plan(config, batch=(1, 64), checkpointing=True, **{**LAST, "activation_memory": 0})
    assert not found.fits
    shorter, larger = found.remedies
    assert shorter.startswith("micro-batches of 1x") and larger.startswith('max_memory["device"]="')


def test_what_has_no_room_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that finds none speaks for all that wait and are as large: with hundreds, asking each took seconds."""
    asked = {"storages": 0, "rooms": 0}

    def counted(of: Any, name: str, what: str) -> None:
        inner = getattr(of, name)

        def call(*args: Any) -> Any:
            asked[what] += 1
            return inner(*args)

        monkeypatch.setattr(of, name, call)

    counted(leaving.LeavingActivations, "_begin", "storages")
    counted(Away, "take", "rooms")
    config = pytest.importorskip("transformers").LlamaConfig(**{**LLAMA, "num_hidden_layers": 16})
    given = {**LAST, "activation_cpu_memory": "1MiB", "activation_nvme_memory": 0}
    offload.plan(config, batch=(1, 512), activations="offload", chunk_loss=True, **given)
    assert 200 < asked["storages"] < asked["rooms"] < 6 * asked["storages"]


# --- "auto" -----------------------------------------------------------------------------------------------------------


def test_the_rule() -> None:
    assert choose({}) == ("keep", "keep, for they fit the device")
    assert choose({"offload": 1.0})[0] == "offload"
    assert choose({"offload": 1.0, "recompute": 1.0})[0] == "offload"
    assert choose({"offload": 2.0, "recompute": 1.0}) == (
        "recompute", "recompute, 1 s per step by the plan; offload 2 s"
    )  # fmt: skip


@pytest.mark.parametrize("drive_bytes_s", [1e6, 1e12])
def test_a_forecast_chooses_the_faster_one(drive_bytes_s: float, tmp_path: Path) -> None:
    names = ("drive_read_bytes_s", "drive_write_bytes_s", "drive_mixed_bytes_s")
    machine = dataclasses.replace(DESKTOP, **dict.fromkeys(names, drive_bytes_s))
    given = {**SMALL, **room("256KiB", "8MiB")}
    auto = forecast(tmp_path, activations="auto", hardware=machine, **given)
    assert auto.timing is not None
    mode = "recompute" if drive_bytes_s == 1e6 else "offload"
    assert f"activations: auto: {mode}, {auto.timing.step_s:.3g} s per step by the plan; " in str(auto)
    assert (auto.plan.activation_step_bytes.get("nvme_write", 0) > 0) == (mode == "offload")
    roomy = forecast(tmp_path, activations="auto", hardware=machine, activation_memory="8MiB")
    assert "activations: auto: keep, for they fit the device" in str(roomy)
    nobody_knows = forecast(tmp_path, activations="auto", **given)
    assert "activations: auto: the second micro-batch decides" in str(nobody_knows)


def auto(path: Path, **more: Any) -> dict[str, Any]:
    return options(path, activations="auto", **{**SMALL, **room("512KiB", "8MiB"), **more})


@pytest.mark.parametrize(("rate", "share", "mode"), [(1e6, 0.0, "recompute"), (1e15, 1e6, "offload")])
def test_the_second_micro_batch_chooses_and_bits_stay(
    rate: float, share: float, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "_rate", lambda link, otherwise: rate)
    monkeypatch.setattr(deciding, "share_of_blocks", lambda model: share)
    truth = run(net(), **everything_on_device())
    assert_equal(run(net(), **auto(tmp_path)), truth)
    model = Loss()
    with offload.Engine(model, offload.AdamW(lr=1e-2), **auto(tmp_path)) as engine:
        assert "activations: auto: the second micro-batch decides" in str(engine.plan)
        for number in range(2):
            assert "activations: auto: the second micro-batch decides" in str(engine.plan)
            assert micro_batch(engine, number)["nvme_write"] > 0
            engine.step()
        assert f"activations: auto: {mode}, " in str(engine.plan)
        assert f"activations: auto: {mode}, " in str(engine.report())
        later = micro_batch(engine, 2)
        engine.step()
        assert ("forward" in vars(model.net.blocks[0])) == (mode == "recompute")
        if mode == "recompute":  # inputs of blocks are left, and they fit
            assert later["d2h"] < 4 * 65536
        assert engine.plan.activation_step_bytes.get("d2h", 0) == later["d2h"]
    assert "forward" not in vars(model.net.blocks[0])


def test_what_fits_stays_and_what_comes_later_and_does_not_leaves(tmp_path: Path) -> None:
    truth = run(net(), **everything_on_device())
    ours = run(net(), **auto(tmp_path, activation_memory="8MiB"))
    assert_equal(ours, truth)
    assert ours.stats.links["d2h"].bytes == 0 and "auto: keep, for they fit the device" in str(ours.plan)
    with offload.Engine(Loss(), offload.AdamW(), **auto(tmp_path, activation_memory="3MiB")) as engine:
        assert micro_batch(engine)["d2h"] == 0
        engine.step()
        loss = engine(torch.cat([rows(number) for number in range(4)]))
        engine.backward(loss)
        assert engine.stats().links["d2h"].bytes > 0
        engine.step()


class Normed(Loss):
    """Changes buffers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block[0] = nn.BatchNorm1d(32)


class Averaging(Loss):
    """Has a tensor that is no buffer from the first forward on, and changes it in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        first: Any = self.net.blocks[0]
        first.mean = torch.zeros(()) if not hasattr(first, "mean") else first.mean.mul_(0.9).add_(x.detach().mean())
        return super().forward(x)


class Straight(nn.Module):
    """Has no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        for _ in range(12):
            x = self.layer(x).tanh()
        return x.square().mean()


@pytest.mark.parametrize("make", [Normed, Averaging, Straight])
def test_what_cannot_be_computed_again_leaves(
    make: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deciding, "_rate", lambda link, otherwise: 1e6)
    with offload.Engine(make(), offload.AdamW(), **auto(tmp_path)) as engine:
        for number in range(2):
            assert micro_batch(engine, number)["d2h"] > 0
            engine.step()
        assert "activations: auto: offload, for no block can be computed again" in str(engine.plan)


def test_the_machine_is_the_one_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates beside an accelerator may take as long as copies: by a desktop's, the wrong way would be chosen."""
    seen: list[Hardware] = []
    real = deciding.timing_of

    def noted(plan: Plan, work: Any, hardware: Hardware, **more: Any) -> Any:
        seen.append(hardware)
        return real(plan, work, hardware, **more)

    monkeypatch.setattr(deciding, "timing_of", noted)
    with offload.Engine(Loss(), offload.AdamW(lr=1e-2), **auto(tmp_path)) as engine:
        for number in range(2):
            micro_batch(engine, number)
            engine.step()
        links = engine.stats().links
    assert links["cpu_adam"].bytes and links["nvme_write"].bytes
    for machine in seen:
        assert machine.update_bytes_s not in (DESKTOP.update_bytes_s, 0.0)
        assert machine.update_bytes_s <= machine.host_bytes_s
    assert seen


def state_of(engine: offload.Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_dict().items()}


def test_blocks_are_computed_again_if_a_micro_batch_finds_no_room_before_the_choice(tmp_path: Path) -> None:
    states = []
    memory = {"device": "1MiB", "cpu": "8MiB", "nvme": "8MiB"}
    tight = {**auto(tmp_path), **room("64KiB", 0), "max_memory": memory}
    del tight["activation_memory"]
    for given in (everything_on_device(), tight):
        with offload.Engine(Loss(), offload.AdamW(lr=1e-2), **given) as engine:
            if given is tight:
                with pytest.raises(
                    offload.BudgetError, match=r'or activations="recompute"; .*; from the next .*"auto" is'
                ):
                    engine(rows(0))
                assert "activations: auto: recompute, for a micro-batch found no room before" in str(engine.plan)
            for number in range(2):
                torch.manual_seed(number)  # of dropout
                engine.backward(engine(rows(number)))
                engine.step()
            states.append(state_of(engine))
    assert all(torch.equal(kept, states[1][name]) for name, kept in states[0].items())


def test_what_cannot_be_computed_again_is_not_if_a_micro_batch_finds_no_room(tmp_path: Path) -> None:
    memory = {"device": "1MiB", "cpu": "8MiB", "nvme": "8MiB"}
    given = {**auto(tmp_path), **room("64KiB", 0), "max_memory": memory}
    del given["activation_memory"]
    with offload.Engine(Normed(), offload.AdamW(lr=1e-2), **given) as engine:
        for _ in range(2):
            with pytest.raises(offload.BudgetError, match=r'or activations="recompute"; [^;]* "CUDA out of memory\."$'):
                engine(rows(0))
        assert "activations: auto: the second micro-batch decides" in str(engine.plan)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second micro-batch has blocks computed again, if they can be."""
    monkeypatch.setattr(deciding, "_rate", lambda link, otherwise: 1e6)
    monkeypatch.setattr(deciding, "share_of_blocks", lambda model: 0.0)


@pytest.mark.usefixtures("again")
def test_once_a_buffer_changes_blocks_are_no_longer_computed_again(tmp_path: Path) -> None:
    """Without an error, and the running statistics count each micro-batch once."""
    states = []
    for given in (everything_on_device(), auto(tmp_path)):
        torch.manual_seed(0)
        model = Normed()
        with offload.Engine(model, offload.AdamW(lr=1e-2), **given) as engine:
            for number in range(5):
                model.net.blocks[2][0].train(number >= 3)  # type: ignore[union-attr,index]
                for other in (0, 1, 3, 4, 5):
                    model.net.blocks[other][0].eval()  # type: ignore[union-attr,index]
                torch.manual_seed(number)
                engine.backward(engine(rows(number)))
                engine.step()
                if given.get("activations") == "auto" and number in (2, 3):
                    assert ("forward" in vars(model.net.blocks[0])) == (number == 2)
            states.append(state_of(engine))
            if given.get("activations") == "auto":
                told = "activations: auto: offload, for blocks.2 cannot be computed again any more"
                assert told.replace("blocks", "net.blocks") in str(engine.plan) and "net.blocks.2" in str(
                    engine.report()
                )
                assert engine.plan.activation_step_bytes["d2h"] > 4 * 65536
    assert all(torch.equal(kept, states[1][name]) for name, kept in states[0].items())


class Late(nn.Sequential):
    """Begins to do what is asked of it."""

    does = ""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.mean, self.numbers = torch.zeros(()), np.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of `x`."""
        if self.does == "changes a tensor":
            self.mean.add_(1)
        if self.does == "changes an array":
            self.numbers += 1
        return super().forward(x * self.numbers[0])


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("does", ["changes a tensor", "changes an array"])
def test_a_refused_block_has_the_next_micro_batch_go_on(does: str, tmp_path: Path) -> None:
    model = Loss()
    model.net.blocks = nn.ModuleList(Late(*block) for block in model.net.blocks)  # type: ignore[union-attr,arg-type]
    with offload.Engine(model, offload.AdamW(lr=1e-2), **auto(tmp_path)) as engine:
        for number in range(2):
            micro_batch(engine, number)
            engine.step()
        assert "activations: auto: recompute, " in str(engine.plan)
        for block in model.net.blocks:
            block.does = does
        with pytest.raises(
            offload.StateError, match='; from the next micro-batch on, "auto" is activations="offload"$'
        ):
            engine.backward(engine(rows(2)))
        assert "auto: offload, for net.blocks." in str(engine.plan)
        assert micro_batch(engine, 2)["d2h"] > 4 * 65536
        engine.step()
        micro_batch(engine, 3)
        engine.step()
        assert engine.plan.activation_step_bytes["d2h"] > 4 * 65536


def test_a_step_by_torch_decides_too(tmp_path: Path) -> None:
    """Nobody calls the engine: the model is called, the loss, and the optimizer."""
    model = Loss()
    with offload.Engine(model, offload.AdamW(), **auto(tmp_path)) as engine:
        for number in range(2):
            model(rows(number)).backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert "per step by the plan" in str(engine.plan) and Net is type(model.net)


# --- several ranks ----------------------------------------------------------------------------------------------------


def on_rank(rank: int, stage: int, path: Path) -> tuple[list[str], dict[str, bytes]]:
    """Train with activations kept, and with "auto" on slow links; only the last rank's batches do not fit."""
    leaving.LEAST_BYTES = 4096
    deciding._rate = lambda link, otherwise: 1e6  # type: ignore[assignment]
    deciding._FORWARD_SHARE = 0.0  # whatever a busy machine takes for a forward, repeating it costs less
    told, found = [], []
    for mode in ("keep", "auto"):
        given = auto(path) | room("64KiB", "8MiB") | {"activations": mode, "threads": 1, "activation_memory": "2MiB"}
        if mode == "keep":
            given = {name: value for name, value in given.items() if not name.startswith("activation_")}
        with offload.Engine(Loss(), offload.AdamW(lr=1e-2), stage=stage, **given) as engine:
            for number in range(3):
                torch.manual_seed(100 * rank + number)
                engine.backward(engine(torch.cat([rows(number)] * (3 if rank == 2 else 1))))
                engine.step()
            told.append(engine.report().activations)
            found.append({name: value.numpy().tobytes() for name, value in engine.state_dict().items()})
    assert found[0] == found[1]
    return told, found[0]


@pytest.mark.few(1)
@pytest.mark.cpu(reason="ranks send each other what is in host memory")
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_choose_the_same(stage: int, tmp_path: Path) -> None:
    outcomes = several_ranks.run(on_rank, 3, stage, tmp_path)
    assert all(isinstance(outcome, tuple) for outcome in outcomes), outcomes
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][0][0] == "" and outcomes[0][0][1].startswith("recompute, ")


def test_what_lives_on_a_cpu_does_not_give_way_to_activations(tmp_path: Path) -> None:
    """Working copies alone do; and whoever follows a remedy has room for what measurements find beside it."""
    layers = (layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.GELU()))
    model, x = nn.Sequential(*layers), torch.ones(2048, 512)

    def planned(device: str) -> offload.Forecast:
        memory = {"device": device, "cpu": "200MiB"}
        return offload.plan(model, offload.AdamW(), batch=[x], device="cpu", max_memory=memory)

    short = planned("90MiB")
    assert short.plan.working_bytes == 0 and short.work is not None
    assert short.work.device_bytes < 90 << 20, "it would fit if nothing lived there"
    assert short.missing_bytes == short.work.device_bytes - short.plan.activation_bytes > 0
    [enough] = [found[1] for text in short.remedies if (found := re.fullmatch(r'max_memory\["device"\]="(\w+)"', text))]
    assert planned(enough).fits
    memory = {"device": enough, "cpu": "200MiB"}
    with offload.Engine(model, offload.AdamW(), device="cpu", max_memory=memory) as engine:
        for _ in range(3):
            engine.backward(engine(x).square().mean())
            engine.step()
    away = offload.plan(
        model,
        offload.AdamW(),
        batch=[x],
        device="cpu",
        max_memory={"device": "90MiB", "cpu": "200MiB"},
        offload_param="cpu",
    )
    least = 3 * away.plan.request.units[0].param_bytes
    assert away.plan.least_working_bytes == least < away.plan.working_bytes
    room = away.plan.activation_bytes + away.plan.working_bytes - least
    assert away.work is not None and away.missing_bytes == max(away.work.device_bytes - room, 0)


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_the_smallest_budget_counts_what_is_set_aside_of_it(tier: str, tmp_path: Path) -> None:
    """Shares of a larger budget are larger."""
    memory = {"device": "16MiB", "cpu": "64MiB", "nvme": "64MiB"} | {tier: "2MiB"}
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    with pytest.raises(offload.BudgetError) as caught:
        offload.plan(model, device="cpu", max_memory=memory, activations="offload")
    enough = dict(re.findall(r'max_memory\["(\w+)"\](?: that would do is| =) (\d+) bytes', str(caught.value)))
    assert tier in enough
    offload.plan(model, device="cpu", max_memory=memory | enough, activations="offload")
    with pytest.raises(offload.BudgetError):
        less = str(int(enough[tier]) - 4096)
        offload.plan(model, device="cpu", max_memory=memory | enough | {tier: less}, activations="offload")
