"""Views: none without a lease, bounded with one, and never more than a share of the time."""

from itertools import pairwise

import orjson

from engine.core.loop import EngineLoop
from engine.process_messages import EndSequences, Outputs, Shutdown, View, Watch
from scheduler.messages import FinishReason, SequenceId
from scheduler.scheduler import Scheduler
from tests.engine.core.test_loop import Desk, request
from tests.fakes import FakeWorker
from tests.world import small_config


class TickingDesk(Desk):
    """Each look at the clock takes a moment."""

    tick_s = 0.001

    def clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def views_of(desk: Desk) -> list[dict]:
    return [orjson.loads(message.document) for message in desk.sent if isinstance(message, View)]


def run(desk: TickingDesk, *letters: list, turns: int = 40, **changes: object) -> list[dict]:
    config = small_config(**changes)
    loop = EngineLoop(Scheduler(config), FakeWorker(config.block_size), desk, desk.clock)
    desk.letters.extend(letters)
    for _ in range(turns):
        loop.turn()
    return views_of(desk)


def test_without_a_viewer_no_view_is_made() -> None:
    desk = TickingDesk()
    assert run(desk, [request(1)]) == []
    assert any(isinstance(message, Outputs) for message in desk.sent)


def test_a_view_holds_the_steps_the_sequences_and_the_blocks() -> None:
    desk = TickingDesk()
    requests = [request(1, max_tokens=50), request(2, max_tokens=50)]
    views = run(desk, [Watch(lease_s=1e6)], requests, turns=90, num_blocks=40)
    steps = [step for view in views for step in view["steps"]]
    assert steps[0]["arrived"] == steps[0]["new"] == [1, 2]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    busy = next(view for view in views if view["running"])
    assert [sequence["sequence_id"] for sequence in busy["running"]] == [1, 2]
    assert sum(length for length, _, _ in busy["blocks"]) == busy["stats"]["num_blocks"] == 40
    assert {owner for _, _, owner in busy["blocks"]} >= {1, 2}


def test_a_block_of_two_sequences_is_marked_and_a_cached_one_too() -> None:
    desk = TickingDesk()
    desk.tick_s = 0.0
    views = run(
        desk, [Watch(lease_s=100.0)], [request(1, 2, max_tokens=6, prompt=list(range(8)))], turns=1000
    )
    uses = [{use for _, use, _ in view["blocks"]} for view in views]
    assert uses[0] == {0}
    assert uses[-1] == {0, 1}, "ended: its full blocks may be found again"


def test_a_lease_ends_and_a_new_one_begins_with_new_steps() -> None:
    desk = TickingDesk()
    views = run(desk, [Watch(lease_s=0.5)], [request(1, max_tokens=3)], turns=30)
    assert desk.now_s > 2.0
    assert views
    assert max(view["time_s"] for view in views) < 1.0


def test_an_expensive_view_is_followed_by_a_pause_a_hundred_times_as_long() -> None:
    desk = TickingDesk()
    desk.tick_s = 0.02
    views = run(desk, [Watch(lease_s=1e6)], [request(1, max_tokens=40)], turns=200)
    pauses = [after["time_s"] - before["time_s"] for before, after in pairwise(views)]
    assert min(pauses) >= 100 * desk.tick_s


def test_steps_beyond_the_room_of_a_view_are_counted() -> None:
    desk = TickingDesk()
    desk.tick_s = 1e-6
    views = run(
        desk,
        [Watch(lease_s=100.0)],
        [request(1, max_tokens=90, prompt=[1])],
        [],
        turns=150,
        max_model_len=100,
        num_blocks=40,
    )
    assert max(len(view["steps"]) for view in views) <= 64
    assert sum(len(view["steps"]) + view["num_dropped_steps"] for view in views) == 90


def test_an_abort_is_in_the_next_step() -> None:
    desk = TickingDesk()
    end = EndSequences(sequence_ids=(SequenceId(2),), reason=FinishReason.ABORTED)
    views = run(
        desk,
        [Watch(lease_s=100.0)],
        [request(1, max_tokens=20), request(2, max_tokens=20)],
        [],
        [end],
        [],
    )
    assert [step["ended"] for view in views for step in view["steps"] if step["ended"]] == [[2]]


def test_the_loop_still_ends() -> None:
    desk = TickingDesk()
    config = small_config()
    desk.letters.extend([[Watch(lease_s=1.0)], [Shutdown()]])
    EngineLoop(Scheduler(config), FakeWorker(config.block_size), desk, desk.clock).run()
