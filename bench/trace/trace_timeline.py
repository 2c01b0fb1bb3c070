"""Timeline of a step trace: sequences as rows, steps as columns.

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

from bench.svg import BLUE, GREEN, GREY, RED, Canvas
from bench.trace.trace_reading import TracedStep


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
        column_width = min(24.0, _WIDTH / len(numbers))
        canvas = Canvas(
            max(720, _LEFT + column_width * len(numbers) + 40),
            _TOP + _ROW * len(shown) + 50,
            title="Steps of the scheduler",
        )
        more = f"; {len(seen) - len(shown)} more are not drawn" if len(seen) > len(shown) else ""
        canvas.text(_LEFT, 22, f"Steps {numbers[0]} to {numbers[-1]}, {len(shown)} sequences{more}")
        _draw_legend(canvas)
        for place, (sequence_id, runs) in enumerate(shown):
            y = _TOP + place * _ROW
            canvas.text(_LEFT - 8, y + _ROW - 3, str(sequence_id), anchor="end")
            for run in runs:
                x = _LEFT + (run.first - first) * column_width
                canvas.rect(x, y, (run.end - run.first) * column_width, _ROW - _GAP, run.cell.value)
        _draw_steps(canvas, numbers, column_width, _TOP + _ROW * len(shown))
        return canvas


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


def _draw_steps(canvas: Canvas, numbers: Sequence[int], column_width: float, y: float) -> None:
    """Draw step numbers below the columns, as many as there is room for."""
    stride = max(1, -(-len(numbers) // max(1, int(len(numbers) * column_width / 60))))
    for column in range(0, len(numbers), stride):
        x = _LEFT + (column + 0.5) * column_width
        canvas.polyline([(x, y), (x, y + 4)], GREY, 1)
        canvas.text(x, y + 18, str(numbers[column]), anchor="middle")
    canvas.text(_LEFT - 8, y + 18, "step", anchor="end")
    canvas.text(_LEFT - 8, _TOP - 6, "sequence", anchor="end")
