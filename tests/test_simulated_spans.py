"""Spans of a simulated device that goes by the clock: what its lanes did, at the times when they did it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from harness import UNIT_BYTES, working_bytes
from simulated.clock import Operation, operations, spend
from simulated.engine import engine_clock, untouched
from test_simulated_clock_engine import MIB, MIDDLE, TINY, llama

from offload import AdamW, Config, Engine
from offload.planning.hardware import DESKTOP
from offload.planning.partition import find_units
from offload.planning.timing import timing_of
from offload.planning.work import work_of
from offload.request import unit_bytes_of
from offload.snapshot import take_sample, take_spans
from offload.spans import Span
from offload.stats import LinkStats

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")


class TimedEvent(torch.Event):
    """An event that tells times, as those of the simulated device do not: by its clock."""

    def __new__(cls, *args: Any, enable_timing: bool = False, **options: Any) -> TimedEvent:
        return super().__new__(cls, *args, **options)  # type: ignore[no-any-return]

    def record(self, stream: torch.Stream | None = None) -> None:
        if stream is not None:
            self.at_s = simulated.load().end_of(stream.stream_id)
        super().record(stream)

    def elapsed_time(self, end: Any) -> float:
        return float(end.at_s - self.at_s) * 1e3


@pytest.fixture(scope="module")
def ran(sim: None) -> tuple[list[Operation], list[Span], dict[str, LinkStats]]:
    """What two steps did: by the device itself, and by the engine."""
    model = untouched(llama(**TINY))
    with (
        pytest.MonkeyPatch.context() as patch,
        engine_clock(DESKTOP, dry=True),
        tempfile.TemporaryDirectory() as folder,
    ):
        patch.setattr(torch, "Event", TimedEvent)
        memory = {"device": MIB + working_bytes(model, unit_bytes=UNIT_BYTES), "cpu": "16MiB", "nvme": "64MiB"}
        options: dict[str, Any] = {"device": "sim", "max_memory": memory, "unit_bytes": UNIT_BYTES}
        options |= {"activation_memory": MIB, "offload_param": "nvme", "offload_optimizer": "nvme"}
        ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0)).to("sim")
        operations()
        with Engine(model, AdamW(lr=1e-3), nvme_path=folder, **options) as engine:
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
                engine.step()
            engine.drain()
            engine._parts.device.synchronize()
            spend(1.0)  # until what is fetched ahead has come, too
            spans = take_spans(engine._parts, engine._life.require_open()).spans
            stats = engine.stats()
            done = operations()
            engine.close(restore=False)
    return done, list(spans), dict(stats.links)


@pytest.mark.parametrize("lane", ["h2d", "d2h"])
def test_copies_are_where_the_device_made_them(ran: Any, lane: str) -> None:
    done, spans, links = ran
    ours = [span for span in spans if span.lane == lane]
    theirs = [operation for operation in done if operation.lane == lane]
    assert sum(span.size_bytes for span in ours) == links[lane].bytes > 0
    assert sum(span.end - span.begin for span in ours) == pytest.approx(links[lane].seconds, rel=1e-3)
    inside = [o for o in theirs if any(s.begin <= o.begin + 1e-6 and o.end <= s.end + 1e-6 for s in ours)]
    assert sum(operation.size_bytes for operation in inside) == links[lane].bytes


def test_passes_hold_what_the_device_computed(ran: Any) -> None:
    done, spans, _ = ran
    ours = [span for span in spans if span.lane == "compute"]
    assert [span.name for span in ours] == ["forward", "backward"] * 2
    busy = [o for o in done if o.lane == "compute"]
    inside = [o for o in busy if any(s.begin <= o.begin + 1e-6 and o.end <= s.end + 1e-6 for s in ours)]
    assert sum(o.end - o.begin for o in inside) > 0.95 * sum(o.end - o.begin for o in busy)  # the rest fills arenas


@pytest.mark.parametrize(("lane", "name"), [("nvme_read", "drive read"), ("nvme_write", "drive write")])
def test_the_drive_has_its_own_times(ran: Any, lane: str, name: str) -> None:
    done, spans, _ = ran
    ours = sorted(span.size_bytes for span in spans if span.lane == lane)
    assert ours == sorted(operation.size_bytes for operation in done if operation.lane == name) != []


def test_waits_and_updates_are_spans_by_the_clock(ran: Any) -> None:
    _, spans, _ = ran
    last = max(span.end for span in spans)
    assert {span.lane for span in spans} >= {"step", "wait", "cpu_adam"}
    assert {span.name.partition(":")[0] for span in spans if span.lane == "wait"} == {"updates", "parameters"}
    assert all(0 <= span.begin <= span.end <= last < 10 for span in spans)  # virtual seconds, not the machine's


def test_what_the_device_updates_itself_is_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is all there, no time of the device seems idle, and what is measured is what a plan counts."""
    monkeypatch.setattr(torch, "Event", TimedEvent)
    model, batch = untouched(llama(**MIDDLE)), (1, 2048)
    tree = find_units(model, max_unit_bytes=unit_bytes_of(Config(), 4 << 30))
    work = work_of(llama(**MIDDLE, use_cache=False), batch, tree=tree)
    options: dict[str, Any] = {"device": "sim", "max_memory": {"device": 4 << 30, "cpu": "1GiB"}}
    ids = torch.zeros(batch, dtype=torch.long, device="sim")
    with engine_clock(DESKTOP, dry=True, updates=True), Engine(model, AdamW(lr=1e-3), **options) as engine:
        operations()
        for _ in range(5):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        timing = timing_of(engine.plan, work, DESKTOP, micro_batches=1, clips=False)
        report, manager = engine.report(predicted=timing), engine._life.require_open()
        spans = [span for span in take_spans(engine._parts, manager).spans if span.name == "update"]
        sample = take_sample(engine._parts, manager, 0.0)
        updates = [o for o in operations() if o.lane == "compute" and o.name == "update"]
        engine.close(restore=False)
    took_s = sum(o.end - o.begin for o in updates)
    assert len(spans) == 5 and {span.lane for span in spans} == {"compute"}
    assert all(any(s.begin <= o.begin + 1e-6 and o.end <= s.end + 1e-6 for s in spans) for o in updates)
    assert sample.passes["update"] == pytest.approx(took_s, rel=0.02)
    assert report.lanes["compute"].seconds > 0.97 * report.seconds
    predicted_s, measured_s = report.compared["compute"]
    assert measured_s == pytest.approx(predicted_s, rel=0.02) and took_s / 5 > 0.1 * predicted_s


