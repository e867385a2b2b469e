"""The history of a run, the charts that are made of it, the page with them, and the lines of a log."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import time
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, batch, loss_of, tight
from hypothesis import given
from hypothesis import strategies as st
from test_spans import TWO_STEPS, recorded
from test_stats import snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import training, watching
from offload.module.changes import OutsideChanges
from offload.planning.moved import Moved
from offload.planning.timing import Span, Timing
from offload.report import make_report
from offload.seeing import drawing
from offload.seeing.counted import counted_report
from offload.seeing.history import Between, History, Sample
from offload.seeing.page import BARS, Content, page, write_page
from offload.snapshot import take_spans
from offload.spans import LANES, Recorded
from offload.spans import Span as LaneSpan
from offload.stats import LINKS, LinkStats

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def sample(step: int, *, loss: float | None = 0.5, norm: float | None = 1.0) -> Sample:
    """Return one of a run whose steps take 2 s, move 10 bytes per link, and wait 0.5 s for parameters."""
    return Sample(
        time_s=100.0 + 2 * step,
        step=step,
        used_bytes={"device": 100 + step, "cpu": 50, "nvme": 7},
        peak_bytes={"device": 400, "cpu": 60, "nvme": 7},
        links={name: LinkStats(10 * step, 0.25 * step) for name in LINKS},
        waited={"parameters": 0.5 * step},
        passes={"forward": 0.5 * step, "backward": 1.0 * step},
        loss=loss,
        grad_norm=norm,
    )


# --- the history ------------------------------------------------------------------------------------------------------


@given(st.integers(4, 20), st.integers(0, 200))
def test_a_long_history_is_thinned_and_loses_no_bytes(most: int, steps: int) -> None:
    history = History(most)
    for step in range(1, steps + 1):
        if history.wants(step):
            history.add(sample(step))
    kept = history.samples
    assert len(kept) <= most
    assert [one.step for one in kept] == sorted({one.step for one in kept})
    if steps:
        assert kept[0].step == 1 and steps - kept[-1].step < max(2 * steps / most, 1) + 1
        whole = Between.of(kept[0], kept[-1])
        assert whole.steps == kept[-1].step - 1
        assert whole.links["h2d"].bytes == 10 * whole.steps and whole.waited == {"parameters": 0.5 * whole.steps}
        gaps = [later.step - one.step for one, later in itertools.pairwise(kept)]
        assert not gaps or max(gaps) <= 2 * min(gaps)  # evenly


def test_two_samples_become_one_with_the_loss_of_both() -> None:
    history = History(4)
    for step, loss in enumerate([1.0, 2.0, 4.0, 8.0, None], start=1):
        history.add(sample(step, loss=loss))
    assert [(one.step, one.loss) for one in history.samples] == [(1, 1.0), (3, 3.0), (5, 8.0)]


def test_what_lies_between_two_samples() -> None:
    between = Between.of(sample(2), sample(6))
    assert between.steps == 4 and between.seconds == 8 and between.step_s == 2
    assert between.links["nvme_read"] == LinkStats(40, 1.0) and between.passes == {"forward": 2.0, "backward": 4.0}
    assert between.share(2.0) == 0.25 and between.share(20.0) == 1.0
    still = Between.of(sample(2), sample(2))
    assert still.step_s is None and still.share(1.0) == 0.0


# --- charts -----------------------------------------------------------------------------------------------------------


@given(st.floats(0, 1e12), st.floats(1e-6, 1e12), st.sampled_from([2.0, 10.0]))
def test_ticks_are_few_and_lie_on_the_axis(low: float, width: float, base: float) -> None:
    found = drawing.ticks(low, low + width, base=base)
    assert 1 <= len(found) <= 10 or width < low * 1e-9  # an axis that floats cannot divide
    assert all(low - width * 1e-6 <= value <= (low + width) * (1 + 1e-6) for value in found)


def test_ticks_are_round() -> None:
    assert drawing.ticks(0, 9) == [0, 5] and drawing.ticks(0, 0.1) == pytest.approx([0, 0.05, 0.1])
    assert drawing.ticks(0, 70 << 20, base=2) == [0, 32 << 20, 64 << 20]
    assert drawing.ticks(3, 3) == [3]
    low, high = 122244824876.0, 122244824876.0 + 2**-14  # four floats apart
    assert all(low <= value <= high for value in drawing.ticks(low, high))


SPANS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)).map(lambda at: (at[0], at[0] + at[1], "x")), max_size=30)


@given(SPANS)
def test_a_lane_has_few_blocks_and_they_cover_what_was_busy(spans: list[tuple[float, float, str]]) -> None:
    blocks = drawing.merged(spans, 0.2, 0.8, lambda count: f"{count} of them")
    pixel = 0.6 / drawing.PIXELS
    assert len(blocks) <= drawing.PIXELS + 1
    for first, last, _ in spans:
        first, last = max(first, 0.2), min(last, 0.8)
        assert first > last or any(one.begin <= first and last <= one.end for one in blocks)
    for one, later in itertools.pairwise(blocks):
        assert one.end + pixel <= later.begin + 1e-12
    assert sum(int(one.text.split()[0]) if " of them" in one.text else 1 for one in blocks) == sum(
        max(first, 0.2) <= min(last, 0.8) for first, last, _ in spans
    )


def test_long_lines_are_thinned_and_what_is_no_number_is_left_out() -> None:
    points = [(float(n), float("nan") if n == 3 else float(n)) for n in range(5000)]
    found = drawing.thinned(points)
    assert len(found) <= drawing.MOST_POINTS and found[-1] == (4999.0, 4999.0)
    assert drawing.thinned(points[3:4]) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (12.34, "12.3 s"), (0.0134, "13.4 ms"), (0.99999, "1 s"), (2.5e-4, "250 us")]
)
def test_durations_in_three_figures(seconds: float, text: str) -> None:
    assert drawing.seconds_text(seconds) == text


# --- the page ---------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Collects tags, and finds those that are not closed."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def content(samples: list[Sample], spans: Recorded | None = None, title: str = "a model", **more: Any) -> Content:
    spans = spans or recorded(*TWO_STEPS)
    predicted = more.pop("predicted", None)
    stats = snapshot({name: LinkStats(10, 1.0) for name in LINKS})
    report = make_report(spans, stats, host_computes=True, predicted=predicted)
    return Content(title, "the plan & more", report, spans, samples, **more)


def charts(text: str) -> dict[str, ET.Element]:
    """Return the charts of a page by their titles; every one is whole, named, and within its frame."""
    tags = Tags(text)
    assert tags.open == []
    names = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(names) == len(set(names))
    found = {}
    for part in re.findall(r"<svg .*?</svg>", text):
        chart = ET.fromstring(part)
        title, about = chart[0], chart[1]
        assert (title.tag, about.tag) == ("title", "desc") and title.text and about.text
        assert chart.get("aria-labelledby") == f"{title.get('id')} {about.get('id')}" and chart.get("role") == "img"
        width, height = map(float, chart.get("viewBox", "").split()[2:])
        for shape in chart.iter("rect"):
            x, y, wide, high = (float(shape.get(name, "")) for name in ("x", "y", "width", "height"))
            assert x >= 0 and y >= 0 and wide >= 0 and high >= 0 and x + wide <= width + 1 and y + high <= height + 1
        for line in chart.iter("polyline"):
            for point in line.get("points", "").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height
        found[title.text] = chart
    return found


def test_a_page_has_every_chart_and_needs_nothing_from_elsewhere() -> None:
    predicted = {"step": 9.0, "compute": 5.0, "drive": 4.0}
    text = page(content([sample(step) for step in range(1, 9)], predicted=predicted))
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", text)
    found = charts(text)
    assert set(found) == {
        "Lanes of the last 2 steps",
        "Measured against predicted",
        "What steps waited for",
        *("device", "cpu", "nvme"),
        *("Loss", "Gradient norm"),
    }
    told = [title.text for title in found["Lanes of the last 2 steps"].iter("title")]
    assert {"forward, 10 s", "forward, 6 s", "a, 10 B, 1 s", "2 of wait, 4 s"} <= set(told)
    assert "2 of nvme_read, 8 s" in told  # the second begins before the first ends; what was before the step is cut off
    waits = [title.text for title in found["What steps waited for"].iter("title")]
    assert "step 2: parameters 500 ms" in waits and "step 2: not waiting 1.5 s" in waits
    both = [title.text for title in found["Measured against predicted"].iter("title")]
    assert {"step: predicted 9 s", "step: measured 10 s", "drive: predicted 4 s", "drive: measured 4 s"} <= set(both)
    assert "compute: measured 6 s" in both  # on a CPU updates are part of it: 11 s and 1 s of two steps
    assert "prefers-color-scheme:dark" in text and "the plan &amp; more" in text


def test_a_page_of_a_long_run_is_small() -> None:
    history = History()
    for step in range(1, 1001):
        if history.wants(step):
            history.add(sample(step, loss=1 / step))
    spans = [LaneSpan("step", f"step {n}", n, n + 1) for n in range(3)]
    for lane in LANES[1:]:
        spans += [LaneSpan(lane, f"param: layer {n}", n / 1365, n / 1365 + 2e-4, 4096) for n in range(4095)]
    losses = [(step, 1 / step) for step in range(1, 1001)]
    text = page(content(list(history.samples), Recorded(sorted(spans, key=lambda one: one.begin), 0.0), losses=losses))
    assert len(text) < 1 << 20
    bars = charts(text)["What steps waited for"]
    assert len(list(bars.iter("rect"))) <= 2 * BARS


def test_a_page_before_the_first_step_says_so() -> None:
    text = page(content([], recorded()))
    assert charts(text) == {} and "Nothing is recorded yet" in text
    assert set(charts(page(content([sample(1)])))) == {"Lanes of the last 2 steps", "Loss", "Gradient norm"}


def test_what_others_have_named_cannot_be_markup() -> None:
    spans = recorded(*TWO_STEPS, LaneSpan("h2d", "</title><script>1</script>", 15, 16))
    text = page(content([sample(1), sample(2)], spans, title="<b>&"))
    assert "<script" not in text and "&lt;b&gt;&amp;" in text
    charts(text)


def test_losses_that_are_no_numbers_are_left_out() -> None:
    samples = [sample(n, loss=None, norm=float("inf") if n == 2 else 1.0) for n in range(1, 5)]
    found = charts(page(content(samples, losses=[(1, 3.0), (2, float("nan")), (3, 2.0)])))
    [line] = found["Loss"].iter("polyline")
    assert len(line.get("points", "").split()) == 2
    [line] = found["Gradient norm"].iter("polyline")
    assert len(line.get("points", "").split()) == 3
    text = page(content(samples, losses=[(1, float("nan")), (2, 3.0), (3, 2.0), (4, float("-inf"))]))
    assert "From 3 to 2. 2 of 4 are not finite or too large, the first one in step 1." in text
    text = page(content(samples, losses=[(3, float("nan")), (4, float("nan"))]))
    assert "2 of 2 are not finite or too large, the first one in step 3." in text and "Loss" not in charts(text)
    [dot] = charts(page(content(samples, losses=[(3, 1.0), (4, 1.7e308)])))["Loss"].iter("circle")
    assert dot is not None


def test_a_loss_that_stands_out_is_seen_however_many_there_are() -> None:
    points = [(float(step), 99.0 if step == 33_333 else 1.0) for step in range(50_000)]
    kept = drawing.thinned(points)
    assert (
        len(kept) <= drawing.MOST_POINTS
        and (33_333.0, 99.0) in kept
        and kept == sorted(kept)
        and kept[-1] == points[-1]
    )


def test_a_page_of_steps_with_more_spans_than_are_kept_says_so() -> None:
    spans = recorded(*TWO_STEPS, complete_from=25)
    assert "Lanes of the last 7 s, which have no whole step" in page(content([sample(1), sample(2)], spans))


def test_of_a_part_of_a_step_nothing_is_compared_and_the_report_says_so() -> None:
    shown = content([], recorded(*TWO_STEPS, complete_from=25), predicted={"step": 9.0}).report
    assert shown.compared == {} and "  nothing is compared: no whole step is known\n" in str(shown)
    assert "nothing is compared" not in str(content([], recorded(*TWO_STEPS, complete_from=25)).report)


@pytest.mark.parametrize("host", [True, False])
def test_a_report_of_what_was_counted_is_of_the_steps_between_the_last_two_samples(host: bool) -> None:
    steps = [LaneSpan("step", f"step {n}", 98 + 2 * n, 100 + 2 * n) for n in range(1, 8)]
    spans, stats = recorded(*steps, complete_from=200), snapshot({})
    predicted = {"step": 3.0, "compute": 1.0, "cpu": 0.0, "drive": 2.0}
    samples = [sample(1), sample(4), sample(6)]
    report = counted_report(spans, samples, stats, host_computes=host, predicted=predicted)
    assert report is not None and report.step_seconds == (2, 2) and report.seconds == 4
    assert report.lanes["nvme_read"].size_bytes == 20 and report.lanes["nvme_read"].seconds == 0.5
    assert report.waits == {"parameters": 1.0} and report.waited_seconds == 1.0
    computing = 0.5 if host else 0.25  # with updates
    assert report.compared == {"step": (3.0, 2.0), "compute": (1.0, computing), "h2d": (0.0, 0.25), "d2h": (0.0, 0.25)}
    for known in (samples[:1], [sample(4), sample(4)]):
        assert counted_report(spans, known, stats, host_computes=host, predicted=predicted) is None


@pytest.mark.parametrize("what", ["folder", "no folder", "device"])
def test_a_page_that_cannot_be_written_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = {"folder": tmp_path, "no folder": tmp_path / "no" / "file", "device": Path("/dev/full")}[what]
    with pytest.raises(offload.ConfigError, match=f"report: expected .* but got {path}.*; name"):
        write_page(path, content([]))
    assert list(tmp_path.iterdir()) == []


# --- engines ----------------------------------------------------------------------------------------------------------


def test_what_is_no_argument_of_a_report_is_refused_by_name(tmp_path: Path) -> None:
    engine, _ = trained(tmp_path, 1)
    forecast = offload.plan(nn.Linear(8, 8), batch=[torch.ones(2, 8)], hardware="desktop")
    page: Any = tmp_path / "page.html"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with engine:
        assert "predicted" in str(engine.report(tmp_path / "other.html", predicted=forecast.timing, losses=[(1, 0.5)]))
        for words, call in (
            (r"report: predicted: .*pass offload\.plan\(\.\.\.\)\.timing", lambda: engine.report(predicted=forecast)),  # type: ignore[arg-type]
            ("report: losses: expected a path", lambda: engine.report(losses=[(1, 0.5)])),
            ("report: losses: expected pairs", lambda: engine.report(page, losses=3)),  # type: ignore[arg-type]
            ("report: losses: expected pairs", lambda: engine.report(page, losses=[(1, 2, 3)])),  # type: ignore[list-item]
            ("report: losses: expected pairs", lambda: engine.report(page, losses=[(float("inf"), 1.0)])),  # type: ignore[list-item]
            ("report: losses: expected pairs", lambda: engine.report(page, losses=[(2**53, 1.0)])),
            ("trace: expected the path of a file but got .*loop", lambda: engine.trace(loop)),
            ("report: expected the path of a file but got 5", lambda: engine.report(5)),  # type: ignore[arg-type]
            ("trace: expected the path of a file but got None", lambda: engine.trace(None)),  # type: ignore[arg-type]
            ("trace: expected the path of a file but got 'a", lambda: engine.trace("a\0b")),
            ("trace: expected a file that can be written", lambda: engine.trace(tmp_path / ("x" * 300))),
        ):
            with pytest.raises(offload.ConfigError, match=words):
                call()
    assert not page.exists()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that watches see, which the test moves."""
    now = [50.0]
    monkeypatch.setattr(watching, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    yield now


def trained(folder: Path, steps: int, *, micro_batches: int = 1, **options: Any) -> tuple[offload.Engine, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    options = {**tight(model, folder, offload_param="cpu"), **options}
    options["gradient_accumulation_steps"] = micro_batches
    engine = offload.Engine(model, offload.AdamW(lr=1e-3), **options)
    losses = []
    for number in range(steps * micro_batches):
        loss = loss_of(engine, number)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return engine, losses


def test_an_engine_keeps_a_history_and_writes_a_page(tmp_path: Path) -> None:
    engine, losses = trained(tmp_path, 4, micro_batches=2)
    with engine:
        samples = engine._watch.samples()
        assert [one.step for one in samples] == [1, 2, 3, 4]
        means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
        assert [one.loss for one in samples] == means
        assert samples[-1].grad_norm == engine.grad_norm
        assert samples[-1].used_bytes["nvme"] > 0 and samples[-1].links["nvme_read"].bytes > 0
        predicted = Timing((Span("all", {"compute": 1.0, "h2d": 0, "d2h": 0, "cpu": 0, "drive": 3.0}),), 0.5, Moved())
        report = engine.report(tmp_path / "report.html", predicted=predicted)
        assert report.compared["step"][0] == 3.5 and report.compared["drive"][0] == 3.0
        took = report.seconds / len(report.step_seconds)
        assert report.compared["step"][1] == took and 0 < report.compared["drive"][1] <= took
        assert re.search(r"\n  step +3\.500 s", str(report)) and len(str(report).splitlines()) <= 24
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        found = charts(text)
        assert {"What steps waited for", "device", "cpu", "nvme", "Loss", "Gradient norm"} <= set(found)
        assert any(title.startswith("Lanes of the last") for title in found)
        assert "Sequential: 6 units" in text and "drive wear" in text
        engine.sleep()
        engine.report(tmp_path / "asleep.html")
    with pytest.raises(offload.StateError, match="report: the engine is closed"):
        engine.report(tmp_path / "closed.html")
    assert not (tmp_path / "closed.html").exists()


def test_a_step_with_more_spans_than_are_kept_is_compared_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(*given: Any) -> Recorded:
        spans = take_spans(*given)
        return spans._replace(complete_from=max(span.end for span in spans.spans))

    monkeypatch.setattr(offload.engine, "take_spans", forgetful)
    predicted = Timing((Span("all", {"compute": 1.0, "h2d": 0, "d2h": 0, "cpu": 0, "drive": 3.0}),), 0.5, Moved())
    for steps in (1, 3):
        (tmp_path / str(steps)).mkdir()
        engine, _ = trained(tmp_path / str(steps), steps)
        with engine:
            report, samples = engine.report(tmp_path / "page.html", predicted=predicted), engine._watch.samples()
        if steps == 1:
            assert report.step_seconds == () and report.compared == {}
            continue
        assert report.compared["step"] == (3.5, samples[2].time_s - samples[1].time_s)
        assert 0 < report.compared["compute"][1] < report.seconds
        read = (one.links["nvme_read"].bytes for one in samples[1:])
        assert report.lanes["nvme_read"].size_bytes == -next(read) + next(read) > 0


def test_a_page_and_a_trace_of_one_of_several_ranks_say_whose_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = trained(tmp_path, 1)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    with engine:
        for who in ("", ", rank 1 of 4"):
            engine.report(page)
            engine.trace(trace)
            assert re.search(rf"<h1>.*trainable parameters{who}</h1>", page.read_text(encoding="utf-8"))
            first = json.loads(trace.read_text())["traceEvents"][0]
            assert first["name"] == "process_name" and first["args"] == {"name": f"offload{who}"}
            ranks = types.SimpleNamespace(rank=1, world=4)
            monkeypatch.setattr(engine, "_parts", dataclasses.replace(engine._parts, ranks=ranks))
        monkeypatch.undo()


def test_being_looked_at_changes_no_bits(tmp_path: Path) -> None:
    ends = []
    for name, options in (("seen", {"log_every": 1}), ("alone", {"visible": False})):
        (tmp_path / name).mkdir()
        engine, losses = trained(tmp_path / name, 3, **options)
        with engine:
            ends.append((losses, engine.digests()))
    assert ends[0] == ends[1]


def test_a_line_of_the_log_has_milliseconds_and_bytes_of_a_step() -> None:
    line = watching.log_line(Between.of(sample(2), sample(6)), sample(6, loss=1.25))
    links = "; ".join(f"{name} 250.0 ms 10 B" for name in LINKS if name != "cpu_adam")
    assert line == (
        "steps 3 to 6, each 2000.0 ms: forward 500.0 ms; backward 1000.0 ms; updates 250.0 ms; waiting for parameters "
        f"500.0 ms; {links}; loss 1.2500; grad norm 1"
    )
    own = dataclasses.replace(sample(6), passes={**sample(6).passes, "update": 1.0})  # of a GPU, beside the CPU's
    assert "; updates 500.0 ms; " in watching.log_line(Between.of(sample(2), own), own)
    alone = watching.log_line(Between.of(sample(5), sample(6)), sample(6, loss=None, norm=None))
    assert alone.startswith("step 6 2000.0 ms: forward") and "loss" not in alone and "norm" not in alone


def test_an_engine_logs_every_so_many_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload.watching"):
        trained(tmp_path, 5, log_every=2)[0].close()
        trained(tmp_path, 2)[0].close()
    lines = [record.getMessage() for record in caplog.records if record.name == "offload.watching"]
    assert [line.split(",")[0] for line in lines] == ["steps 1 to 2", "steps 3 to 4"]
    for line in lines:
        assert re.search(r"forward [\d.]+ ms; backward [\d.]+ ms; updates [\d.]+ ms; waiting for ", line)
        assert "; loss " in line and "; grad norm " in line
    assert "nvme_read" in lines[1] and "nvme_write" in lines[1]  # of what the third step waited for, at the least


def test_a_run_begins_with_its_first_training_pass(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a minute of other work, and as long an evaluation, are in no line and no step, and nor are their bytes."""
    caplog.set_level(logging.INFO, logger="offload.watching")
    monkeypatch.setattr(training, "time", watching.time)
    engine, _ = trained(tmp_path, 0, log_every=2)
    with engine:
        clock[0] += 30
        with torch.no_grad():
            engine(batch(0))
        clock[0] += 30
        began = engine.stats().links["h2d"].bytes
        for number in range(4):
            loss = loss_of(engine, number)
            counted = engine._watch._seen.logged
            assert number or (counted is not None and counted.links["h2d"].bytes >= began > 0)
            clock[0] += 0.5
            engine.backward(loss)
            engine.step()
        assert [line.split(":")[0] for line in caplog.messages] == [
            "steps 1 to 2, each 500.0 ms",
            "steps 3 to 4, each 500.0 ms",
        ]
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        assert [(one.begin, one.end) for one in spans if one.name == "step 1"] == [(110.0, 110.5)]


def test_a_loaded_checkpoint_begins_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lines, samples and spans are of steps that came one behind the other, with nothing in between."""
    caplog.set_level(logging.INFO, logger="offload.watching")
    engine, _ = trained(tmp_path, 6, log_every=3)

    def train(steps: int) -> None:
        for number in range(steps):
            engine.backward(loss_of(engine, number))
            engine.step()

    def steps_of_lines() -> list[str]:
        found = [line.removeprefix("steps ").split(",")[0] for line in caplog.messages if line.startswith("steps")]
        caplog.clear()
        return found

    with engine:
        engine.save_checkpoint(tmp_path / "checkpoints")
        assert steps_of_lines() == ["1 to 3", "4 to 6"]
        train(4)
        assert [one.step for one in engine._watch.samples()][-1] == 10 or len(engine._watch.samples()) >= 8
        engine.load_checkpoint(tmp_path / "checkpoints")
        moment = time.perf_counter()
        train(3)
        assert steps_of_lines() == ["7 to 9", "7 to 9"]
        assert [one.step for one in engine._watch.samples()][0] == 7
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        step = [span for span in spans if span.name == "step 7"][-1]
        assert step.begin >= moment, "loading is no part of a step"
    with trained(tmp_path, 0, log_every=3)[0] as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        loss_of(engine.module, 0).backward()  # what torch's own loops do
        engine.optimizer.step()
        train(2)
        assert steps_of_lines() == ["7 to 9"]
        assert [one.step for one in engine._watch.samples()][0] == 7


def compute_names(engine: offload.Engine) -> list[str]:
    spans = take_spans(engine._parts, engine._life.require_open()).spans
    return [span.name for span in spans if span.lane == "compute"]


def test_passes_of_a_loop_that_calls_the_module_itself_are_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers do. Half a minute of other work before is in no line and no step."""
    caplog.set_level(logging.INFO, logger="offload.watching")
    monkeypatch.setattr(training, "time", watching.time)
    engine, _ = trained(tmp_path, 0, log_every=3)
    with engine:
        assert engine.optimizer is not None
        clock[0] += 30
        for number in range(3):
            loss = loss_of(engine.module, number)
            assert engine._watch._phase == "forward"
            clock[0] += 0.5
            loss.backward()
            assert engine._watch._phase == "backward"
            engine.optimizer.step()
        assert compute_names(engine) == ["forward", "backward"] * 3
        assert engine.report().step_seconds == (0.5, 0.5, 0.5)
        [line] = caplog.messages
        assert line.startswith("steps 1 to 3, each 500.0 ms") and "forward 0.0 ms" not in line


def test_a_step_of_gradients_that_came_without_a_pass_has_no_length(tmp_path: Path) -> None:
    engine, _ = trained(tmp_path, 0)
    with engine:
        for _ in range(2):
            for parameter in engine.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            engine.optimizer.step()  # type: ignore[union-attr]
        seconds = engine.report().step_seconds
        assert len(seconds) == 1 and seconds[0] > 0


def test_a_forward_that_is_repeated_or_fails_is_counted_once() -> None:
    """Repetitions are part of backward, and a gradient inside of a forward is part of that."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        def forward(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
            x = checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[assignment]
            torch.autograd.grad(self.inner(x).sum(), x, retain_graph=True)
            if fails:
                raise ZeroDivisionError
            return x

    memory = {"device": "64MiB", "cpu": "64MiB"}
    with offload.Engine(Model(), offload.SGD(lr=0.0), device="cpu", max_memory=memory) as engine:
        x = torch.ones(2, 8, requires_grad=True)
        with pytest.raises(ZeroDivisionError):
            engine.module(x, fails=True)
        engine.module(x).sum().backward()
        engine(x).sum().backward()
        checkpoint(engine.module, x.sin(), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
        engine.step()
        with torch.no_grad():
            engine.module.inner(x)
        assert compute_names(engine) == ["forward", *["forward", "backward"] * 3, "forward"]


def test_a_forward_that_cannot_begin_hides_no_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with offload.Engine(nn.Linear(8, 8), offload.SGD(lr=0.0), device="cpu", max_memory=memory) as engine:
        early = engine.module(torch.ones(2, 8)).sum()
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(OutsideChanges, "adopt", lambda self: 1 / 0)
            engine.module(torch.ones(2, 8))
        early.backward()
        assert compute_names(engine) == ["forward", "backward"]


def test_looking_costs_a_share_of_the_time_however_short_steps_are(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, not seconds: 400 steps of a millisecond."""
    engine, _ = trained(tmp_path, 1)
    counted = {"samples": 0, "writes": 0}

    def count(what: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[what] += 1
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(watching, "take_sample", count("samples", watching.take_sample))
    with engine:
        assert engine._watch._publisher is not None
        monkeypatch.setattr(engine._watch._publisher, "write", count("writes", engine._watch._publisher.write))
        run = engine._parts.steps.run
        for _ in range(400):
            clock[0] += 0.001
            run.steps += 1
            engine._watch.passed("forward")
            engine._watch.stepped(clock[0])
    most = watching.EVERY_STEP + 0.4 / watching.SAMPLED_S + 1
    assert counted["writes"] <= 1 and watching.EVERY_STEP < counted["samples"] <= most + counted["writes"]


def test_an_engine_that_only_evaluates_is_seen_too(clock: list[float]) -> None:
    with offload.Engine(nn.Linear(2, 2), device="cpu", max_memory={"device": "16MiB", "cpu": "16MiB"}) as engine:
        clock[0] += 2
        with torch.no_grad():
            engine(torch.ones(1, 2))
        assert engine._watch.samples() == [] and engine._watch._phase == "forward"


@pytest.mark.parametrize("value", [0, -1, 1.5, "often", True])
def test_a_number_of_steps_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(offload.ConfigError, match="log_every: expected a whole number >= 1"):
        offload.Config(log_every=value)


def test_the_loss_of_a_line_is_the_mean_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Whenever samples for the page were taken in between."""
    caplog.set_level(logging.INFO, logger="offload.watching")
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with offload.Engine(nn.Linear(4, 4), offload.SGD(lr=0.0), device="cpu", log_every=4, max_memory=memory) as engine:
        for number in range(8):
            engine.backward(engine(torch.ones(2, 4)).sum() * 0 + number)
            engine.step()
    lines = [message for message in caplog.messages if message.startswith("steps")]
    assert [re.search(r"loss ([0-9.]+)", line)[1] for line in lines] == ["1.5000", "5.5000"]  # type: ignore[index]
