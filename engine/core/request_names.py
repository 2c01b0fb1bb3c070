"""What the log of the engine process calls the requests that sequences belong to.

Owns: the map from sequences to the ids that clients and traces know.
Never: decides anything by it; sequences are all that the rest of the process knows.
"""

from collections.abc import Iterable

from engine.process_messages import AddRequest
from scheduler.messages import SequenceId

_MIN_ROOM = 1024
_MAX_NAMES_IN_A_LINE = 8


class RequestNames:
    """Asked only when something went wrong; ended sequences leave when there is no room for more."""

    def __init__(self, *, room: int = _MIN_ROOM) -> None:
        self._names: dict[SequenceId, str] = {}
        self._min_room = self._room = room

    @property
    def is_full(self) -> bool:
        """Time to say who is alive."""
        return len(self._names) >= self._room

    def keep(self, live_ids: Iterable[SequenceId]) -> None:
        """Forget all others. Called as rarely as the number of those who live allows."""
        self._names = {each: self._names[each] for each in live_ids if each in self._names}
        self._room = max(self._min_room, 2 * len(self._names))

    def add(self, request: AddRequest) -> None:
        """A request whose sequences arrive now."""
        name = request.request_id or "(no id)"
        if request.trace_id:
            name += f" (trace {request.trace_id})"
        self._names.update(dict.fromkeys(request.sequence_ids, name))

    def of(self, sequence_ids: Iterable[SequenceId]) -> str:
        """A few of them, for a line of the log; each once."""
        names = list(dict.fromkeys(self._names.get(each, "(no id)") for each in sequence_ids))
        more = f" and {len(names) - _MAX_NAMES_IN_A_LINE} more" if len(names) > _MAX_NAMES_IN_A_LINE else ""
        return ", ".join(names[:_MAX_NAMES_IN_A_LINE]) + more
