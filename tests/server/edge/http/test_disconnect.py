"""Work goes on while the client is there, and not a moment longer."""

import asyncio
import contextlib
import gc
import weakref

import pytest
from starlette.requests import ClientDisconnect

from server.edge.http.disconnect import while_connected


async def never():
    await asyncio.Event().wait()


async def hang_up():
    return {"type": "http.disconnect"}


async def test_the_result_of_the_work_is_returned():
    async def work():
        return 5

    assert await while_connected(never, work()) == 5


async def test_the_work_is_done_by_the_task_of_the_request():
    async def work():
        await asyncio.sleep(0)
        return asyncio.current_task()

    assert await while_connected(never, work()) is asyncio.current_task()


async def test_a_hang_up_at_the_end_of_the_work_cancels_nothing_behind_it():
    has_left = asyncio.Event()

    async def receive():
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def work():
        await asyncio.sleep(0.01)
        has_left.set()
        return 5

    assert await while_connected(receive, work()) == 5
    await asyncio.sleep(0.01)
    assert asyncio.current_task().cancelling() == 0


async def test_a_request_goes_on_behind_a_hang_up_as_if_nothing_had_cancelled_it():
    with pytest.raises(ClientDisconnect):
        await while_connected(hang_up, never())
    assert asyncio.current_task().cancelling() == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await never()


async def test_an_error_of_the_work_is_raised():
    async def work():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await while_connected(never, work())


async def test_an_error_and_what_its_work_has_used_are_freed_without_the_collector():
    class Used:
        pass

    async def work():
        used = Used()
        seen.append(weakref.ref(used))
        raise KeyError("x")

    seen: list[weakref.ref] = []
    gc.disable()
    try:
        with contextlib.suppress(KeyError):
            await while_connected(never, work())
        await asyncio.sleep(0)
        assert seen[0]() is None
    finally:
        gc.enable()


async def test_a_hang_up_is_reported_only_after_the_work_has_cleaned_up():
    steps = []

    async def work():
        try:
            await never()
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    with pytest.raises(ClientDisconnect):
        await while_connected(hang_up, work())
    assert steps == ["cleaned up"]


async def test_whoever_cancels_the_request_cancels_the_work():
    steps = []

    async def work():
        try:
            await never()
        finally:
            steps.append("cleaned up")

    request = asyncio.create_task(while_connected(never, work()))
    await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert steps == ["cleaned up"]


async def test_a_body_that_ends_in_an_error_is_a_hang_up():
    async def receive():
        raise ValueError

    with pytest.raises(ClientDisconnect):
        await while_connected(receive, never())


async def test_late_pieces_of_a_body_are_no_hang_up():
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b""}]

    async def receive():
        await asyncio.sleep(0.005)
        return messages.pop()

    with pytest.raises(ClientDisconnect):
        await while_connected(receive, never())
    assert messages == []
