"""A process that renders chats: `python -m engine.text.template_process`, with a socket as standard input.

Owns: its limits on memory and time, which the kernel keeps whatever the template does.
Never: opens a file of the checkpoint, or goes on once memory has run out.

Chat templates are programs from strangers. No list of the operations that make a value grow is
complete: filters with a width, products of numbers, lists of lists that are printed. So all are allowed, and
the kernel limits the process.
"""

import math
import os
import resource
import signal
import socket

from engine.errors import RequestRejected
from engine.processes.child_process import leave_signals_to_parent
from engine.processes.frames import frame
from engine.text.template_language import BrokenTemplate, Templates
from engine.text.template_messages import (
    CODE_OUT_OF_MEMORY,
    MAX_MEMORY_BYTES,
    MAX_RENDERING_S,
    Chat,
    Ended,
    Program,
    Rendering,
    receive,
)

_ORPHAN_S = 5.0
"""Time beyond the limit after which the kernel ends the process, should its parent not have done so."""
_MAX_MESSAGE_BYTES = 2**31


def main() -> None:
    """Answer messages until the socket is closed."""
    leave_signals_to_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, allowed = resource.getrlimit(resource.RLIMIT_DATA)  # the operator's `ulimit -d` may be lower
    most = MAX_MEMORY_BYTES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = socket.socket(fileno=os.dup(0))
    try:
        _serve(channel)
    except Ended:
        return  # the server has
    except MemoryError:
        os._exit(CODE_OUT_OF_MEMORY)  # at once: whatever still runs may need more


def _serve(channel: socket.socket) -> None:
    """Raises Ended, MemoryError."""
    program = receive(channel, Program, max_bytes=_MAX_MESSAGE_BYTES, deadline_s=math.inf)
    try:
        templates = Templates(program)
    except BrokenTemplate as error:
        _answer(channel, Rendering(refusal=_sendable(str(error))))
        return
    _answer(channel, Rendering(variables=sorted(templates.variables)))
    while True:
        chat = receive(channel, Chat, max_bytes=_MAX_MESSAGE_BYTES, deadline_s=math.inf)
        signal.setitimer(signal.ITIMER_REAL, MAX_RENDERING_S + _ORPHAN_S)
        rendering = _render(templates, chat)
        del chat
        _answer(channel, rendering)
        del rendering
        signal.setitimer(signal.ITIMER_REAL, 0)


def _render(templates: Templates, chat: Chat) -> Rendering:
    try:
        text = templates.render(chat)
    except RequestRejected as error:
        return Rendering(refusal=_sendable(str(error)), param=error.param or "")
    return Rendering(text=text.encode("utf-8", "surrogatepass"), merged_for=templates.merged_for)


def _sendable(refusal: str) -> str:
    """Put a question mark for each half of a surrogate pair: arguments of calls may hold one, UTF-8 none."""
    return refusal.encode("utf-8", "replace").decode()


def _answer(channel: socket.socket, rendering: Rendering) -> None:
    channel.settimeout(None)
    try:
        channel.sendall(frame(rendering))
    except ConnectionError as error:
        raise Ended from error


if __name__ == "__main__":
    main()
