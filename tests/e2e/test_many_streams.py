"""256 streams at a time, more than the KV cache holds: each brings what it brings alone, piece by piece."""

import asyncio

import pytest

from campaigns.servers.own_server import own_server, total
from campaigns.soak.run import CROWDED
from campaigns.soak.streams import ManyStreams

pytestmark = pytest.mark.night

NUM_STREAMS = 256
DURATION_S = 1.0


def test_256_streams_lose_repeat_and_mix_up_nothing() -> None:
    with own_server(("--max-num-seqs", str(NUM_STREAMS), "--num-threads", "1", *CROWDED)) as server:
        streams = ManyStreams(server.target, num_streams=NUM_STREAMS, num_tokens=(8, 60))
        tally = asyncio.run(streams.run(DURATION_S))
        metrics = asyncio.run(server.metrics())
    assert not tally.faults, tally
    assert tally.num_streams >= NUM_STREAMS
    assert tally.most_open == NUM_STREAMS
    assert total(metrics, "tokenyard:num_preemptions_total") > 0, (
        "the cache was large enough: make it smaller"
    )
