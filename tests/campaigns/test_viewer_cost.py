"""Cost of a viewer, measured on a real server."""

import asyncio

import pytest

from campaigns.servers.own_server import own_server
from campaigns.viewer_cost import at_rest, busy

pytestmark = pytest.mark.night


def test_the_time_of_both_processes_is_taken_with_and_without_a_viewer() -> None:
    with own_server(["--cpu-kernels", "off"]) as server:
        alone = asyncio.run(busy(server, viewers=0, num_requests=64, output_len=24))
        watched = asyncio.run(busy(server, viewers=1, num_requests=64, output_len=24))
        resting = asyncio.run(at_rest(server, viewers=1, seconds=3.0))
    assert alone.num_views == 0 < watched.num_views
    assert resting.num_views >= 1
    for spell in (alone, watched):
        assert 0.01 < spell.api_s < 30
        assert 0.01 < spell.engine_s < 60
