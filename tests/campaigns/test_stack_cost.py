"""Cost of serving beside the model, measured on a real server."""

import pytest

from bench.load.client import Endpoint
from campaigns.servers.running import ROOT
from campaigns.stack_cost import measure

pytestmark = pytest.mark.night


def test_the_time_of_both_processes_is_taken_while_requests_run() -> None:
    cost = measure(ROOT, Endpoint.COMPLETIONS, num_requests=64, seed=0, words=["--cpu-kernels", "off"])
    assert cost.num_requests == 64
    assert cost.num_tokens == 64 * 24
    assert 0.01 < cost.api_s < 30
    assert 0.01 < cost.engine_s < 60
    assert f"{cost.tokens_per_s:6.0f} output tokens/s" in str(cost)
