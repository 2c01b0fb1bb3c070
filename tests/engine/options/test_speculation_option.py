"""--speculative-config: what is understood, and what is refused by name."""

import pytest

from engine.options.option_declaration import OptionError
from engine.options.speculation_option import speculation_config
from worker.worker_config import DraftMethod, SpeculationConfig


def test_without_it_only_predictions_are_drafted() -> None:
    assert speculation_config(None).method is DraftMethod.PREDICTION


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"method": "ngram"}', SpeculationConfig(method=DraftMethod.NGRAM)),
        (
            '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}',
            SpeculationConfig(
                method=DraftMethod.NGRAM, num_speculative_tokens=5, prompt_lookup_min=2, prompt_lookup_max=4
            ),
        ),
        (
            '{"method": "suffix", "prompt_lookup_min": 7}',
            SpeculationConfig(method=DraftMethod.SUFFIX, prompt_lookup_min=7, prompt_lookup_max=7),
        ),
    ],
)
def test_numbers_and_methods_are_taken_over(text: str, expected: SpeculationConfig) -> None:
    assert speculation_config(text) == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ngram", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("{}", '"method": null'),
        ('{"method": "eagle3"}', '"method": "eagle3"'),
        ('{"method": "draft_model", "model": "small"}', '"model": "small"'),
        ('{"method": "ngram", "disable_by_batch_size": 4}', "'disable_by_batch_size'"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens must be"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "num_speculative_tokens must be"),
        ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}', "prompt_lookup_min is above"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(OptionError, match="--speculative-config") as refused:
        speculation_config(text)
    assert named in str(refused.value)
