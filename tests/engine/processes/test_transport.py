"""The channels between the API process and the engine process."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.process_messages import Pulse
from engine.processes.transport import ClientSide, EngineSide


async def test_a_message_that_is_not_awaited_does_not_keep_the_event_loop_awake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop, num_calls = asyncio.get_running_loop(), 0
    add_reader = loop.add_reader

    def counting(descriptor: int, callback: Callable[..., Any]) -> None:
        def called() -> None:
            nonlocal num_calls
            num_calls += 1
            callback()

        add_reader(descriptor, called)

    monkeypatch.setattr(loop, "add_reader", counting)
    ours, theirs = ClientSide(tmp_path), EngineSide(tmp_path)
    try:
        for _ in range(3):
            theirs.send(Pulse())
        await asyncio.sleep(0.05)
        assert num_calls == 0
        for _ in range(3):
            assert await ours.receive() == Pulse()
        waiting = asyncio.create_task(ours.receive())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert num_calls < 10
        theirs.send(Pulse())
        assert await waiting == Pulse()
    finally:
        ours.close()
        theirs.close()