@pytest.mark.parametrize("trains", [False, True])
def test_a_device_that_waits_does_not_bind(trains: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With few tokens, copies of parameters take longer than computing, and updates by the CPU longer than both."""
    monkeypatch.setattr(torch, "Event", TimedEvent)
    model = untouched(llama(**MIDDLE))
    memory = {"device": 64 * MIB + working_bytes(model, units=3, unit_bytes=UNIT_BYTES), "cpu": "8GiB"}
    options: dict[str, Any] = {"device": "sim", "max_memory": memory, "activation_memory": 64 * MIB}
    ids = torch.zeros(1, 64, dtype=torch.long, device="sim")
    with engine_clock(DESKTOP, dry=True), Engine(model, AdamW(lr=1e-3), offload_param="cpu", **options) as engine:
        operations()
        for _ in range(4):
            with torch.set_grad_enabled(trains):
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            if trains:
                engine.backward(loss)
                engine.step()
        report, stats = engine.report(), engine.stats()
        computed_s = sum(o.end - o.begin for o in operations() if o.lane == "compute")
        engine.close(restore=False)
    binds, waits_for = ("cpu_adam", {"parameters", "updates", "gradients"}) if trains else ("h2d", {"parameters"})
    assert report.binding_lane == stats.binding_link == binds
    assert set(report.waits) == waits_for and report.waits["parameters"] > 0.01 * report.seconds
    assert stats.stall_seconds == pytest.approx(report.waits["parameters"], rel=0.1)
    compute_s = stats.links["compute"].seconds
    waited_s = sum(report.waits.values())
    assert computed_s < compute_s < 0.6 * report.seconds and compute_s + waited_s > 0.8 * report.seconds


def test_a_link_is_not_busy_until_the_next_gradient_of_a_unit_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many tokens, computing between them takes many times as long as their copies."""
    monkeypatch.setattr(torch, "Event", TimedEvent)
    options: dict[str, Any] = {"device": "sim", "max_memory": {"device": 4 << 30, "cpu": "8GiB"}}
    ids = torch.zeros(1, 8192, dtype=torch.long, device="sim")
    with (
        engine_clock(DESKTOP, dry=True),
        Engine(untouched(llama(**MIDDLE)), AdamW(lr=1e-3), unit_bytes=256 * MIB, **options) as engine,
    ):
        operations()
        before = engine.stats().links["d2h"]
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine._parts.device.synchronize()
        after, done = engine.stats().links["d2h"], operations()
        engine.close(restore=False)
    copied = [operation for operation in done if operation.lane == "d2h"]
    assert len(copied) > 4 * 7  # of each block, what it multiplies by
    assert after.bytes - before.bytes == sum(operation.size_bytes for operation in copied)
    busy_s = sum(operation.end - operation.begin for operation in copied)
    assert after.seconds - before.seconds == pytest.approx(busy_s, rel=0.1)


def test_what_the_cpu_is_predicted_to_do_is_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates, and taking the gradients of three micro-batches, which is as much."""
    monkeypatch.setattr(torch, "Event", TimedEvent)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 2048}
    model, batch = untouched(llama(**sizes)), (1, 16)
    tree = find_units(model, max_unit_bytes=unit_bytes_of(Config(), 1 << 30))
    work = work_of(llama(**sizes, use_cache=False), batch, tree=tree)
    options: dict[str, Any] = {"device": "sim", "max_memory": {"device": 1 << 30, "cpu": "1GiB"}}
    options |= {"gradient_accumulation_steps": 3}
    ids = torch.zeros(batch, dtype=torch.long, device="sim")
    with engine_clock(DESKTOP, dry=True), Engine(model, AdamW(lr=1e-3), **options) as engine:
        for _ in range(3 * 9):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        engine.drain()
        timing = timing_of(engine.plan, work, DESKTOP, micro_batches=3, clips=False)
        report = engine.report(predicted=timing)
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        engine.close(restore=False)
    took = [span for span in spans if span.lane == "cpu_adam" and span.name.startswith("gradients: ")]
    assert len(took) == 3 * 9 * len({span.name for span in took})
    parameters = sum(parameter.numel() for parameter in llama(**sizes).parameters())
    assert sum(span.size_bytes for span in took) == 9 * parameters * (2 + 4 + 2 * (2 + 4 + 4))
    predicted_s, measured_s = report.compared["cpu"]
    assert measured_s == pytest.approx(predicted_s, rel=0.05)


def test_a_page_has_no_losses_where_looking_at_one_would_wait(tmp_path: Path) -> None:
    """Losses that are given are shown; of what the engine itself has seen, nothing made the host wait."""
    budgets = {"device": "8MiB", "cpu": "16MiB"}
    with Engine(torch.nn.Linear(8, 8), AdamW(lr=1e-3), device="sim", max_memory=budgets, log_every=1) as engine:
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 8, device="sim")).sum())
            engine.step()
        samples = engine._watch.samples()
        assert [one.step for one in samples] == [1, 2, 3] and [one.loss for one in samples] == [None] * 3
        assert samples[-1].grad_norm == engine.grad_norm
        engine.report(tmp_path / "own.html")
        engine.report(tmp_path / "given.html", losses=[(1, 3.0), (2, 2.0), (3, 1.0)])
    own, given = ((tmp_path / f"{name}.html").read_text() for name in ("own", "given"))
    assert "<h2>Gradient norm</h2>" in own and "<h2>Loss</h2>" not in own
    assert "<h2>Loss</h2><p>From 3 to 1.</p>" in given
