"""Timeline of a step trace: sequences as rows over time, preemptions as arrows, the use of KV blocks.

Owns: the states of the picture and how they follow from the lines of a trace.
Never: reads files.

                  arrived                new                     preempted            released, aborted
    (not seen) ------------> waiting ---------> in the line ---------------> preempted        |
                                 ^                  |     ^---------------------'             v
                                 '------------------'              new                      ended
                                 no share in this step
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from bench.svg import BLUE, GREEN, GREY, INK, ORANGE, RED, SKY, Axis, Canvas
from bench.trace.reading import TracedPreemption, TracedStep


class Cell(Enum):
    """State of a sequence in a step. The value is the colour."""

    WAITING = GREY
    PREEMPTED = RED
    PREFILL = BLUE
    DECODE = GREEN


_LEGEND = (
    (Cell.PREFILL, "prefill"),
    (Cell.DECODE, "decode"),
    (Cell.WAITING, "waiting"),
    (Cell.PREEMPTED, "preempted, waits to come back"),
)
_LEFT, _TOP, _ROW, _GAP = 80, 72, 14, 2
_WIDTH = 1200
_BAND = 48
"""Height of the band of KV blocks."""
_LEAST_S = 1e-6


@dataclass(slots=True)
class Run:
    """Neighbouring columns in which a sequence has the same state."""

    first: int
    end: int
    """The column after the last."""
    cell: Cell


class Row:
    """The columns of one sequence. Those in which it only waits are filled in when it next does something."""

    __slots__ = ("_idle", "_next", "runs")

    def __init__(self, first: int) -> None:
        self.runs: list[Run] = []
        self._next = first
        self._idle = Cell.WAITING

    @property
    def is_preempted(self) -> bool:
        return self._idle is Cell.PREEMPTED

    def compute(self, column: int, cell: Cell) -> None:
        self.wait_until(column)
        self._put(column + 1, cell)

    def wait_until(self, column: int) -> None:
        self._put(column, self._idle)

    def preempt(self, column: int) -> None:
        self.wait_until(column)
        self._idle = Cell.PREEMPTED

    def admit(self, column: int) -> None:
        self.wait_until(column)
        self._idle = Cell.WAITING

    def _put(self, end: int, cell: Cell) -> None:
        if end <= self._next:
            return
        if self.runs and self.runs[-1].cell is cell:
            self.runs[-1].end = end
        else:
            self.runs.append(Run(self._next, end, cell))
        self._next = end


class Timeline:
    """Collects steps from the first on: a sequence that waits in the window may be much older."""

    def __init__(self, window: tuple[int, int], *, max_columns: int) -> None:
        """The window is two step numbers, both included."""
        self.rows: dict[int, Row] = {}
        """Rows by sequence, in the order of appearance; columns count the steps from 0."""
        self.step_numbers: list[int] = []
        """Steps of the columns in the window."""
        self.num_left_out = 0
        """Steps in the window for which there was no room."""
        self._starts_s: list[float] = []
        self._ends_s: list[float] = []
        self._kv_use: list[float] = []
        """Share of the blocks in use, for each column of the window."""
        self._preemptions: list[tuple[int, TracedPreemption]] = []
        """Preemptions in the window, each with its column."""
        self._window = window
        self._max_columns = max_columns
        self._live: dict[int, Row] = {}
        self._num_columns = 0
        self._first = 0
        self._is_past = False

    def add(self, step: TracedStep) -> None:
        is_inside = self._window[0] <= step.step <= self._window[1]
        if is_inside and len(self.step_numbers) == self._max_columns:
            self.num_left_out += 1
        self._is_past |= bool(self.step_numbers) and not is_inside
        if self._is_past or self.num_left_out:
            return
        if is_inside:
            if not self.step_numbers:
                self._first = self._num_columns
            self.step_numbers.append(step.step)
            self._starts_s.append(step.time_s)
            self._ends_s.append(step.time_s + step.duration_s)
            self._kv_use.append(step.num_used_blocks / step.num_blocks)
            self._preemptions += [(self._num_columns, each) for each in step.preemptions]
        self._place(step, self._num_columns)
        self._num_columns += 1

    def close(self) -> None:
        """End the timeline: sequences that still wait have waited to the last column."""
        for row in self._live.values():
            row.wait_until(self._num_columns)

    def _place(self, step: TracedStep, column: int) -> None:
        self._take_out(step, column)
        for sequence_id in step.arrived:
            self._row(sequence_id, column)
        for preemption in step.preemptions:
            self._row(preemption.sequence_id, column).preempt(column)
        new = set(step.new)
        for sequence_id in step.new:
            self._row(sequence_id, column).admit(column)
        for sequence_id, _, num_tokens in step.shares():
            is_prefill = num_tokens > 1 or sequence_id in new
            self._row(sequence_id, column).compute(column, Cell.PREFILL if is_prefill else Cell.DECODE)

    def _row(self, sequence_id: int, column: int) -> Row:
        if sequence_id not in self._live:
            self._live[sequence_id] = self.rows.setdefault(sequence_id, Row(column))
        return self._live[sequence_id]

    def _take_out(self, step: TracedStep, column: int) -> None:
        """Remove sequences that ended before this step. A preempted one is released, too, but comes back."""
        for sequence_id in step.released:
            row = self._live.get(sequence_id)
            if row is not None and not row.is_preempted:
                row.wait_until(column)
                del self._live[sequence_id]
        for sequence_id in step.ended:
            if sequence_id in self._live:
                self._live.pop(sequence_id).wait_until(column)

    def draw(self, *, max_rows: int) -> Canvas:
        """Draw the window with the first `max_rows` of its sequences. There must be a step in it."""
        numbers, first = self.step_numbers, self._first
        end = first + len(numbers)
        clipped = {sequence_id: list(_clip(row.runs, first, end)) for sequence_id, row in self.rows.items()}
        seen = [(sequence_id, runs) for sequence_id, runs in clipped.items() if runs]
        shown = seen[:max_rows]
        bottom = _TOP + _ROW * len(shown)
        canvas = Canvas(_LEFT + _WIDTH + 40, bottom + _BAND + 80, title="Steps of the scheduler")
        more = f"; {len(seen) - len(shown)} more are not drawn" if len(seen) > len(shown) else ""
        canvas.text(_LEFT, 22, f"Steps {numbers[0]} to {numbers[-1]}, {len(shown)} sequences{more}")
        _draw_legend(canvas)
        canvas.text(_LEFT - 8, _TOP - 6, "sequence", anchor="end")
        axis = Axis("time since the first of these steps, s", 0.0, self._seconds(len(numbers)))
        edges = [_LEFT + _WIDTH * axis.place(self._seconds(column)) for column in range(len(numbers) + 1)]
        for place, (sequence_id, runs) in enumerate(shown):
            y = _TOP + place * _ROW
            canvas.text(_LEFT - 8, y + _ROW - 3, str(sequence_id), anchor="end")
            for run in runs:
                x, x_end = edges[run.first - first], edges[run.end - first]
                width = max(x_end - x, 0.5)
                canvas.rect(x, y, width, _ROW - _GAP, run.cell.value, tip=self._words(sequence_id, run))
        self._draw_preemptions(canvas, edges, [sequence_id for sequence_id, _ in shown])
        self._draw_kv_use(canvas, edges, bottom + 16)
        _draw_seconds(canvas, axis, bottom + 16 + _BAND)
        return canvas

    def _seconds(self, column: int) -> float:
        """Time of the left edge of a column of the window, from that of the first."""
        last = len(self._starts_s)
        at = self._starts_s[column] if column < last else max(self._ends_s[-1], self._starts_s[-1] + _LEAST_S)
        return at - self._starts_s[0]

    def _words(self, sequence_id: int, run: Run) -> str:
        first, last = run.first - self._first, run.end - self._first
        span_ms = (self._seconds(last) - self._seconds(first)) * 1e3
        steps = f"steps {self.step_numbers[first]} to {self.step_numbers[last - 1]}"
        return f"sequence {sequence_id}: {run.cell.name.lower()}, {steps}, {span_ms:,.1f} ms"

    def _draw_preemptions(self, canvas: Canvas, edges: Sequence[float], shown: Sequence[int]) -> None:
        """Draw an arrow from who needed the blocks to who gave them."""
        places = {sequence_id: _TOP + place * _ROW + _ROW // 2 for place, sequence_id in enumerate(shown)}
        for column, each in self._preemptions:
            if {each.sequence_id, each.beneficiary} <= places.keys() and each.sequence_id != each.beneficiary:
                tip = f"{each.sequence_id} gave {each.num_freed_blocks} blocks to {each.beneficiary}"
                tip += f": {each.cause}"
                x = edges[column - self._first]
                canvas.arrow(x, places[each.beneficiary], places[each.sequence_id], ORANGE, tip=tip)

    def _draw_kv_use(self, canvas: Canvas, edges: Sequence[float], top: float) -> None:
        for column, share in enumerate(self._kv_use):
            width = max(edges[column + 1] - edges[column], 0.5)
            tip = f"step {self.step_numbers[column]}: {share:.0%} of the KV blocks in use"
            canvas.rect(edges[column], top + _BAND * (1 - share), width, _BAND * share, SKY, tip=tip)
        canvas.polyline([(_LEFT, top), (_LEFT + _WIDTH, top)], GREY, 0.5)
        canvas.text(_LEFT - 8, top + 9, "KV 100%", anchor="end")
        canvas.text(_LEFT - 8, top + _BAND, "0%", anchor="end")


def _clip(runs: Iterable[Run], first: int, end: int) -> Iterable[Run]:
    for run in runs:
        if run.first < end and run.end > first:
            yield Run(max(run.first, first), min(run.end, end), run.cell)


def _draw_legend(canvas: Canvas) -> None:
    x = float(_LEFT)
    for cell, meaning in _LEGEND:
        canvas.rect(x, 34, 12, 12, cell.value)
        canvas.text(x + 18, 44, meaning)
        x += 18 + 7 * len(meaning) + 24
    canvas.arrow(x + 6, 34, 46, ORANGE, tip="a preemption")
    canvas.text(x + 18, 44, "blocks given up, for the row where the arrow begins")


def _draw_seconds(canvas: Canvas, axis: Axis, y: float) -> None:
    canvas.polyline([(_LEFT, y), (_LEFT + _WIDTH, y)], INK, 1)
    for value in axis.ticks():
        x = _LEFT + _WIDTH * axis.place(value)
        canvas.polyline([(x, y), (x, y + 4)], INK, 1)
        canvas.text(x, y + 18, f"{value:,g}", anchor="middle")
    canvas.text(_LEFT + _WIDTH / 2, y + 38, axis.title, anchor="middle")
