"""The client's hang-up, made into the cancellation of its work.

Owns: the only listener on a connection whose body has been read.
Never: the abort itself: cancelled work closes its generator, and closing aborts.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

ResultT = TypeVar("ResultT")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work` to its end, or cancel it as soon as the client leaves. Raises ClientDisconnect then.

    A server does not cancel a handler by itself: without this, the tokens of a client that left would be
    computed to the last.
    """
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left = not working.done()
        listening.cancel()
        working.cancel()
        # Wait for the clean-up: the engine must have heard of the abort before this request is over.
        await asyncio.gather(working, listening, return_exceptions=True)
    if left:
        raise ClientDisconnect
    try:
        return working.result()
    finally:
        # An error of it holds this frame, which holds it: a cycle with all that the request has used.
        del working


async def stay_connected() -> Message:
    """Wait for ever, in place of a client that cannot leave."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
