"""Pictures written by hand: a canvas of SVG elements, and a chart with axes on it.

Owns: escaping, number formats, ticks, the colours that all pictures share.
Never: knows what is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

# Colours that people with the common kinds of colour blindness tell apart (Okabe and Ito, 2008).
BLUE, GREEN, RED, ORANGE, SKY, PURPLE = "#0072b2", "#009e73", "#d55e00", "#e69f00", "#56b4e9", "#cc79a7"
SERIES = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY, "#444444", "#999999")
GREY, INK = "#d9d9d9", "#333333"

Points = Sequence[tuple[float, float]]


class Canvas:
    """Elements in the order in which they are painted. The title is for screen readers."""

    def __init__(self, width: float, height: float, *, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._elements: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, tip: str = "") -> None:
        """Add a rectangle; `tip` is shown where a pointer rests on it."""
        inside = f"><title>{escape(tip)}</title></rect>" if tip else "/>"
        self._elements.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" fill="{fill}"{inside}'
        )

    def arrow(self, x: float, y_from: float, y_to: float, stroke: str, *, tip: str) -> None:
        """Add an upright arrow with its head at `y_to`."""
        side = 4 if y_to > y_from else -4
        path = f"M{_n(x)} {_n(y_from)}V{_n(y_to)}M{_n(x - 3)} {_n(y_to - side)}L{_n(x)} {_n(y_to)}"
        path += f"L{_n(x + 3)} {_n(y_to - side)}"
        self._elements.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.5">'
            f"<title>{escape(tip)}</title></path>"
        )

    def dashes(self, points: Points, stroke: str) -> None:
        """Add a dashed line."""
        self.polyline(points, stroke, 1.5)
        self._elements[-1] = self._elements[-1].replace("/>", ' stroke-dasharray="6 4"/>')

    def polyline(self, points: Points, stroke: str, width: float = 1.5) -> None:
        place = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._elements.append(
            f'<polyline points="{place}" fill="none" stroke="{stroke}" stroke-width="{_n(width)}"/>'
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", turn: int = 0) -> None:
        """Add text, turned by `turn` degrees, clockwise, around the anchor."""
        turned = f' transform="rotate({turn} {_n(x)} {_n(y)})"' if turn else ""
        self._elements.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{turned}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(self.width)}" height="{_n(self.height)}" '
            f'viewBox="0 0 {_n(self.width)} {_n(self.height)}" font-family="sans-serif" font-size="12" '
            f'fill="{INK}">'
        )
        background = f'<rect width="{_n(self.width)}" height="{_n(self.height)}" fill="#ffffff"/>'
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, background, *self._elements, "</svg>", ""])


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to [0, 1]. Where `is_log`, `low` must be above 0."""

    title: str
    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1,) if last - first > 3 else (1, 2, 5)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        else:
            step = _round_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step - 1e-9)
            found = [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]


def axis(title: str, values: Sequence[float]) -> Axis:
    """Make an axis from 0 to the largest value."""
    return Axis(title, 0.0, max([value for value in values if math.isfinite(value)], default=0.0) or 1.0)


def log_axis(title: str, values: Sequence[float]) -> Axis:
    """Make a logarithmic axis around the positive values; zeros are drawn at its left end."""
    positive = [value for value in values if value > 0]
    if not positive:
        return Axis(title, 0.1, 10.0, is_log=True)
    low, high = min(positive), max(positive)
    return Axis(title, low / 1.1, max(high, low * 2) * 1.1, is_log=True)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50


@dataclass(frozen=True, slots=True)
class Mark:
    """A value of the horizontal axis that is to be seen, with its name."""

    value: float
    name: str


def line_chart(
    title: str, x: Axis, y: Axis, lines: Sequence[tuple[str, Points]], *, mark: Mark | None = None
) -> Canvas:
    """Draw named lines in one frame, with a legend at the right, and the mark as a dashed line."""
    longest = max((len(name) for name, _ in lines), default=0)
    frame_width, frame_height = 640, 320
    canvas = Canvas(
        _LEFT + frame_width + _RIGHT + 30 + 7 * min(longest, 40), _TOP + frame_height + _BOTTOM, title=title
    )
    canvas.text(_LEFT, 24, title)
    for value in x.ticks():
        at = _LEFT + x.place(value) * frame_width
        canvas.polyline([(at, _TOP), (at, _TOP + frame_height)], GREY, 0.5)
        canvas.text(at, _TOP + frame_height + 18, f"{value:,g}", anchor="middle")
    for value in y.ticks():
        at = _TOP + (1 - y.place(value)) * frame_height
        canvas.polyline([(_LEFT, at), (_LEFT + frame_width, at)], GREY, 0.5)
        canvas.text(_LEFT - 8, at + 4, f"{value:,g}", anchor="end")
    canvas.text(_LEFT + frame_width / 2, _TOP + frame_height + 38, x.title, anchor="middle")
    canvas.text(18, _TOP + frame_height / 2, y.title, anchor="middle", turn=-90)
    for number, (name, points) in enumerate(lines):
        colour = SERIES[number % len(SERIES)]
        placed = [
            (_LEFT + x.place(px) * frame_width, _TOP + (1 - y.place(py)) * frame_height) for px, py in points
        ]
        canvas.polyline(placed, colour, 2)
        legend_x, legend_y = _LEFT + frame_width + _RIGHT, _TOP + 12 + 20 * number
        canvas.polyline([(legend_x, legend_y - 4), (legend_x + 20, legend_y - 4)], colour, 3)
        canvas.text(legend_x + 26, legend_y, name[:40])
    if mark is not None and x.low <= mark.value <= x.high:
        at = _LEFT + x.place(mark.value) * frame_width
        canvas.dashes([(at, _TOP), (at, _TOP + frame_height)], INK)
        canvas.text(at + 5, _TOP + frame_height - 8, mark.name)
    return canvas


def staircase(points: Points) -> list[tuple[float, float]]:
    """Turn points into steps that hold until the next point."""
    corners = list(points[:1])
    for (_, before), (at, after) in pairwise(points):
        corners += [(at, before), (at, after)]
    return corners
