"""Vectors and scores are those of transformers' own forward, however the prompts are batched and cut."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoModelForSequenceClassification

from scheduler.messages import (
    BlockId,
    ModelRunnerOutput,
    NewSequence,
    NewTable,
    PoolingParams,
    PoolingTask,
    PromptComputation,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceId,
)
from tests.checkpoints import make_checkpoint
from tests.pooling_checkpoints import ENCODERS, make_embedder, make_scorer, write_pooling_files
from tests.worker.conftest import BLOCK_SIZE, load_worker
from worker.cpu.attention import CpuAttention
from worker.pooling.encoder_pooling import cut_by_length
from worker.worker import Worker
from worker.worker_config import ModelFacts
from worker.worker_errors import StartupError

PROMPTS = [
    [(7 * index + 3) % 290 + 5 for index in range(29)],
    [40, 41, 42, 43, 44],
    [(11 * index + 5) % 290 + 5 for index in range(17)],
    [60],
]
PAIR, SECOND_START = [*range(20, 30), *range(100, 120)], 10
TOLERANCE = 2e-5
POISON = 299


class Pools:
    """Plans by hand over one worker; every block is used once."""

    def __init__(self, folder: Path, **options: Any) -> None:
        worker: Worker
        facts: ModelFacts
        worker, facts = load_worker(folder, **options)
        assert facts.pooling is not None
        self.worker, self.facts, self.pooling = worker, facts, facts.pooling
        self.next_block = 1
        self.next_id = 0

    def new(self, prompt: list[int], *, blocks: tuple[BlockId, ...] = (), **params: Any) -> NewSequence:
        self.next_id += 1
        num_more = -(-len(prompt) // BLOCK_SIZE) - len(blocks)
        more = tuple(BlockId(self.next_block + index) for index in range(num_more))
        self.next_block += num_more
        settings = {"task": self.pooling.task, "prompt": self.pooling.prompt, **params}
        return NewSequence(
            sequence_id=SequenceId(self.next_id),
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(),
            tables=(NewTable(blocks + more),),
            pooling=PoolingParams(**settings),
        )

    def step(self, shares: list[tuple[NewSequence, int, int]]) -> ModelRunnerOutput:
        """Compute [start, end) of each; those from 0 on are new."""
        plan = SchedulerOutput(
            step=0,
            released=(),
            new_sequences=tuple(new for new, start, _ in shares if not self.knows(new, start)),
            new_blocks={},
            scheduled=tuple(
                ScheduledSequence(new.sequence_id, start, end - start, end == len(new.token_ids))
                for new, start, end in shares
            ),
            num_scheduled_tokens=sum(end - start for _, start, end in shares),
        )
        return self.worker.execute(plan)

    def knows(self, new: NewSequence, start: int) -> bool:
        known = new.sequence_id in self._known
        self._known.add(new.sequence_id)
        return known

    @property
    def _known(self) -> set[SequenceId]:
        return self.__dict__.setdefault("known_ids", set())

    def pool(self, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
        """Embeddings of all of them in one step."""
        new = [self.new(prompt, **params) for prompt in prompts]
        output = self.step([(each, 0, len(each.token_ids)) for each in new])
        assert not output.failures
        self.release(*new)
        return [vector(output, each) for each in new]

    def release(self, *gone: NewSequence) -> None:
        released = tuple(each.sequence_id for each in gone)
        self.worker.execute(
            SchedulerOutput(
                step=0,
                released=released,
                new_sequences=(),
                new_blocks={},
                scheduled=(),
                num_scheduled_tokens=0,
            )
        )


def vector(output: ModelRunnerOutput, new: NewSequence) -> np.ndarray:
    return np.frombuffer(output.pooled[new.sequence_id], dtype="<f4")


@lru_cache(maxsize=1)
def theirs(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def hidden_states(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Hidden states of transformers' own model, alone, without padding: [tokens, 64]."""
    with torch.inference_mode():
        return theirs(folder)(input_ids=torch.tensor([prompt])).last_hidden_state[0]


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    match mode:
        case "cls":
            return hidden[0]
        case "mean":
            return hidden.sum(dim=0) / hidden.shape[0]
        case "max":
            return hidden.max(dim=0).values
    return hidden[-1]


