"""Limits that contradict each other are told at once."""

import pytest

from tests.world import small_config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1"),
        ({"max_num_seqs": 17}, "every running sequence needs a token"),
        ({"priority_aging_s": 0.0}, "priority_aging_s must be above 0"),
        ({"target_itl_s": -1.0}, "target_itl_s must be above 0"),
        ({"least_prefill_share": 0.5, "large_crowd_prefill_share": 0.4}, "at most large_crowd_prefill_share"),
        ({"least_prefill_share": 0.5, "large_crowd_prefill_share": 0.0}, "at most large_crowd_prefill_share"),
        ({"large_crowd_prefill_share": 1.0}, "both below 1"),
        ({"uncrowded_itl_s": -1.0}, "uncrowded_itl_s must be at least 0"),
        ({"num_stages": 3, "max_plans_in_flight": 2}, "max_plans_in_flight must be at least num_stages"),
        ({"max_bypasses": -1}, "max_bypasses must be at least 0"),
        ({"prefill_delay_factor": -0.1}, "prefill_delay_factor must be at least 0"),
        ({"tenant_weights": (("a", 0.0),)}, "weight of a tenant"),
        ({"watermark": 1.0}, "watermark"),
    ],
)
def test_a_wrong_limit_is_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        small_config(**changes)
