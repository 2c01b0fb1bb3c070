"""Streams of one API process: a real server with a stand-in for its engine process."""

import pytest

from bench.load.client import Endpoint
from campaigns.api_throughput import cli
from campaigns.api_throughput.reader import Arrival, Readings
from campaigns.api_throughput.result import Steps, summarize
from campaigns.servers.running import ROOT

pytestmark = pytest.mark.night


def test_every_token_of_every_stream_arrives_at_the_pace_of_the_stand_in() -> None:
    result = cli.measure(ROOT, Endpoint.CHAT, num_streams=8, rate=400, seconds=1)
    assert result.num_streams == 8
    assert result.num_lost == 0
    assert 20 < result.offered_per_s < 420
    assert result.delivered_per_s > 20
    assert result.tokens_per_chunk >= 1
    assert 0 < result.delays_s[0] <= result.delays_s[1] <= result.delays_s[2] < 5
    assert 0 < result.api_s_per_token < 0.1


def test_a_token_is_as_late_as_the_read_that_brings_it_after_its_own_step() -> None:
    readings = Readings(
        streams=[[Arrival(1.5, 2, 1), Arrival(4.0, 6, 1)], [Arrival(1.5, 2, 1), Arrival(2.5, 4, 2)]],
        ended_s=4.0,
        processor_s=3.014,
    )
    result = summarize(readings, Steps(sent_s=[1.0, 2.0, 3.0, 3.5], processor_s=3.0), chars_per_token=2)
    assert result.delays_s == (0.5, 2.0, 2.0)  # of 0.5, 2.0, 1.0, 0.5 and 0.5, 0.5, -0.5
    assert result.num_lost == 1
    assert result.delivered_per_s == 7 / 3
    assert result.tokens_per_chunk == 7 / 5
    assert result.api_s_per_token == pytest.approx(0.002)


def test_a_server_that_does_not_start_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--streams", "1", "--rates", "10", "--args=--no-such-option"]) == 1
    assert "the server ended with status" in capsys.readouterr().err


def test_rates_are_numbers() -> None:
    with pytest.raises(SystemExit):
        cli.main(["--rates", "0"])
