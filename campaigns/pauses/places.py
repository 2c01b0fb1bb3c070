"""The place of a pause: what the engine, the API process and the reader did in it.

Owns: the comparison with the steps of the trace, and one line of text.
Never: measures (neighbour.py).
"""

from collections.abc import Sequence
from itertools import pairwise

from bench.trace.reading import TracedStep
from campaigns.pauses.crowds import MOST_TOKENS_OF_OTHERS
from campaigns.pauses.neighbour import Pause


def place_of(pause: Pause, steps: Sequence[TracedStep]) -> str:
    """Describe one pause: the longest times without a step, and what each process did, all in ms."""
    spent = pause.spent
    brought = _ended_in(pause, steps_of_neighbour(steps))
    parts = (
        ("no step for", longest_gap_s(pause, steps)),
        (f"{len(brought)} steps with the neighbour, none for", longest_gap_s(pause, brought)),
        ("the engine's loop ran", spent.engine_ran_s),
        ("and waited for a core", spent.engine_waited_s),
        ("the API process's ran", spent.api_ran_s),
        ("and waited", spent.api_waited_s),
        ("the reader waited", spent.reader_waited_s),
        ("stolen from the machine", spent.stolen_s),
    )
    said = ", ".join(f"{name} {part_s * 1e3:.0f}" for name, part_s in parts)
    return f"{pause.lasted_s * 1e3:.0f} ms: {said}"


def steps_of_neighbour(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """Choose the steps that brought the neighbour a token: no other sequence becomes so long as its."""
    longest: dict[int, int] = {}
    for step in steps:
        longest.update(step.decodes)
    its = {sequence for sequence, position in longest.items() if position > MOST_TOKENS_OF_OTHERS}
    return [step for step in steps if any(sequence in its for sequence, _ in step.decodes)]


def longest_gap_s(pause: Pause, steps: Sequence[TracedStep]) -> float:
    """Find the longest part of a pause in which no step ended."""
    ends_s = [step.time_s + step.duration_s for step in _ended_in(pause, steps)]
    points = [pause.began_s, *ends_s, pause.began_s + pause.lasted_s]
    return max(later - earlier for earlier, later in pairwise(points))


def _ended_in(pause: Pause, steps: Sequence[TracedStep]) -> list[TracedStep]:
    return [step for step in steps if 0 < step.time_s + step.duration_s - pause.began_s < pause.lasted_s]
