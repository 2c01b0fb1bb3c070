"""A process that renders chats: `python -m engine.text.template_process`, with a socket as input and output.

Owns: its limits on memory and time, which the kernel keeps whatever the template does.
Never: opens a file of the checkpoint, or goes on once memory has run out.

Chat templates are programs from strangers. No list of the operations that make a value grow is
complete: filters with a width, products of numbers, lists of lists that are printed. So all are allowed, and
the kernel limits the process.
"""

import os
import resource
import signal
from typing import BinaryIO

from engine.errors import RequestRejected
from engine.processes.child_process import leave_signals_to_parent
from engine.processes.frames import answer, read_message, take_standard_output
from engine.text.template_language import BrokenTemplate, Templates
from engine.text.template_messages import (
    CODE_OUT_OF_MEMORY,
    MAX_MEMORY_BYTES,
    MAX_RENDERING_S,
    Chat,
    Program,
    Rendering,
)

_ORPHAN_S = 5.0
"""Time beyond the limit after which the kernel ends the process, should its parent not have done so."""


def main() -> None:
    """Answer messages until the socket is closed."""
    leave_signals_to_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _, allowed = resource.getrlimit(resource.RLIMIT_DATA)  # the operator's `ulimit -d` may be lower
    most = MAX_MEMORY_BYTES if allowed == resource.RLIM_INFINITY else min(allowed, MAX_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _serve(take_standard_output())
    except ConnectionError:
        return  # the server has ended
    except MemoryError:
        os._exit(CODE_OUT_OF_MEMORY)  # at once: whatever still runs may need more


def _serve(answers: BinaryIO) -> None:
    """Compile the program, then render each chat that comes. Raises ConnectionError, MemoryError."""
    program = read_message(Program)
    if program is None:
        return
    try:
        templates = Templates(program)
    except BrokenTemplate as error:
        answer(answers, Rendering(refusal=_sendable(str(error))))
        return
    answer(answers, Rendering(variables=sorted(templates.variables)))
    while (chat := read_message(Chat)) is not None:
        signal.setitimer(signal.ITIMER_REAL, MAX_RENDERING_S + _ORPHAN_S)
        rendering = _render(templates, chat)
        del chat
        answer(answers, rendering)
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


if __name__ == "__main__":
    main()
