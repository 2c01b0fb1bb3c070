"""The names of requests for the log of the engine process."""

from collections.abc import Iterable

from engine.process_messages import AddRequest
from scheduler.messages import SequenceId

_MIN_ROOM = 1024
_MAX_NAMES_IN_A_LINE = 8
_NO_ID = "(no id)"
_TRACE = " (trace "


class RequestNames:
    """Request names by sequence, read after errors. Ended sequences go when there is no more room."""

    def __init__(self, *, room: int = _MIN_ROOM) -> None:
        self._names: dict[SequenceId, str] = {}
        self._min_room = self._room = room

    @property
    def is_full(self) -> bool:
        """Whether `keep` is due."""
        return len(self._names) >= self._room

    def keep(self, live_ids: Iterable[SequenceId]) -> None:
        """Forget all other sequences, and allow for twice as many as are left."""
        self._names = {each: self._names[each] for each in live_ids if each in self._names}
        self._room = max(self._min_room, 2 * len(self._names))

    def add(self, request: AddRequest) -> None:
        name = request.request_id or _NO_ID
        if request.trace_id:
            name += f"{_TRACE}{request.trace_id})"
        self._names.update(dict.fromkeys(request.sequence_ids, name))

    def request_id_of(self, sequence_id: SequenceId) -> str:
        """Return the request's id alone; empty if it has none."""
        name = self._names.get(sequence_id, _NO_ID)
        return "" if name == _NO_ID else name.partition(_TRACE)[0]

    def of(self, sequence_ids: Iterable[SequenceId]) -> str:
        """List the names of some sequences for a line of the log, each name once."""
        names = list(dict.fromkeys(self._names.get(each, _NO_ID) for each in sequence_ids))
        more = f" and {len(names) - _MAX_NAMES_IN_A_LINE} more" if len(names) > _MAX_NAMES_IN_A_LINE else ""
        return ", ".join(names[:_MAX_NAMES_IN_A_LINE]) + more
