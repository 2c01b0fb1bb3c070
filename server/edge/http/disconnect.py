"""The client's hang-up, made into the cancellation of its work.

Owns: the only listener on a connection whose body has been read.
Never: the abort itself: cancelled work closes its generator, and closing aborts.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

ResultT = TypeVar("ResultT")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` to its end, or cancel it as soon as the client leaves. Raises ClientDisconnect then.

    A server does not cancel a handler by itself: without this, the tokens of a client that left would be
    computed to the last. The work has cleaned up before this ends: the engine must have heard of the abort
    before the request is over.
    """
    working = asyncio.current_task()
    assert working is not None
    has_left = False

    async def listen() -> None:
        nonlocal has_left
        with suppress(Exception):  # it is the request's fault, and no reply can say so any more
            while (await receive())["type"] != "http.disconnect":
                pass
        has_left = True
        working.cancel()

    listening = asyncio.create_task(listen())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and not working.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        listening.cancel()


async def stay_connected() -> Message:
    """Wait for ever, in place of a client that cannot leave."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")
