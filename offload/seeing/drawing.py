"""Charts as SVG text: lines, stacked bars, pairs of bars, and a timeline of lanes.

Owns where a value lies on a chart, and how many shapes it may have. Colours are classes ``c1`` to ``c8`` and ``c0``,
which the page defines. Knows nothing of engines. Next: :mod:`offload.seeing.page` puts charts on a page.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from offload.sizes import figures

WIDTH = 960.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 20.0, 10.0, 32.0
PIXELS = 800  # of a timeline that are told apart, so a lane has hardly more shapes
MOST_POINTS = 512  # of a line
_numbers = itertools.count(1)  # of charts: what is named in a page has a name of its own

Form = Callable[[float], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points of a chart, by rising x, and how they are shown: `colour` is a class, `style` empty or ``dashed``."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    style: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A piece of a lane's time: from `begin` to `end` seconds, with what is shown where one points at it."""

    begin: float
    end: float
    text: str


def ticks(low: float, high: float, count: int = 4, *, base: float = 10.0) -> list[float]:
    """Return about `count` round values from `low` to `high`: 1, 2 or 5 times a power of 10, or of 2 with `base` 2."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = base ** math.floor(math.log(rough, base) + 1e-9)
    step = next((power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999), power * 10)
    if base == 2:
        step = power if power >= rough * 0.999 else power * 2
    first, slack = math.ceil(low / step - 1e-9), (high - low) * 1e-6
    found = [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]
    return [value for value in found if low - slack <= value <= high + slack] or [low]


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return `most` of the points at most, the lowest and the highest of each part, with the last one.

    Those that are no number are left out.
    """
    fine = [(x, y) for x, y in points if math.isfinite(y)]
    if len(fine) <= most:
        return fine
    *earlier, last = fine
    apart = -(-len(earlier) // ((most - 1) // 2))
    parts = (range(begin, min(begin + apart, len(earlier))) for begin in range(0, len(earlier), apart))
    ends = [(min(part, key=lambda n: earlier[n][1]), max(part, key=lambda n: earlier[n][1])) for part in parts]
    return [*(earlier[n] for pair in ends for n in sorted(set(pair))), last]


def lines(title: str, about: str, shown: Sequence[Line], *, form: Form, base: float = 10.0, zero: bool = True) -> str:
    """Return a chart of lines over steps.

    Args:
        title: of the chart.
        about: what it shows, for those who do not see it.
        shown: the lines.
        form: text of a value.
        base: of the powers that values on the axis are multiples of: 10, or 2 for bytes.
        zero: the axis begins there.
    """
    kept = [dataclasses.replace(line, points=thinned(line.points)) for line in shown]
    values = [y for line in kept for _, y in line.points]
    steps = [x for line in kept for x, _ in line.points]
    low, high = (0.0 if zero else min(values)), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (low if zero else low - margin), high + margin
    frame = _Frame(160.0, min(steps), max(steps), low, high)
    parts = [*frame.grid(form, base), *frame.steps()]
    for line in kept:
        dots = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points]
        if len(dots) == 1:
            x, y = dots[0].split(",")
            parts.append(f'<circle class="{line.colour}" cx="{x}" cy="{y}" r="3"/>')
        elif dots:
            parts.append(f'<polyline class="line {line.colour} {line.style}" points="{" ".join(dots)}"/>')
    return _svg(title, about, frame.height, parts)


