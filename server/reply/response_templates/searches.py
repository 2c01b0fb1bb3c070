"""A search for an expression in a text that comes character by character.

Owns: the first match, and the text that must be held back because it may become one; the account of steps.
Never: goes back in the text. A character costs as many steps as the ops that wait have ways on: at most the
square of the number of ops. All are counted.
Source: Pike's machine. All ways through the expression are followed side by side, in the order of preference.
"""

from dataclasses import dataclass

from server.reply.response_templates.expressions import DONE, AtEnd, SearchProgram, Take, Way

STEPS_A_CHARACTER = 64
MAX_SAVED_STEPS = 20_000
"""Some 10 to 20 ms: the longest time that a short piece of text may take."""
MAX_PROMPT_STEPS = 60_000
"""Steps in which the anchor is looked for in a prompt."""

_NOWHERE = -1


class TooManySteps(Exception):
    """The expressions of the template need more steps than a reply has."""


class SearchSteps:
    """Steps that the expressions of one reply may still take. Each character of the reply brings new ones."""

    def __init__(self, num_steps: int = MAX_SAVED_STEPS) -> None:
        self._left = num_steps

    def earn(self, num_characters: int) -> None:
        """Add the steps of new characters."""
        self._left = min(self._left + num_characters * STEPS_A_CHARACTER, MAX_SAVED_STEPS)

    def spend(self, num: int) -> None:
        """Raises TooManySteps."""
        self._left -= num
        if self._left < 0:
            raise TooManySteps


@dataclass(frozen=True, slots=True)
class Match:
    """A match, by places in the text: [start, end)."""

    start: int
    end: int
    groups: dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Thread:
    """One way through the expression. It waits at an op."""

    at: int
    start: int
    slots: tuple[int, ...]


class Search:
    """Finds the leftmost match; of several that begin there, the one that Python's search prefers."""

    def __init__(self, program: SearchProgram, steps: SearchSteps, *, not_empty_at: int = _NOWHERE) -> None:
        self._program = program
        self._steps = steps
        self._not_empty_at = not_empty_at
        self._threads: list[_Thread] = []
        self._found: Match | None = None
        """The best match so far; better ones are still under way."""
        self.match: Match | None = None

    @property
    def begins_at(self) -> int | None:
        """Place of the first character that a match under way would have."""
        return self._threads[0].start if self._threads else None

    def is_indifferent_to(self, char: str) -> bool:
        """Whether this character changes nothing, while nothing is under way and it is not the first."""
        return not self._program.is_nullable and not self._program.begins_with(char)

    def push(self, char: str, place: int) -> None:
        """Take in the character at `place`. Then there may be a match. Raises TooManySteps."""
        program = self._program
        if self.match is not None:
            return
        if self._found is None:
            if not self._threads and place and self.is_indifferent_to(char):
                return
            self._enter(place)
        threads, self._threads = self._threads, []
        self._steps.spend(1 + len(threads))
        seen: set[int] = set()
        for thread in threads:
            op = program.ops[thread.at]
            if not isinstance(op, Take) or not op.test(char):
                continue
            ways = program.behind[thread.at]
            if self._follow(ways, thread.start, thread.slots, place + 1, seen):
                break
        self._decide()

    def finish(self, place: int) -> None:
        """End the text at `place`."""
        if self.match is not None:
            return
        if self._found is None:
            self._enter(place)
        for thread in self._threads:
            if isinstance(self._program.ops[thread.at], AtEnd):
                is_empty = thread.start == place == self._not_empty_at
                saved = dict(self._program.behind[thread.at]).get(DONE)
                if saved is not None and not is_empty:
                    slots = _with(thread.slots, saved, place)
                    self._found = self._match(thread.start, place, slots)
                    break
        self._threads = []
        self._decide()

    def drop_before(self, place: int) -> None:
        """Give up matches under way that began before `place`."""
        self._threads = [thread for thread in self._threads if thread.start >= place]
        self._decide()

    def _enter(self, place: int) -> None:
        """Begin a match here, behind all that began before."""
        ways = self._program.later if place else self._program.first
        self._steps.spend(len(self._threads))
        seen = {thread.at for thread in self._threads}
        self._follow(ways, place, (_NOWHERE,) * (2 * len(self._program.names)), place, seen)

    def _follow(
        self, ways: tuple[Way, ...], start: int, slots: tuple[int, ...], place: int, seen: set[int]
    ) -> bool:
        """Add threads; True if one of the ways is a match, so that all that are less preferred end.

        Raises TooManySteps.
        """
        self._steps.spend(len(ways))
        for target, saved in ways:
            if target in seen:
                continue
            now = _with(slots, saved, place) if saved else slots
            if target != DONE:
                seen.add(target)
                self._threads.append(_Thread(target, start, now))
            elif start != place or place != self._not_empty_at:
                self._found = self._match(start, place, now)
                return True
        return False

    def _match(self, start: int, end: int, slots: tuple[int, ...]) -> Match:
        pairs = {name: (slots[2 * i], slots[2 * i + 1]) for i, name in enumerate(self._program.names)}
        return Match(start, end, {name: pair for name, pair in pairs.items() if _NOWHERE not in pair})

    def _decide(self) -> None:
        if not self._threads:
            self.match = self._found


class MatchCollector:
    """Finds all matches, one behind the other, in a text that comes in pieces. Keeps the text."""

    def __init__(self, program: SearchProgram, steps: SearchSteps) -> None:
        self._program = program
        self._steps = steps
        self._search = Search(program, steps)
        self._chars: list[str] = []
        self._place = 0
        self._found: list[Match] = []

    def add(self, text: str) -> None:
        """Raises TooManySteps."""
        self._chars += text
        self._read()

    def finish(self) -> list[Match]:
        """End the text. Raises TooManySteps."""
        while True:
            self._search.finish(self._place)
            if self._search.match is None:
                return self._found
            self._take()
            self._read()

    def text_of(self, match: Match, group: str) -> str:
        """Text of a group; empty if the match is without it."""
        begin, end = match.groups.get(group, (0, 0))
        return "".join(self._chars[begin:end])

    def _read(self) -> None:
        while self._place < len(self._chars):
            self._search.push(self._chars[self._place], self._place)
            self._place += 1
            self._take()

    def _take(self) -> None:
        """Take a match, and go on behind it."""
        match = self._search.match
        if match is None:
            return
        self._found.append(match)
        self._place = match.end
        empty_at = match.end if match.start == match.end else _NOWHERE
        self._search = Search(self._program, self._steps, not_empty_at=empty_at)


def all_matches(program: SearchProgram, text: str, steps: SearchSteps) -> list[Match]:
    """All matches in a text, one behind the other. Raises TooManySteps."""
    collector = MatchCollector(program, steps)
    collector.add(text)
    return collector.finish()


def _with(slots: tuple[int, ...], saved: tuple[int, ...], place: int) -> tuple[int, ...]:
    changed = list(slots)
    for slot in saved:
        changed[slot] = place
    return tuple(changed)
