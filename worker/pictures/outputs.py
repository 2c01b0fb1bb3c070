"""Outputs of the tower, by content.

Owns: how long one is kept: while a sequence is yet to compute places of the picture, and after that until the
room is wanted. A picture that comes again, in the next turn of a chat say, is not computed again.
"""

from collections import OrderedDict
from typing import NamedTuple

from scheduler.messages import SequenceId
from worker.pictures.eyes import PictureRows


class Hold(NamedTuple):
    """Claim of a sequence on a picture's output, for the places from an offset on."""

    sequence_id: SequenceId
    offset: int


class OutputCache:
    """Cache of outputs. Its room is counted in places of pictures; plans never claim more than there is."""

    def __init__(self, num_places: int) -> None:
        self._num_free = num_places
        self._outputs: OrderedDict[str, PictureRows] = OrderedDict()  # the longest unused first
        self._holds: dict[str, set[Hold]] = {}

    def get(self, content: str, num_tokens: int) -> PictureRows | None:
        """Look up an output of `num_tokens` rows, and mark it as used last."""
        found = self._outputs.get(content)
        if found is None or len(found.embeds_PH) != num_tokens:
            return None
        self._outputs.move_to_end(content)
        return found

    def put(self, content: str, rows: PictureRows) -> None:
        """Keep an output, in the place of the longest unused ones."""
        num_places = len(rows.embeds_PH)
        for each in list(self._outputs):
            if self._num_free >= num_places and each != content:
                break
            if not self._holds.get(each):
                self._num_free += len(self._outputs.pop(each).embeds_PH)
        self._num_free -= num_places
        self._outputs[content] = rows

    def hold(self, content: str, hold: Hold) -> None:
        """Keep an output, which may not be there yet, until this claim is let go."""
        self._holds.setdefault(content, set()).add(hold)

    def is_held(self, content: str) -> bool:
        """Whether a sequence has a claim on an output, which may not be there yet."""
        return content in self._holds

    def let_go(self, content: str, hold: Hold) -> None:
        """Give up a claim, if there is such a one."""
        holds = self._holds.get(content, set())
        holds.discard(hold)
        if not holds:
            self._holds.pop(content, None)
