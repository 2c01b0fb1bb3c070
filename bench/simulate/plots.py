"""The report as pictures: time to first token, and length of the queue.

Owns: which points are drawn, few enough for a file that opens quickly.
Never: how SVG is written (bench/svg.py).
"""

from collections.abc import Sequence
from math import inf, isfinite

from bench.load.report import percentile
from bench.simulate.run import RunResult
from bench.svg import Axis, Canvas, Mark, axis, line_chart, log_axis, staircase

_NUM_POINTS = 200
_NUM_QUEUE_POINTS = 1000
_LEAST_QUEUE = 5.0


def draw_ttft(results: Sequence[RunResult], *, slo_s: float = inf) -> Canvas:
    """Draw the share of requests with their first token within a time in ms; a line for each class.

    `slo_s` is what was promised; inf: nothing was.
    """
    lines = []
    for result in results:
        for tally in result.classes:
            ordered = sorted(tally.ttft_s)
            if not ordered:
                continue
            shares = [number / _NUM_POINTS for number in range(_NUM_POINTS + 1)]
            points = [(percentile(ordered, 100 * share) * 1e3, share) for share in shares]
            lines.append((_name(result, results, tally.name), points))
    values = [x for _, points in lines for x, _ in points]
    mark = None
    if isfinite(slo_s) and slo_s > 0:
        values.append(slo_s * 1e3)  # the line is seen even where all are faster
        mark = Mark(slo_s * 1e3, f"SLO {slo_s * 1e3:,g} ms")
    title = "Time to first token: share of requests served within"
    x = log_axis("time to first token, ms", values)
    return line_chart(title, x, Axis("share of requests", 0.0, 1.0), lines, mark=mark)


def draw_queue(results: Sequence[RunResult]) -> Canvas:
    """Draw how many requests waited over virtual time, on all replicas together."""
    lines = [(result.name, staircase(_thin(result.queue))) for result in results]
    seconds = [x for _, points in lines for x, _ in points]
    counts = [y for _, points in lines for _, y in points]
    title = "Requests waiting, preempted ones included"
    # An axis of one request would make needles of full height.
    return line_chart(
        title, axis("virtual time, s", seconds), axis("waiting requests", [*counts, _LEAST_QUEUE]), lines
    )


def _thin(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Keep at most _NUM_QUEUE_POINTS points, each the most of its stretch."""
    stride = -(-len(points) // _NUM_QUEUE_POINTS)
    return [
        (points[start][0], max(count for _, count in points[start : start + stride]))
        for start in range(0, len(points), stride or 1)
    ]


def _name(result: RunResult, results: Sequence[RunResult], name: str) -> str:
    return name if len(results) == 1 else f"{result.name}, {name}"
