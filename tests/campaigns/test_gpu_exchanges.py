"""Ranks of `python -m campaigns.gpu.exchanges`, tried out without a GPU."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from campaigns.gpu import exchanges
from campaigns.gpu.exchanges import RankFailed

WAIT_FOR_EVER = (sys.executable, "-c", "import signal; signal.pause()")


def test_a_process_leaves_its_ranks_and_may_meet_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gloo is in the place of NCCL."""
    begin = dist.init_process_group

    def begin_by_gloo(_: str, *, device_id: object, **options: Any) -> None:
        assert device_id is not None, "a GPU of its own"
        begin("gloo", **options)

    sums = torch.ones(2)
    monkeypatch.setattr(dist, "init_process_group", begin_by_gloo)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with exchanges._joined(tmp_path / name, "cuda:0", rank=0, num_ranks=1) as ranks:
            ranks.reduce(sums)
    assert sums.tolist() == [1, 1], "those of one rank"
    assert not dist.is_initialized()


def test_a_rank_that_fails_ends_the_one_that_waits_for_it() -> None:
    failing = (sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(RankFailed, match="3"):
        exchanges._outputs([WAIT_FOR_EVER, failing], within_s=3600)


def test_ranks_that_wait_for_each_other_for_ever_are_ended() -> None:
    with pytest.raises(RankFailed, match="have not ended"):
        exchanges._outputs([WAIT_FOR_EVER, WAIT_FOR_EVER], within_s=0)
