"""Faults of a batch that a soak reports, each planted, and trouble that has an end."""

from pathlib import Path

import pytest

from campaigns.servers.own_server import OwnServer
from campaigns.soak import trouble
from campaigns.soak.lasting import fault_of_batch


def batch(status: str = "completed", *, completed: int = 2, failed: int = 1) -> dict:
    return {"status": status, "errors": None, "request_counts": {"completed": completed, "failed": failed}}


def test_a_batch_with_an_answer_for_each_line_has_none() -> None:
    assert fault_of_batch(batch(), "012", 3) == ""
    assert fault_of_batch(batch("cancelled", completed=1, failed=0), "1", 3) == ""


@pytest.mark.parametrize(
    ("found", "answers", "fault"),
    [
        (batch("failed"), "012", "failed None"),
        (batch(), "0122", "two answers"),
        (batch(completed=3), "0129", "an answer of no line"),
        (batch(completed=1), "01", "1 lines without an answer"),
        (batch(completed=1), "012", "counts"),
    ],
)
def test_what_is_lost_or_doubled_is_a_fault(found: dict, answers: str, fault: str) -> None:
    assert fault in fault_of_batch(found, answers, 3)


async def test_a_disk_that_cannot_be_filled_hides_no_later_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FULL_S", "_SETTLES_S"):
        monkeypatch.setattr(trouble, name, 0.0)
    server = OwnServer.__new__(OwnServer)  # not asked
    deeds = trouble.Trouble(server, seed=1, disk=tmp_path / "none", clock=tmp_path / "clock")
    await deeds._fill_disk()
    assert not deeds.is_under_way()
