"""--speculative-config: what is understood, and what is refused by name."""

import pytest

from engine.options.engine_config import resolve
from engine.options.option_declaration import OptionError
from engine.options.options import Options
from engine.options.speculation_option import SpeculationOptions, speculation_config
from worker.worker_config import DraftMethod, SpeculationConfig


def test_without_it_only_predictions_are_drafted() -> None:
    assert speculation_config(SpeculationOptions()).method is DraftMethod.PREDICTION


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
    assert speculation_config(SpeculationOptions(speculative_config=text)) == expected


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
        speculation_config(SpeculationOptions(speculative_config=text))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "with --tensor-parallel-size 2: ranks verify no drafts"),
        ({"pipeline_parallel_size": 2}, "with --pipeline-parallel-size 2: ranks verify no drafts"),
        ({"device": "cuda"}, "with --device cuda: the steps of a GPU verify no drafts"),
        ({"device": "cuda:1"}, "with --device cuda:1: the steps of a GPU verify no drafts"),
    ],
)
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_that_verify_no_drafts_are_refused_before_a_model_is_loaded(
    options: dict, named: str, method: str
) -> None:
    resolve(Options(**options))
    text = f'{{"method": "{method}"}}'
    with pytest.raises(OptionError, match=f"--speculative-config {named}"):
        resolve(Options(speculative_config=text, **options))


def test_several_engines_get_it_each() -> None:
    engine, _ = resolve(
        Options(speculative_config='{"method": "suffix"}', data_parallel_size=2, device="cpu")
    )
    assert engine.num_engines == 2
    assert engine.worker.speculation.method is DraftMethod.SUFFIX
