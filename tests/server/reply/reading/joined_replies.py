"""A reply as a client has it after joining the events."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from server.reply.reading.events import Arguments, CallStart, Content, Reasoning
from server.reply.reading.machine import ReplyReader


@dataclass
class JoinedReply:
    thoughts: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Names, and arguments as text."""


def joined_reply(reader: ReplyReader, pieces: Iterable[str], *, is_cut: bool = False) -> JoinedReply:
    reply = JoinedReply()
    for events in (*map(reader.feed, pieces), reader.finish(is_cut=is_cut)):
        for event in events:
            match event:
                case Reasoning():
                    reply.thoughts += event.text
                case Content():
                    reply.content += event.text
                case CallStart():
                    assert event.index == len(reply.calls)
                    reply.calls.append((event.name, ""))
                case Arguments():
                    name, arguments = reply.calls[event.index]
                    reply.calls[event.index] = (name, arguments + event.text)
    return reply