def bars(
    title: str, about: str, names: Sequence[tuple[str, str]], rows: Sequence[tuple[str, Sequence[float]]], *, form: Form
) -> str:
    """Return a chart of stacked bars.

    Args:
        title: of the chart.
        about: what it shows, for those who do not see it.
        names: of the parts of a bar, the lowest first, with their colours.
        rows: the bars from left to right: a label of two words or more, the second a step, and the parts' values.
        form: text of a value.
    """
    high = max((sum(values) for _, values in rows), default=0.0) * 1.05 or 1.0
    frame = _Frame(200.0, 0, max(len(rows), 1), 0.0, high)
    parts = list(frame.grid(form, 10.0))
    wide = (WIDTH - LEFT - RIGHT) / max(len(rows), 1)
    shown = -(-len(rows) // 12) if rows else 1
    gap = min(wide * 0.1, 2)
    for number, (label, values) in enumerate(rows):
        left, below = frame.x(number) + gap, 0.0
        for (name, colour), value in zip(names, values, strict=True):
            if value > 0:
                top = frame.y(below + value)
                height = frame.y(below) - top
                told = html.escape(f"{label}: {name} {form(value)}")
                parts.append(
                    f'<rect class="{colour}" x="{left:.1f}" y="{top:.1f}" width="{wide - 2 * gap:.1f}"'
                    f' height="{height:.1f}"><title>{told}</title></rect>'
                )
                below += value
        if number % shown == 0:
            parts.append(_text(left + wide / 2 - gap, frame.height - 16, label.split()[1], "middle"))
    parts.append(_text(LEFT - 8, frame.height - 16, "step", "end"))
    return _svg(title, about, frame.height, parts)


def pairs(title: str, about: str, rows: Sequence[tuple[str, float, float]], *, form: Form) -> str:
    """Return a chart with two bars for each row: a label, a predicted value (pale) and a measured one."""
    high = max((value for _, *values in rows for value in values), default=0.0) or 1.0
    parts, at = [], 4.0
    for label, predicted, measured in rows:
        parts.append(_text(LEFT - 8, at + 19, label, "end"))
        for value, colour, name in ((predicted, "c0", "predicted"), (measured, "c1", "measured")):
            wide = (WIDTH - LEFT - RIGHT - 90) * value / high
            told = html.escape(f"{label}: {name} {form(value)}")
            parts.append(
                f'<rect class="{colour}" x="{LEFT}" y="{at:.1f}" width="{max(wide, 0.5):.1f}" height="13">'
                f"<title>{told}</title></rect>"
            )
            parts.append(_text(LEFT + wide + 6, at + 11, form(value), "start"))
            at += 15
        at += 10
    return _svg(title, about, at, parts)


def timeline(
    title: str,
    about: str,
    lanes: Sequence[tuple[str, str, Sequence[Block]]],
    marks: Sequence[tuple[float, str]],
    *,
    begin: float,
    end: float,
) -> str:
    """Return lanes one below the other.

    Args:
        title: of the chart.
        about: what it shows, for those who do not see it.
        lanes: name, colour and blocks, as of :func:`merged`.
        marks: moments that are shown as vertical lines, with a text.
        begin: seconds that are at the left edge.
        end: those at the right edge.
    """
    pitch, top = 26.0, 24.0
    frame = _Frame(top + pitch * len(lanes) + BOTTOM, begin, end, 0, 1)
    bottom = top + pitch * len(lanes)
    parts = []
    for moment in ticks(0.0, end - begin, 6):
        x = frame.x(begin + moment)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        parts.append(_text(x, bottom + 16, seconds_text(moment), "middle"))
    for moment, text in marks:
        x = frame.x(moment)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8}" y2="{bottom}"/>')
        parts.append(_text(x + 4, top - 8, text, "start"))
    for number, (name, colour, blocks) in enumerate(lanes):
        y = top + pitch * number + 4
        parts.append(_text(LEFT - 8, y + 13, name, "end"))
        for block in blocks:
            x, wide = frame.x(block.begin), frame.x(block.end) - frame.x(block.begin)
            parts.append(
                f'<rect class="{colour}" x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.8):.1f}" height="18">'
                f"<title>{html.escape(block.text)}</title></rect>"
            )
    return _svg(title, about, frame.height, parts)


def merged(
    spans: Iterable[tuple[float, float, str]], begin: float, end: float, text: Callable[[int], str]
) -> list[Block]:
    """Return blocks of a lane; spans with less than a pixel between them are one.

    Args:
        spans: begin, end and text of each.
        begin: what is before is cut off.
        end: what is behind is cut off.
        text: of a block of so many spans.
    """
    gap, found = (end - begin) / PIXELS, list[tuple[float, float, str, int]]()
    for first, last, told in sorted(spans):
        first, last = max(first, begin), min(last, end)
        if first > last:
            continue
        if found and first - found[-1][1] < gap:
            before = found[-1]
            found[-1] = (before[0], max(before[1], last), before[2], before[3] + 1)
        else:
            found.append((first, last, told, 1))
    return [
        Block(first, last, f"{told if count == 1 else text(count)}, {seconds_text(last - first)}")
        for first, last, told, count in found
    ]


def seconds_text(seconds: float) -> str:
    """Return a duration in three figures: ``0 s``, ``250 us``, ``13.4 ms``, ``2.5 s``."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds == 0 or abs(seconds) * factor >= 0.9995:
            return f"{figures(seconds * factor)} {unit}"
    return f"{seconds * 1e6:.3g} us"


class _Frame:
    """The axes of a chart: where values lie."""

    def __init__(self, height: float, left: float, right: float, low: float, high: float) -> None:
        self.height = height
        self._left, self._right = left, right if right > left else left + 1
        self._low, self._high = low, high if high > low else low + 1

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self._left) / (self._right - self._left)

    def y(self, value: float) -> float:
        room = self.height - TOP - BOTTOM
        return TOP + room * (1 - (value - self._low) / (self._high - self._low))

    def grid(self, form: Form, base: float) -> Iterator[str]:
        for value in ticks(self._low, self._high, base=base):
            y = self.y(value)
            yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield _text(LEFT - 8, y + 4, form(value), "end")

    def steps(self) -> Iterator[str]:
        for value in ticks(self._left, self._right, 8):
            if value == int(value):
                yield _text(self.x(value), self.height - 16, str(int(value)), "middle")
        yield _text(LEFT - 8, self.height - 16, "step", "end")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(title: str, about: str, height: float, parts: Iterable[str]) -> str:
    number = next(_numbers)
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-labelledby="t{number} d{number}">'
        f'<title id="t{number}">{html.escape(title)}</title><desc id="d{number}">{html.escape(about)}</desc>'
        f"{''.join(parts)}</svg>"
    )
