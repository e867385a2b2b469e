"""One HTML file that shows where an engine's time and memory went: no script, and nothing from elsewhere.

Owns what is on the page, and its colours. Its size is bounded, however long the run was. Next:
:mod:`offload.seeing.drawing` draws.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.replacing import replacing
from offload.report import LINKS, Report, whole_steps, window
from offload.seeing.drawing import Line, bars, lines, merged, pairs, seconds_text, timeline
from offload.seeing.history import Between, Sample
from offload.sizes import short_bytes
from offload.spans import LANES, STEP, Recorded

STEPS = 3  # of which the timeline is
BARS = 60
ROWS = 40  # of the table
COLOURS = {
    "compute": "c1",
    "wait": "c6",
    "updates": "c0",
    "cpu_adam": "c2",
    "h2d": "c3",
    "d2h": "c8",
    "nvme_read": "c5",
    "nvme_write": "c7",
    "collectives": "c4",
}
WAITS = {
    "updates": "c2",
    "parameters": "c5",
    "gradients": "c8",
    "activations": "c3",
    "ranks": "c4",
    "commit": "c7",
}
BESIDE = "not waiting"

_STYLE = """
:root{color-scheme:light dark;--bg:#f9f9f7;--card:#fff;--text:#1c1c1a;--soft:#5f5e59;--rule:#dedcd5;
--c0:#c9c7bf;--c1:#2a78d6;--c2:#1baf7a;--c3:#eda100;--c4:#008300;--c5:#4a3aa7;--c6:#e34948;--c7:#e87ba4;--c8:#eb6834}
@media(prefers-color-scheme:dark){:root{--bg:#141413;--card:#1e1e1d;--text:#f0efea;--soft:#aaa89f;--rule:#3a3936;
--c0:#55534d;--c1:#3987e5;--c2:#199e70;--c3:#c98500;--c4:#2fa02f;--c5:#9085e9;--c6:#e66767;--c7:#d55181;--c8:#d95926}}
body{margin:0 auto;max-width:1040px;padding:24px;background:var(--bg);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:22px;margin:0}h2{font-size:16px;margin:0 0 2px}p{margin:0 0 10px;color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px 18px;margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:16px 0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:20px}.tile span{color:var(--soft)}
section{overflow-x:auto}svg{display:block;width:100%;min-width:640px;height:auto}
svg text{fill:var(--soft);font-size:12px}
.grid{stroke:var(--rule)}.mark{stroke:var(--soft);stroke-dasharray:3 3}
.line{fill:none!important;stroke-width:2;stroke-linejoin:round}.dashed{stroke-dasharray:6 4;stroke-width:1.5}
.key{display:flex;flex-wrap:wrap;gap:4px 16px;margin:0 0 6px;color:var(--soft)}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
pre{overflow-x:auto;margin:8px 0 0;font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
td,th{padding:2px 14px 2px 0;text-align:right;white-space:nowrap}th{font-weight:600;color:var(--soft)}
summary{cursor:pointer;font-weight:600}
"""
_STYLE += "".join(f".c{n}{{fill:var(--c{n});stroke:none}}.line.c{n}{{stroke:var(--c{n})}}" for n in range(9))
_STYLE += "".join(f".key .c{n}{{background:var(--c{n})}}" for n in range(9))


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What a page shows.

    Attributes:
        title: what was trained.
        plan: its text.
        report: of the last steps.
        recorded: what all lanes have lately done.
        samples: of the whole run.
        losses: step and loss; those of the samples where it is empty.
    """

    title: str
    plan: str
    report: Report
    recorded: Recorded
    samples: Sequence[Sample]
    losses: Sequence[tuple[int, float]] = ()


def write_page(path: str | Path, content: Content) -> None:
    """Write a page to a file, in place of what was there, all or nothing.

    Raises:
        ConfigError: it cannot be written.
    """
    text = page(content)
    with replacing(path, "report") as file:
        file.write(text)


def page(content: Content) -> str:
    """Return the page."""
    title = html.escape(content.title)
    sections = "".join(
        f"<section><h2>{html.escape(heading)}</h2><p>{html.escape(about)}</p>{body}</section>"
        for heading, about, body in _sections(content)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"{_tiles(content)}{sections}</body></html>\n"
    )


def _tiles(content: Content) -> str:
    report, shown = content.report, list[tuple[str, str]]()
    if report.step_seconds:
        mean = report.seconds / len(report.step_seconds)
        shown.append((seconds_text(mean), f"a step, of the last {len(report.step_seconds)}"))
    binding = report.binding_lane
    if binding is not None and report.seconds > 0:
        shown.append((binding, f"binds: busy in {100 * report.lanes[binding].seconds / report.seconds:.0f} %"))
    if report.seconds > 0:
        share = 100 * report.waited_seconds / report.seconds
        shown.append((f"{share:.0f} %", "of the time, computing waited"))
    for tier, budget in report.stats.budget_bytes.items():
        if budget:
            peak = report.stats.peak_bytes.get(tier, 0)
            shown.append((short_bytes(peak), f"peak of {tier}, of {short_bytes(budget)}"))
    tiles = "".join(f'<div class="tile"><b>{html.escape(a)}</b><span>{html.escape(b)}</span></div>' for a, b in shown)
    return f'<div class="tiles">{tiles}</div>'


def _sections(content: Content) -> Iterator[tuple[str, str, str]]:
    """Yield heading, what it is about, and HTML."""
    yield _lanes(content)
    if content.report.compared:
        rows = [(name, *both) for name, both in content.report.compared.items()]
        about = "Seconds of a step, and seconds in which each lane is busy in one."
        chart = pairs("Measured against predicted", about, rows, form=seconds_text)
        yield "Measured against predicted", about, _key((("predicted", "c0"), ("measured", "c1"))) + chart
    enough = len(content.samples) > 1
    if enough:
        yield _waits(content.samples)
        yield "Tiers over time", "Bytes booked when a step ended, the most so far, and the budget.", _tiers(content)
    yield from _losses(content)
    if enough:
        yield "Figures", "", _table(content)
    yield "The last steps as text", "", f"<pre>{html.escape(str(content.report))}</pre>"
    yield "The plan", "", f"<pre>{html.escape(content.plan)}</pre>"


def _key(names: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f'<span><i class="{colour}"></i>{html.escape(name)}</span>' for name, colour in names)
    return f'<div class="key">{shown}</div>'


def _lanes(content: Content) -> tuple[str, str, str]:
    recorded = content.recorded
    steps = whole_steps(recorded, STEPS)
    begin, end = window(steps, recorded)
    heading = f"Lanes of the last {len(steps)} steps" if len(steps) > 1 else "Lanes of the last step"
    if not steps:
        heading = f"Lanes of the last {seconds_text(end - begin)}, which have no whole step"
        heading = heading if content.samples else "Lanes, before a step has ended"
    about = "When each lane was busy. What computing waited for is in the lane wait. Point at a block for its name."
    found = []
    for lane in LANES:
        spans = [span for span in recorded.spans if span.lane == lane and span.begin < end and span.end > begin]
        if lane == STEP or not spans:
            continue
        told = [
            (span.begin, span.end, f"{span.name}{f', {short_bytes(span.size_bytes)}' if span.size_bytes else ''}")
            for span in spans
        ]

        def text(count: int, lane: str = lane) -> str:
            return f"{count} of {lane}"

        found.append((lane, COLOURS[lane], merged(told, begin, end, text)))
    if not found:
        return heading, "Nothing is recorded yet.", ""
    marks = [(span.begin, span.name) for span in steps]
    return heading, about, timeline(heading, about, found, marks, begin=begin, end=end)


def _buckets(samples: Sequence[Sample], most: int) -> list[tuple[str, Between]]:
    """Return `most` parts of the run at most, with their steps in words."""
    apart = -(-(len(samples) - 1) // most)
    ends = [*range(0, len(samples) - 1, apart), len(samples) - 1]
    found = []
    for first, last in zip(ends, ends[1:], strict=False):
        between = Between.of(samples[first], samples[last])
        begin, end = samples[first].step + 1, samples[last].step
        if between.steps > 0:
            found.append((f"step {end}" if end <= begin else f"steps {begin} to {end}", between))
    return found


def _waits(samples: Sequence[Sample]) -> tuple[str, str, str]:
    buckets = _buckets(samples, BARS)
    kinds = sorted({name for _, between in buckets for name, seconds in between.waited.items() if seconds > 0})
    names = [(BESIDE, "c0"), *((kind, WAITS.get(kind, "c6")) for kind in kinds)]
    rows = []
    for label, between in buckets:
        waited = [between.waited.get(kind, 0.0) / between.steps for kind in kinds]
        rows.append((label, [max((between.step_s or 0.0) - sum(waited), 0.0), *waited]))
    heading, about = "What steps waited for", "Seconds of a step, and the part in which computing stood still."
    return heading, about, _key(names) + bars(heading, about, names, rows, form=seconds_text)


def _tiers(content: Content) -> str:
    parts = []
    for tier, budget in content.report.stats.budget_bytes.items():
        used = [(float(sample.step), float(sample.used_bytes.get(tier, 0))) for sample in content.samples]
        peak = [(float(sample.step), float(sample.peak_bytes.get(tier, 0))) for sample in content.samples]
        if not budget and not any(y for _, y in peak):
            continue
        limit = [(used[0][0], float(budget)), (used[-1][0], float(budget))]
        shown = [Line("budget", "c6", limit, "dashed"), Line("peak", "c3", peak), Line("used", "c1", used)]
        about = (
            f"{tier}: used {short_bytes(used[-1][1])}, peak {short_bytes(peak[-1][1])}, budget {short_bytes(budget)}"
        )
        key = _key([(line.label, line.colour) for line in reversed(shown)])
        parts.append(f"<p><b>{html.escape(about)}</b></p>{key}" + lines(tier, about, shown, form=short_bytes, base=2))
    return "".join(parts)


_LARGEST = 1e100  # what is larger has no place beside other numbers


def _losses(content: Content) -> Iterator[tuple[str, str, str]]:
    losses = [(float(step), loss) for step, loss in content.losses]
    losses = losses or [(float(one.step), one.loss) for one in content.samples if one.loss is not None]
    norms = [(float(one.step), one.grad_norm) for one in content.samples if one.grad_norm is not None]
    for heading, colour, points in (("Loss", "c1", losses), ("Gradient norm", "c8", norms)):
        fine = [(step, value) for step, value in points if abs(value) < _LARGEST]
        others = [step for step, value in points if not abs(value) < _LARGEST]
        about = f"From {fine[0][1]:.4g} to {fine[-1][1]:.4g}." if fine else ""
        if others:
            about += (
                f" {len(others)} of {len(points)} are not finite or too large, the first one in step {others[0]:.0f}."
            )
        chart = [Line(heading, colour, fine)]
        zero = heading != "Loss"
        if points:
            yield heading, about.strip(), lines(heading, about, chart, form=_number, zero=zero) if fine else ""


def _number(value: float) -> str:
    return f"{value:.4g}"


def _table(content: Content) -> str:
    """Return the numbers behind the charts, a row per part of the run."""
    links = [
        name for name in LINKS if any(sample.links[name].bytes for sample in content.samples if name in sample.links)
    ]
    tiers = [tier for tier, budget in content.report.stats.budget_bytes.items() if budget]
    heads = ["steps", "seconds each", "waited each", *(f"{name} each" for name in links), *(f"{t} used" for t in tiers)]
    rows = []
    used = {sample.step: sample.used_bytes for sample in content.samples}
    for label, between in _buckets(content.samples, ROWS):
        end = int(label.split()[-1])
        cells = [label.split(" ", 1)[1], seconds_text(between.step_s or 0.0)]
        cells.append(seconds_text(sum(between.waited.values()) / between.steps))
        cells += [short_bytes(between.links[name].bytes / between.steps) for name in links]
        cells += [short_bytes(used[end].get(tier, 0)) for tier in tiers]
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heads)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return f"<details><summary>{len(rows)} rows</summary>{table}</details>"
