"""Pictures of the comparison: a bar for each peer's rate, and a mark for each of its waits.

Owns: the layout. Never: the numbers (results.py).
"""

from collections.abc import Sequence

from bench.load.report import Latencies
from bench.svg import GREY, INK, SERIES, Axis, Canvas, log_axis
from campaigns.peers.results import Row
from campaigns.peers.tables import Setting
from campaigns.peers.workloads import Workload

_LEFT, _TOP, _BAR, _GAP, _WIDTH, _RIGHT = 130, 44, 18, 68, 520, 90


def draw_rates(setting: Setting, workloads: Sequence[Workload], rows: Sequence[Row]) -> Canvas:
    """Output tokens per second in closed loops; each has its own axis, to the fastest or the floor."""
    groups = _groups([workload for workload in workloads if workload.share is None], rows)
    height = _TOP + sum(len(of_workload) * _BAR + _GAP for _, of_workload in groups)
    peers = list(dict.fromkeys(row.peer for row in rows))
    canvas = Canvas(_LEFT + _WIDTH + _RIGHT, height, title="Output tokens per second of each server")
    canvas.text(_LEFT, 20, f"{setting.model}; dark line: what reading the bytes allows at this bandwidth")
    top = _TOP
    for workload, of_workload in groups:
        floor = setting.floors[workload.name]
        most = max([floor, *(row.output_tokens_per_s for row in of_workload)]) or 1.0
        canvas.text(_LEFT, top + 6, workload.title)
        top += 12
        scale = Axis("output tokens per second", 0.0, most)
        _draw_axis(canvas, scale, top=top, bottom=top + len(of_workload) * _BAR)
        for row in of_workload:
            length = scale.place(row.output_tokens_per_s) * _WIDTH
            canvas.text(_LEFT - 8, top + 13, row.peer, anchor="end")
            canvas.rect(_LEFT, top + 2, length, _BAR - 4, SERIES[peers.index(row.peer) % len(SERIES)])
            canvas.text(_LEFT + length + 6, top + 13, f"{row.output_tokens_per_s:.0f}")
            top += _BAR
        at = _LEFT + scale.place(floor) * _WIDTH
        canvas.polyline([(at, top - len(of_workload) * _BAR), (at, top)], INK, 2)
        top += _GAP - 12
    return canvas


def _groups(workloads: Sequence[Workload], rows: Sequence[Row]) -> list[tuple[Workload, list[Row]]]:
    """Rows of each workload that has some."""
    groups = [(workload, [row for row in rows if row.workload == workload.name]) for workload in workloads]
    return [group for group in groups if group[1]]


def _draw_axis(
    canvas: Canvas, scale: Axis, *, top: float, bottom: float, left: float = _LEFT, width: float = _WIDTH
) -> None:
    for value in scale.ticks():
        at = left + scale.place(value) * width
        canvas.polyline([(at, top), (at, bottom + 4)], GREY, 1)
        canvas.text(at, bottom + 17, f"{value:,g}", anchor="middle")
    canvas.polyline([(left, bottom), (left + width, bottom)], INK, 1)
    canvas.text(left + width, bottom + 32, scale.title, anchor="end")


_PANEL, _PANEL_GAP, _GROUP = 290, 60, 26


def _first_token_ms(times: Latencies) -> float | None:
    return times.ttft_ms.p50 if times.ttft_ms else None


def _between_tokens_ms(times: Latencies) -> float | None:
    return times.chunk_gap_ms.p99 if times.chunk_gap_ms else None


_WAITS = (("first token, p50, ms", _first_token_ms), ("between two tokens, p99, ms", _between_tokens_ms))


def draw_waits(setting: Setting, workloads: Sequence[Workload], rows: Sequence[Row]) -> Canvas:
    """First tokens and times between tokens, each in a panel whose workloads share one logarithmic axis.

    Marks and no bars: a logarithmic axis begins anywhere.
    """
    groups = _groups(workloads, rows)
    bottom = _TOP + sum(len(of_workload) * _BAR + _GROUP for _, of_workload in groups)
    width = _LEFT + 2 * _PANEL + _PANEL_GAP + _RIGHT
    canvas = Canvas(width, bottom + 40, title="First tokens and times between tokens of each server")
    canvas.text(_LEFT, 20, f"{setting.model}; left is better, the scales are logarithmic")
    peers = list(dict.fromkeys(row.peer for row in rows))
    for panel, (title, wait_of) in enumerate(_WAITS):
        left, top = _LEFT + panel * (_PANEL + _PANEL_GAP), _TOP
        scale = log_axis(title, [wait_of(row.latencies) or 0.0 for row in rows])
        _draw_axis(canvas, scale, top=_TOP, bottom=bottom, left=left, width=_PANEL)
        for workload, of_workload in groups:
            canvas.text(_LEFT, top + 16, workload.title if panel == 0 else "")
            top += _GROUP - 4
            for row in of_workload:
                wait_ms = wait_of(row.latencies)
                if panel == 0:
                    canvas.text(_LEFT - 8, top + 13, row.peer, anchor="end")
                if wait_ms is not None:
                    at = left + scale.place(wait_ms) * _PANEL
                    canvas.polyline([(left, top + _BAR / 2), (at, top + _BAR / 2)], GREY)
                    canvas.rect(at - 4, top + 5, 8, 8, SERIES[peers.index(row.peer) % len(SERIES)])
                    canvas.text(at + 10, top + 13, f"{wait_ms:,.0f}")
                top += _BAR
            top += 4
    return canvas
