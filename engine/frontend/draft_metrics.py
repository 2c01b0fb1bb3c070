"""Counters of drafts, under our names and under those that dashboards for other servers read.

Owns: their names and labels.
Never: counts; the scheduler does, and its totals come with each beat.
"""

from prometheus_client import CollectorRegistry, Counter

from scheduler.messages import SchedulerStats

_TWIN = "vllm:spec_decode_num_"


class DraftMetrics:
    """Raises its counters by the differences between two beats."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = {"model_name": model_name, "engine": "0"}

        def counters(ours: str, twin: str, text: str) -> list[Counter]:
            own = Counter(f"tokenyard:{ours}", text, registry=registry)
            theirs = Counter(f"{_TWIN}{twin}", text, list(labels), registry=registry)
            return [own, theirs.labels(**labels)]

        self._shares = counters("verified_shares", "drafts", "Shares of steps that had drafts")
        self._drafts = counters("draft_tokens", "draft_tokens", "Guessed tokens that were verified")
        self._accepted = counters("accepted_draft_tokens", "accepted_tokens", "Of these, those that held")
        text = "Of these, by their place among the drafts of a share"
        self._labels = labels
        self._own_by_place = Counter(
            "tokenyard:accepted_draft_tokens_per_pos", text, ["position"], registry=registry
        )
        self._twin_by_place = Counter(
            f"{_TWIN}accepted_tokens_per_pos", text, [*labels, "position"], registry=registry
        )

    def beat(self, stats: SchedulerStats, last: SchedulerStats) -> None:
        """Take in the totals of a beat, and those of the one before."""
        _raise(self._shares, stats.num_verified_shares - last.num_verified_shares)
        _raise(self._drafts, stats.num_draft_tokens - last.num_draft_tokens)
        _raise(self._accepted, stats.num_accepted_tokens - last.num_accepted_tokens)
        before = last.num_accepted_by_place
        for place, num in enumerate(stats.num_accepted_by_place):
            since = num - (before[place] if place < len(before) else 0)
            self._own_by_place.labels(position=str(place)).inc(since)
            self._twin_by_place.labels(**self._labels, position=str(place)).inc(since)


def _raise(counters: list[Counter], num: int) -> None:
    for counter in counters:
        counter.inc(num)
