"""A short soak; `python -m campaigns.soak --minutes 60` is the long one."""

import pytest

from campaigns.soak.acts import HUNG_UP
from campaigns.soak.run import soak

pytestmark = pytest.mark.night

MINUTES = 0.1


def test_after_a_mix_of_everything_and_the_death_of_the_engine_nothing_is_kept() -> None:
    run = soak(MINUTES, seed=1)
    assert not run.all_faults(), run.report()
    ends = run.ends.ends
    for name in ("chat", "completion", "grammar", "known text", "long prompt", "response", "tools"):
        assert ends[name]["served"], run.report()
    assert ends["hung up"][HUNG_UP]
    kinds = {life.name.rpartition(" ")[0] for life in run.lives}  # each has its process id behind it
    assert kinds >= {"server", "engine.core.process"}