def assert_close(ours: np.ndarray, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(ours, expected.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


# Encoders.


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoders_vectors_are_those_of_transformers_alone_and_batched(family: str, tmp_path: Path) -> None:
    folder = make_embedder(family, tmp_path / family)
    write_pooling_files(folder, "mean")
    pools = Pools(folder)
    assert pools.pooling.task is PoolingTask.EMBED
    assert pools.pooling.prompt is PromptComputation.AT_ONCE
    assert pools.pooling.num_dimensions == 64
    assert pools.facts.kv_cache_bytes == 0
    batched = pools.pool(PROMPTS)
    for prompt, together in zip(PROMPTS, batched, strict=True):
        expected = functional.normalize(pooled(hidden_states(folder, prompt), "mean"), dim=0)
        assert_close(together, expected)
        assert_close(pools.pool([prompt])[0], expected)


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "lasttoken"])
def test_an_encoder_pools_as_its_files_say(mode: str, tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    write_pooling_files(folder, mode, normalizes=False)
    vectors = Pools(folder).pool(PROMPTS)
    for prompt, ours in zip(PROMPTS, vectors, strict=True):
        assert_close(ours, pooled(hidden_states(folder, prompt), mode))


def test_without_files_an_encoder_takes_the_mean_and_normalizes(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    (ours,) = Pools(folder).pool(PROMPTS[:1])
    assert_close(ours, functional.normalize(hidden_states(folder, PROMPTS[0]).mean(dim=0), dim=0))


def test_dense_layers_follow_pooling(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    write_pooling_files(folder, "mean", dense_sizes=(48, 16))
    pools = Pools(folder)
    assert pools.pooling.num_dimensions == 16
    expected = hidden_states(folder, PROMPTS[0]).mean(dim=0)
    for name in ("2_Dense", "3_Dense"):
        weights = load_file(folder / name / "model.safetensors")
        expected = torch.tanh(weights["linear.weight"] @ expected + weights["linear.bias"])
    assert_close(pools.pool(PROMPTS[:1])[0], functional.normalize(expected, dim=0))


def test_a_vector_is_cut_to_the_dimensions_asked_for_and_normalized_again(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    pools = Pools(folder)
    (whole,) = pools.pool(PROMPTS[:1])
    (cut,) = pools.pool(PROMPTS[:1], num_dimensions=8)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


def test_the_files_and_the_position_table_bound_the_prompt(tmp_path: Path) -> None:
    roberta = make_embedder("roberta", tmp_path / "roberta")
    assert Pools(roberta).facts.max_model_len == 126  # of 128 positions, two belong to the padding
    write_pooling_files(roberta, "mean", max_seq_length=40)
    pools = Pools(roberta)
    assert pools.facts.max_model_len == 40
    pools.pool([[7] * 40])


def test_a_prompt_must_fit_one_step(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    assert Pools(folder, max_num_batched_tokens=32).facts.max_model_len == 32
    with pytest.raises(StartupError, match="--max-num-batched-tokens 64"):
        load_worker(folder, max_num_batched_tokens=32, max_model_len=64)
    with pytest.raises(StartupError, match="window of 128"):
        load_worker(folder, max_model_len=129)


def test_an_encoder_refuses_options_of_a_kv_cache(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    with pytest.raises(StartupError, match="--swap-space"):
        load_worker(folder, swap_space_bytes=2**20)


def test_part_of_a_prompt_fails_on_an_encoder_and_its_neighbour_does_not(tmp_path: Path) -> None:
    pools = Pools(make_embedder("bert", tmp_path / "bert"))
    part, whole = pools.new(PROMPTS[0]), pools.new(PROMPTS[1])
    output = pools.step([(part, 0, 4), (whole, 0, 5)])
    assert "whole prompts" in output.failures[part.sequence_id]
    assert list(output.pooled) == [whole.sequence_id]


def test_batches_hold_prompts_of_similar_length() -> None:
    assert cut_by_length([10, 100, 9, 80, 3]) == [[1, 3], [0, 2], [4]]
    assert cut_by_length([]) == []


# Cross-encoders.


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_a_cross_encoders_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = make_scorer(family, tmp_path / family)
    pools = Pools(folder)
    assert pools.pooling.task is PoolingTask.SCORE
    assert pools.pooling.num_dimensions == 1
    prompts = [PAIR, PAIR[:14], PAIR[:25]]
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ours in zip(prompts, pools.pool(prompts, second_text_start=SECOND_START), strict=True):
        types = torch.tensor([[0] * SECOND_START + [1] * (len(prompt) - SECOND_START)])
        arguments = {"token_type_ids": types} if family == "bert" else {}
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), **arguments).logits[0]
        assert_close(ours, torch.sigmoid(logits))


def test_a_checkpoint_may_ask_for_bare_logits_as_scores(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5.0"}
    folder = make_scorer("bert", tmp_path / "bert", sentence_transformers=identity)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    assert_close(Pools(folder).pool(PROMPTS[:1])[0], expected)


def test_a_classifier_of_several_classes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="3 outputs"):
        load_worker(make_scorer("bert", tmp_path / "bert", num_labels=3))


# Decoders.


@pytest.fixture(scope="module")
def last_token(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pools]:
    folder = make_embedder("qwen3", tmp_path_factory.mktemp("decoders") / "qwen3")
    write_pooling_files(folder, "lasttoken")
    return folder, Pools(folder)


def expected_last(folder: Path, prompt: list[int]) -> torch.Tensor:
    return functional.normalize(hidden_states(folder, prompt)[-1], dim=0)


def test_a_decoder_gives_the_last_hidden_state_alone_and_batched(last_token: tuple[Path, Pools]) -> None:
    folder, pools = last_token
    assert pools.pooling.prompt is PromptComputation.REUSING
    for prompt, together in zip(PROMPTS, pools.pool(PROMPTS), strict=True):
        assert_close(together, expected_last(folder, prompt))
        assert_close(pools.pool([prompt])[0], expected_last(folder, prompt))


def test_a_decoders_prompt_may_come_in_chunks_beside_others(last_token: tuple[Path, Pools]) -> None:
    folder, pools = last_token
    long, short = pools.new(PROMPTS[0]), pools.new(PROMPTS[2])
    assert not pools.step([(long, 0, 7)]).pooled
    output = pools.step([(long, 7, 20), (short, 0, 17)])
    assert_close(vector(output, short), expected_last(folder, PROMPTS[2]))
    assert_close(vector(pools.step([(long, 20, 29)]), long), expected_last(folder, PROMPTS[0]))
    pools.release(long, short)


def test_a_decoder_takes_a_prefix_from_the_cache(last_token: tuple[Path, Pools]) -> None:
    folder, pools = last_token
    first = pools.new(PROMPTS[0])
    pools.step([(first, 0, 29)])
    prompt = [*PROMPTS[0][:22], 9, 8, 7]
    second = pools.new(prompt, blocks=first.tables[0].block_ids[: 22 // BLOCK_SIZE])
    output = pools.step([(second, 22 // BLOCK_SIZE * BLOCK_SIZE, len(prompt))])
    assert_close(vector(output, second), expected_last(folder, prompt))
    pools.release(first, second)


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_a_decoder_with_another_pooling_needs_whole_prompts(mode: str, tmp_path: Path) -> None:
    folder = make_embedder("llama", tmp_path / "llama")
    write_pooling_files(folder, mode)
    pools = Pools(folder, max_num_batched_tokens=64)
    assert pools.pooling.prompt is PromptComputation.AT_ONCE
    assert pools.facts.max_model_len == 64
    for prompt, ours in zip(PROMPTS, pools.pool(PROMPTS), strict=True):
        assert_close(ours, functional.normalize(pooled(hidden_states(folder, prompt), mode), dim=0))


def test_a_decoder_with_a_head_for_one_class_scores(tmp_path: Path) -> None:
    folder = make_scorer("qwen3", tmp_path / "qwen3")
    pools = Pools(folder)
    assert pools.pooling.task is PoolingTask.SCORE
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, ours in zip(PROMPTS, pools.pool(PROMPTS), strict=True):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert_close(ours, torch.sigmoid(logits))


@pytest.mark.parametrize("make", [make_embedder, make_scorer])
def test_one_call_computes_the_layers_of_a_decoder_that_pools(
    make: Callable[[str, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("qwen3", tmp_path / "qwen3")
    write_pooling_files(folder, "lasttoken")
    pools = Pools(folder)
    calls: list[int] = []
    run_layers = CpuAttention.run_layers

    def note(self: CpuAttention, stack: Any, *others: Any) -> None:
        calls.append(stack.c.num_layers)
        run_layers(self, stack, *others)

    monkeypatch.setattr(CpuAttention, "run_layers", note)
    pools.pool(PROMPTS)
    assert calls == [3]


def test_a_generating_checkpoint_embeds_only_if_it_is_asked_to(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path / "llama")
    assert load_worker(folder)[1].pooling is None
    pools = Pools(folder, task="embed")
    for prompt, ours in zip(PROMPTS, pools.pool(PROMPTS), strict=True):
        assert_close(ours, expected_last(folder, prompt))


# What is refused.


def test_a_task_that_the_checkpoint_cannot_do_is_refused(tmp_path: Path) -> None:
    encoder, decoder = make_embedder("bert", tmp_path / "bert"), make_checkpoint("llama", tmp_path / "llama")
    with pytest.raises(StartupError, match="does not generate"):
        load_worker(encoder, task="generate")
    with pytest.raises(StartupError, match="no classification head"):
        load_worker(decoder, task="score")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mode": "sqrt"}, "no pooling"),
        ({"do_lower_case": True}, "do_lower_case"),
    ],
)
def test_files_that_ask_for_more_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    write_pooling_files(folder, **{"mode": "mean", **change})
    with pytest.raises(StartupError, match=reason):
        load_worker(folder)


def test_modules_that_are_not_known_or_not_in_the_folder_are_refused(tmp_path: Path) -> None:
    folder = make_embedder("bert", tmp_path / "bert")
    write_pooling_files(folder, "mean")
    modules = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(modules.replace("models.Normalize", "models.LayerNorm"))
    with pytest.raises(StartupError, match="a module LayerNorm"):
        load_worker(folder)
    (folder / "modules.json").write_text(modules.replace("1_Pooling", "../1_Pooling"))
    with pytest.raises(StartupError, match="leads out of the folder"):
        load_worker(folder)


def test_a_sequence_that_wants_text_or_another_task_fails_alone(last_token: tuple[Path, Pools]) -> None:
    _, pools = last_token
    good = pools.new(PROMPTS[1])
    other_task = pools.new(PROMPTS[1], task=PoolingTask.SCORE)
    outside = pools.new([5, 10**6])
    output = pools.step([(each, 0, len(each.token_ids)) for each in (other_task, good, outside)])
    assert list(output.pooled) == [good.sequence_id]
    assert "asked to score" in output.failures[other_task.sequence_id]
    assert "1000000" in output.failures[outside.sequence_id]
    pools.release(good, other_task, outside)


@pytest.mark.parametrize(
    ("family", "embedding"), [("bert", "embeddings.word_embeddings"), ("qwen3", "embed_tokens")]
)
def test_hidden_states_that_are_not_finite_fail_their_sequence_alone(
    family: str, embedding: str, tmp_path: Path
) -> None:
    folder = make_embedder(family, tmp_path / family)
    expected = Pools(folder, task="embed").pool(PROMPTS[:1])[0]
    weights = load_file(folder / "model.safetensors")
    weights[f"{embedding}.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    pools = Pools(folder, task="embed")
    healthy, sick = pools.new(PROMPTS[0]), pools.new([*PROMPTS[0][:-1], POISON])
    output = pools.step([(healthy, 0, 29), (sick, 0, 29)])
    assert "not finite" in output.failures[sick.sequence_id]
    assert_close(vector(output, healthy), torch.from_numpy(expected.copy()))


def test_an_encoder_refuses_to_be_quantized(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--quantization int8"):
        load_worker(make_checkpoint("bert", tmp_path / "encoder"), quantization="int8")
