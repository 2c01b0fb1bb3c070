"""Forecast of starts, beside a queue whose servers, arrivals and priorities are known."""

import heapq
import random

import pytest

from scheduler.routing.start_forecast import StartForecast

NUM_SEATS = 8
NEAR = 1.5
"""Factor within which a forecast is true."""


class Queue:
    """Seats that take a second on average each, and a line in order of priority, then of arrival."""

    def __init__(self, seed: int, *, num_priorities: int, load: float) -> None:
        self._dice, self._load = random.Random(seed), load
        self._num_priorities = num_priorities
        self._forecast = StartForecast(has_priorities=num_priorities > 1)
        self._waiting: list[tuple[int, int, float, float | None, float]] = []
        self._ends: list[float] = []
        self.judged: list[tuple[float, float, float]] = []
        """Forecasts, forecasts by the true rates, and the waits that came, in seconds."""

    def run(self, num_arrivals: int) -> None:
        """Run until the last arrival: without arrivals the pace would be another."""
        now_s = 0.0
        for number in range(num_arrivals):
            now_s += self._dice.expovariate(self._load * NUM_SEATS)
            while self._ends and self._ends[0] < now_s:
                self._start(heapq.heappop(self._ends))
            self._arrive(number, now_s)

    def _arrive(self, number: int, now_s: float) -> None:
        priority = self._dice.randrange(self._num_priorities)
        num_ahead = sum(each[0] <= priority for each in self._waiting)
        self._forecast.note_arrival(priority, now_s=now_s)
        is_full = len(self._ends) == NUM_SEATS
        expected_s = self._forecast.expected_s(num_ahead, priority, now_s=now_s) if is_full else None
        left = 1 - self._load * priority / self._num_priorities
        informed_s = (num_ahead + 1) / NUM_SEATS / max(left, 0.1)
        heapq.heappush(self._waiting, (priority, number, now_s, expected_s, informed_s))
        self._start(now_s)

    def _start(self, now_s: float) -> None:
        while self._waiting and len(self._ends) < NUM_SEATS:
            *_, arrived_s, expected_s, informed_s = heapq.heappop(self._waiting)
            heapq.heappush(self._ends, now_s + self._dice.uniform(0.3, 1.7))
            self._forecast.note_start(num_waiting=len(self._waiting), now_s=now_s)
            if expected_s is not None and now_s - arrived_s > 0.5:
                self.judged.append((expected_s, informed_s, now_s - arrived_s))

    def shares_near(self) -> tuple[float, float]:
        """Shares of both forecasts that are within a factor of the truth."""
        ours, informed = (
            sum(1 / NEAR < each[which] / each[2] < NEAR for each in self.judged) for which in (0, 1)
        )
        return ours / len(self.judged), informed / len(self.judged)


@pytest.mark.parametrize("load", [0.95, 1.2, 2.0])
def test_in_one_line_nine_of_ten_forecasts_are_near(load: float) -> None:
    queue = Queue(1, num_priorities=1, load=load)
    queue.run(4000)
    assert queue.shares_near()[0] > 0.9


@pytest.mark.parametrize("load", [0.9, 0.97, 1.1])
def test_with_three_priorities_few_more_would_be_near_by_the_true_rates(load: float) -> None:
    """Waits differ by chance, and most where they are short."""
    queue = Queue(1, num_priorities=3, load=load)
    queue.run(8000)
    ours, informed = queue.shares_near()
    assert ours > informed - 0.1


def test_a_burst_that_finds_free_places_is_no_pace() -> None:
    forecast = StartForecast(has_priorities=False)
    for number in range(8):
        forecast.note_start(num_waiting=7 - number, now_s=1.0)
    assert forecast.expected_s(3, 0, now_s=2.0) is None
    for second in range(2, 6):
        forecast.note_start(num_waiting=5, now_s=float(second))
    assert forecast.expected_s(3, 0, now_s=5.0) == pytest.approx(4.0, rel=0.01)


def test_a_start_that_is_late_makes_the_forecast_longer() -> None:
    forecast = StartForecast(has_priorities=False)
    for second in range(5):
        forecast.note_start(num_waiting=9, now_s=float(second))
    soon_s, late_s = (forecast.expected_s(0, 0, now_s=now_s) for now_s in (4.5, 60.0))
    assert soon_s is not None
    assert late_s is not None
    assert late_s > 10 * soon_s


def test_one_that_is_passed_by_all_still_has_a_forecast() -> None:
    forecast = StartForecast(has_priorities=True)
    for second in range(1, 50):
        for _ in range(3):
            forecast.note_arrival(0, now_s=float(second))
        forecast.note_start(num_waiting=3, now_s=float(second))
    assert forecast.expected_s(9, 5, now_s=50.0) == pytest.approx(100.0, rel=0.1)
    assert forecast.expected_s(9, 0, now_s=50.0) == pytest.approx(10.0, rel=0.1)


def test_only_the_last_gaps_between_starts_count_however_many_there_were() -> None:
    """A forecast that saw no others says the same."""
    old, young = (StartForecast(has_priorities=False) for _ in range(2))
    dice, now_s = random.Random(1), 0.0
    for number in range(3000):
        now_s += dice.choice([0.0, 0.1, 2.5])
        old.note_start(num_waiting=9, now_s=now_s)
        if number >= 2000:
            young.note_start(num_waiting=9, now_s=now_s)
    assert old.expected_s(7, 0, now_s=now_s) == pytest.approx(young.expected_s(7, 0, now_s=now_s))
    gaps = old._gaps
    assert old._num_starts == sum(num for _, num in gaps)
    assert old._sum_s == pytest.approx(sum(gap_s for gap_s, _ in gaps))
