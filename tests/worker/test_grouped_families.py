"""Families whose layers keep different things: what befalls their sequences changes no token.

Each goes through a few histories that cover the pairs of: shares that are cut, batches, both kinds of
preemption, prefixes that are found, drafts that are right or wrong, and two sequences of one prompt.
"""

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from scheduler.cache_groups import most_blocks
from scheduler.config import PreemptionMode, SchedulerConfig
from scheduler.messages import SamplingParams, SequenceId
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.families import MATRIX, Family
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.family_formats import OPEN, build, likeliest
from tests.worker.family_trial import tiny_config
from tests.worker.speculation.speculated import NO_GUESS, Guess, Speculated, half_right, oracle
from worker.checkpoint.task_choice import generating_class
from worker.load import build as loading
from worker.model import layer_shards
from worker.worker import Worker
from worker.worker_config import ModelFacts

pytestmark = [pytest.mark.night, pytest.mark.filterwarnings("ignore::FutureWarning")]

NUM_TOKENS = 12
_SYSTEM = [(7 * index + 3) % 300 for index in range(25)]
PROMPTS = (
    [*_SYSTEM, 5, 9],
    [*_SYSTEM, 6, 7, 8, 11],
    [(11 * index + 5) % 300 for index in range(11)],
    [(13 * index + 1) % 300 for index in range(38)],
)
"""Longer than the windows of 12 tokens and the chunks of 8, but for one."""
ORDER = (0, 0, 3, 1, 2, 2, 1, 0)
"""Requests: two of one prompt at once, some that begin alike, and all again once others have come between."""
GROUPED = (
    *("gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "llama4_text", "mimo_v2_flash"),
    *("deepseek_v3", "longcat_flash", "deepseek_v32", "glm_moe_dsa", "hy_v4", "minimax_m3_vl_text"),
)
"""A family for each way of keeping: windows, shared and unlike layers, sinks, chunks, latents once and twice
in a layer, choices of keys of each layer and of an earlier one."""
FAMILIES = {family.model_type: family for family in MATRIX if family.model_type in GROUPED}


def undisturbed(folder: Path, family: Family, answers: list[list[int]]) -> list[list[int]]:
    """Cut each prompt's answer where the best token of transformers is no longer clearly the best.

    Raises AssertionError for a token that is clearly not it.
    """
    model = generating_class(tiny_config(family)).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    sure = likeliest(model.eval(), answers, PROMPTS, least_gap=OPEN)
    assert [tokens[: len(each)] for tokens, each in zip(answers, sure, strict=True)] == sure
    return sure


@pytest.mark.parametrize("name", GROUPED)
def test_tokens_are_those_of_the_model_whatever_befalls_their_sequence(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    build(tiny_config(family)).save_pretrained(tmp_path)
    worker, facts = load_worker(tmp_path, max_model_len=64, num_blocks=400, swap_space_bytes=1 << 20)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    requests = [(PROMPTS[number], greedy) for number in ORDER]
    longest, random = len(PROMPTS[3]) + NUM_TOKENS, Random(4)
    sizes = {"block_size": facts.block_size, "num_step_tokens": 16}
    few = most_blocks(facts.groups, longest, **sizes) * 5 // 4

    def serve(guess: Guess, **changes: Any) -> Speculated:
        world = Speculated(worker, facts, {"max_num_batched_tokens": 16, **changes})
        answers = [tokens for tokens, _, _ in world.answers(requests, guess)]
        if not expected:
            by_prompt = dict(zip(ORDER, answers, strict=True))
            expected.extend(undisturbed(tmp_path, family, [by_prompt[each] for each in range(len(PROMPTS))]))
            everything.extend(answers)
        for number, tokens in zip(ORDER, answers, strict=True):
            sure = expected[number]
            assert tokens[: len(sure)] == sure, f"prompt {number}"
            assert len(tokens) == NUM_TOKENS
        return world

    expected: list[list[int]] = []
    everything: list[list[int]] = []
    assert serve(NO_GUESS, max_num_batched_tokens=128, max_num_seqs=2).num_found > 0
    assert sum(map(len, expected)) > 2 * NUM_TOKENS, "most tokens are sure"
    right = oracle([(tokens, [], None) for tokens in everything], 4)
    wrong = half_right([(tokens, [], None) for tokens in everything], random, facts.vocab_size)
    assert serve(wrong, num_blocks=few, preemption_mode=PreemptionMode.SWAP).num_preemptions > 0
    world = serve(wrong, num_blocks=few, preemption_mode=PreemptionMode.RECOMPUTE, num_host_blocks=0)
    assert world.num_preemptions > 0
    world = serve(right, max_num_seqs=3)
    assert world.num_accepted > 0
    assert world.num_found > 0


LONG_SHAPES: dict[str, tuple[dict[str, Any], int, int, float]] = {
    "gemma3_text": (
        {
            "num_hidden_layers": 19,
            "max_position_embeddings": 2048,
            "layer_types": ["full_attention" if each % 6 == 5 else "sliding_attention" for each in range(19)],
            "sliding_window": 64,
            "num_key_value_heads": 1,
        },
        *(2048, 2, 5.0),
    ),
    "gpt_oss": (
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 2,
            "num_key_value_heads": 1,
        },
        *(512, 10, 1.9),
    ),
    "deepseek_v3": (
        {
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        *(64, 1, 60.0),
    ),
}
"""Layers, windows by length, and heads in the proportions of Gemma 3 27B, gpt-oss-20b and DeepSeek V3 at 32k
tokens; that length, as many sequences as fitted before, and how many times as many are to fit now."""


def keeps(worker: Worker, facts: ModelFacts, length: int, num_sequences: int) -> bool:
    """Serve prompts one after another, and all again: whether each is found, and gives the same tokens."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=64,
            watermark=0.0,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            max_model_len=facts.max_model_len,
            groups=facts.groups,
        )
    )

    def serve(number: int, prompt: list[int]) -> tuple[int, tuple[int, ...]]:
        params = SamplingParams(max_tokens=2, temperature=0.0)
        seq, starts = Sequence(SequenceId(number), tuple(prompt), params), []
        scheduler.add_request(seq, now_s=0.0)
        while scheduler.has_unfinished_requests:
            plan = scheduler.schedule(now_s=0.0)
            starts += [share.start for share in plan.scheduled]
            scheduler.update_from_output(plan, worker.launch(plan).result())
        return starts[0], tuple(seq.token_ids[len(prompt) :])

    prompts = [
        [3 + (place * 7 + place // 40 + number * 31) % 300 for place in range(length - 2)]
        for number in range(num_sequences)
    ]
    first = [serve(number, prompt) for number, prompt in enumerate(prompts)]
    again = [serve(num_sequences + number, prompt) for number, prompt in enumerate(prompts)]
    assert [tokens for _, tokens in first] == [tokens for _, tokens in again]
    return all(start >= length - 3 * BLOCK_SIZE for start, _ in again)


@pytest.mark.parametrize("name", LONG_SHAPES)
def test_the_same_memory_keeps_many_more_sequences(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against blocks of all layers and expanded keys, in the same bytes."""
    changes, length, num_before, factor = LONG_SHAPES[name]
    family = replace(FAMILIES[name], settings={**FAMILIES[name].settings, **changes})
    build(tiny_config(family)).save_pretrained(tmp_path)
    options = {"max_model_len": length, "max_num_batched_tokens": 64, "max_num_seqs": 64}
    with monkeypatch.context() as patch:
        patch.setattr(layer_shards, "grouped", lambda layout, _: layout)
        patch.setattr(loading, "keep_latents", lambda _: None)
        _, before = load_worker(tmp_path, num_blocks=num_before * length // BLOCK_SIZE, **options)
    worker, facts = load_worker(tmp_path, kv_cache_bytes=before.kv_cache_bytes, **options)
    assert facts.kv_cache_bytes <= before.kv_cache_bytes
    assert keeps(worker, facts, length, math.ceil(factor * num_before))
