"""Several generations as one stream, in the order in which their outputs come.

Owns: that one failure, or the reader's leaving, closes all of them.
Never: what is in an output.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from engine.types import TokenOutput
from server.edge.http.edge import NumberedOutputs

Outputs = AsyncGenerator[TokenOutput, None]


@dataclass(frozen=True, slots=True)
class _End:
    """A generation is over; with the error if it did not end by itself."""

    error: Exception | None = None


async def merged(generations: Sequence[Outputs]) -> NumberedOutputs:
    """Yield each output with the place of its generation. Closing this closes every generation.

    Raises the first error of any generation, after the others were closed.
    """
    if len(generations) == 1:
        async with aclosing(generations[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    # One place each: a slow reader stops the pumps, and the engine then merges outputs on its side.
    queue: asyncio.Queue[tuple[int, TokenOutput] | _End] = asyncio.Queue(maxsize=len(generations))
    pumps = [asyncio.create_task(_pump(i, outputs, queue)) for i, outputs in enumerate(generations)]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
                continue
            if item.error is not None:
                raise item.error
            num_open -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, outputs: Outputs, queue: asyncio.Queue[tuple[int, TokenOutput] | _End]) -> None:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                await queue.put((index, output))
    except Exception as error:  # noqa: BLE001 -- carried to the reader, who raises it
        await queue.put(_End(error))
    else:
        await queue.put(_End())
