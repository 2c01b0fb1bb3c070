"""Work that no client waits for: batches, and responses in the background.

Owns: how much of it runs at once, and its end when the server stops.
"""

import asyncio

from fastapi import FastAPI

from engine.options.engine_config import EngineConfig
from server.api.batches.access import StateAccess
from server.api.batches.app_client import AppClient
from server.api.batches.queue import BatchQueue
from server.api.responses.background import BackgroundResponses
from server.api.responses.kept_responses import go_on
from server.edge.http.edge import Edge


async def work_unwatched(app: FastAPI, config: EngineConfig, stopping: asyncio.Event) -> None:
    """Work on batches and responses of the background until the server stops."""
    # Without priorities nothing yields: then a few at a time.
    num_seqs = config.scheduler.max_num_seqs
    yields = config.scheduler.policy.value == "priority"
    num_places = num_seqs if yields else max(1, num_seqs // 4)
    background: BackgroundResponses = app.state.background
    background.places.num_places = num_places
    desk: StateAccess = app.state.desk
    if not desk.is_open:
        return
    edge: Edge = app.state.edge
    queue = BatchQueue(
        desk,
        lambda owner: AppClient(app, owner=owner),
        background.places,
        count_fault=edge.metrics.count_background_fault,
    )
    # Neither ends by a fault: each takes what goes wrong with one batch or response as the end of that.
    working = [asyncio.create_task(queue.run()), asyncio.create_task(go_on(app))]
    try:
        await stopping.wait()
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    await background.leave_to_next_start()
