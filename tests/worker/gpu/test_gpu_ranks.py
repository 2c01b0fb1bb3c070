"""Ranks on GPUs: tokens of one process on a CPU, with sums through the host and with sums within graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from scheduler.messages import SamplingParams
from tests.adapters import write_adapter
from tests.checkpoints import make_checkpoint
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import BLOCK_SIZE, load_worker
from tests.worker.gpu import test_gpu_worker as whole
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.gpu_ranks import OWN, SHARED, rank_0
from tests.worker.gpu.interpreted_gpu import HAS_GPU
from tests.worker.gpu.lazy_cuda import DEVICE, LazyCuda
from tests.worker.gpu.test_adapters import LIMITS, mixed
from tests.worker.gpu.test_gpu_drafts import DRAFTING, VOCAB, check_alike
from tests.worker.ranks.divided import TWO_SHARDS, DividedWorker
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Answer, Speculated, half_right
from worker.adapters import targets as adapter_targets
from worker.devices.weight_life import lend_by_call, lent_to
from worker.gpu.unfused import RankOutput
from worker.model.layer_shards import bytes_of_a_rank
from worker.model.linear import linear_of
from worker.model.vocabulary_shards import divide_ends
from worker.ranks.device_ranks import DeviceRanks, device_of_rank
from worker.ranks.places import RankPlace
from worker.ranks.ranks import Alone
from worker.ranks.stage import Stage
from worker.startup.kernel_choice import _ON_GPU
from worker.worker_config import AdapterFolder, ModelFacts, WorkerConfig
from worker.worker_errors import AdapterRefused, StartupError

pytestmark = pytest.mark.skipif(HAS_GPU, reason="stand-ins are needed")
NUM_NUMBERS = 1000
UPPER_HALF = tuple(range(VOCAB // 2 + 1, VOCAB))
"""Tokens that the second of two ranks looks up."""
DRAFTED = [
    *TINY_REQUESTS,
    ([300, 301], SamplingParams(temperature=1.0, seed=3, max_tokens=9, allowed_token_ids=UPPER_HALF)),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("gpu_ranks")
    return {
        family: make_checkpoint(family, root / family, num_hidden_layers=1)
        for family in ("llama", "qwen3_moe")
    }


def config_of(folder: Path, device: str, **options: Any) -> WorkerConfig:
    settings = {**whole.SETTINGS, "device": device, "num_ranks": 2, **options}
    return WorkerConfig(model_path=str(folder), **settings)


@pytest.mark.night
def test_ranks_that_share_a_gpu_draw_the_tokens_of_one_process(tmp_path: Path) -> None:
    """A checkpoint of codes, with sums through the host; with an adapter of all projections; and rounded."""
    folder, plain = write_quantized("llama", "awq", tmp_path, num_hidden_layers=1)
    options = adapting([write_adapter(tmp_path / "all", plain, rank=3)])
    alone, facts = load_worker(folder, swap_space_bytes=1 << 20, **options)
    expected, order = whole.expected_from(alone), [facts.adapters[0].identity, ""]
    adapted = mixed(alone, order, is_ahead=False)
    rounding = {"quantization": "int8", "quantize_head": "int8"}
    rounded = whole.expected_from(whole.load_gpu(plain, enforce_eager=True, **rounding)[0])
    with rank_0(SHARED, None, TWO_SHARDS) as (_, divided):
        facts = divided.load(config_of(folder, SHARED, enforce_eager=True, **options))
        assert (facts.num_ranks, facts.runs_ahead) == (2, True)
        assert served_by(divided) == expected
        assert mixed(divided, order, is_ahead=True) == adapted
        assert adapted[0] != adapted[1]
        divided.load(config_of(plain, SHARED, enforce_eager=True, **rounding))
        assert served_by(divided) == rounded


@pytest.mark.night
def test_ranks_with_a_gpu_each_sum_within_graphs(folders: dict[str, Path], tmp_path: Path) -> None:
    """Sums of experts too, with drafts and with adapters."""
    base, targets = folders["qwen3_moe"], ["q_proj", "v_proj", "o_proj"]
    first, second, third = (
        write_adapter(tmp_path / f"a{seed}", base, rank=3 * seed, seed=seed, targets=targets)
        for seed in (1, 2, 3)
    )
    alone, facts = load_worker(base, swap_space_bytes=1 << 20, **adapting([first, second]))
    expected = whole.expected_from(alone)
    answers = Speculated(alone, facts).answers(DRAFTED)
    order = [*(each.identity for each in facts.adapters), ""]
    adapted = mixed(alone, order, order[::-1], is_ahead=False)
    with rank_0(OWN, 1, TWO_SHARDS) as (cuda, divided):
        config = config_of(base, OWN, speculation=DRAFTING, **adapting([first]))
        facts = divided.load(config)
        assert served_by(divided) == expected
        assert divided._worker is not None
        steps = whole.steps_of(divided._worker)
        assert steps._num_replayed == 7
        check_drafts(divided, facts, answers)
        assert steps._num_replayed > 7
        check_loading(divided, second, third)
        num_replayed = steps._num_replayed
        assert mixed(divided, order, order[::-1], is_ahead=True) == adapted
        assert steps._num_replayed > num_replayed
        with gathering_beside_graphs(cuda), pytest.raises(StartupError, match="CUDA graphs are missing"):
            divided.load(config)


def check_drafts(divided: DividedWorker, facts: ModelFacts, expected: list[Answer]) -> None:
    """Raise AssertionError unless half-right drafts change nothing, preempted and beside steps in flight."""
    changes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_plans_in_flight": 2, "num_blocks": 7}
    world = Speculated(divided, facts, changes, next_id=100)  # type: ignore[arg-type]
    check_alike(world.answers(DRAFTED, half_right(expected, Random(4), VOCAB)), expected)
    assert 0 < world.num_accepted < world.num_drafted
    assert world.num_preemptions


def check_loading(divided: DividedWorker, adapter: Path, unlike: Path) -> None:
    """Load an adapter on all ranks, and one on none that they do not read alike."""
    store = divided.adapters
    store.load(adapter.name, str(adapter))
    resident, read = store.resident, adapter_targets.read_adapter
    with pytest.MonkeyPatch.context() as patch:  # and not in the other process
        patch.setattr(
            adapter_targets, "read_adapter", lambda *args, **named: replace(read(*args, **named), digest="0")
        )
        with pytest.raises(AdapterRefused, match="not all ranks read the same files"):
            store.load(unlike.name, str(unlike))
    assert store.resident == resident


def adapting(adapters: list[Path]) -> dict[str, Any]:
    """Options of a worker that has these adapters from its start."""
    named = tuple(AdapterFolder(each.name, str(each)) for each in adapters)
    return {"adapter_limits": LIMITS, "adapters": named}


def served_by(divided: DividedWorker) -> dict[str, list[int]]:
    """Tokens in chunks, with a shared prefix, preempted and swapped, with two steps in flight."""
    driver = AheadDriver(divided, BLOCK_SIZE, depth=2)  # type: ignore[arg-type]
    tokens = whole.serve(driver)
    driver.release_all()
    return tokens


@contextmanager
def gathering_beside_graphs(cuda: LazyCuda) -> Iterator[None]:
    """Let rank 0 leave the logits of the other out of its graphs."""
    gather = DeviceRanks.gather

    def once(ranks: DeviceRanks, part_TP: torch.Tensor) -> torch.Tensor:
        if cuda.driver.stream_id in cuda.driver.captures:
            return torch.cat([part_TP] * ranks.size, dim=1)
        return gather(ranks, part_TP)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRanks, "gather", once)
        yield


def test_weights_of_the_host_visit_the_device_module_by_module() -> None:
    with LazyCuda() as cuda:
        torch.cuda.set_device(DEVICE)
        layers = [nn.Linear(NUM_NUMBERS, NUM_NUMBERS, bias=False) for _ in range(3)]
        model = nn.Sequential(*layers, layers[0]).requires_grad_(False)
        x = torch.ones(1, NUM_NUMBERS)
        on_host = model(x)
        end = lend_by_call(model, DEVICE)
        cuda.driver.reset_peak(DEVICE.index)
        for _ in range(2):
            with torch.inference_mode():
                found = model(x.to(DEVICE))
            assert torch.allclose(found.cpu(), on_host, atol=1e-5)
        assert all(each.weight.device.type == "cpu" for each in layers)
        peak = torch.cuda.max_memory_allocated(DEVICE)
        assert 4 * NUM_NUMBERS**2 <= peak < 8 * NUM_NUMBERS**2, "one layer at a time"
        with lent_to(DEVICE, model):
            assert all(each.weight.device == DEVICE for each in layers)
        end()
        assert torch.equal(model(x), on_host)


def test_a_copy_that_fails_on_the_way_leaves_all_weights_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied = nn.Linear(4, 4), []

    def copy_one(tensor: torch.Tensor, _device: torch.device) -> torch.Tensor:
        copied.append(tensor)
        if len(copied) > 1:
            raise torch.OutOfMemoryError
        return tensor.clone()

    on_host = [each.data_ptr() for each in model.parameters()]
    monkeypatch.setattr(torch.Tensor, "to", copy_one)
    with pytest.raises(torch.OutOfMemoryError), lent_to(torch.device("meta"), model):
        pass
    assert [each.data_ptr() for each in model.parameters()] == on_host


@pytest.mark.parametrize(
    ("device", "rank", "own"),
    [("cuda", 3, "cuda:3"), ("cuda:3", 1, "cuda:3"), ("cpu", 1, "cpu")],
)
def test_each_rank_of_all_stages_has_a_device(device: str, rank: int, own: str) -> None:
    config = WorkerConfig(model_path="", device=device, num_stages=2, num_ranks=2)
    assert device_of_rank(config, rank) == own


def test_a_model_alone_has_the_first_gpu() -> None:
    assert device_of_rank(WorkerConfig(model_path="", device="cuda"), 0) == "cuda"


def test_what_a_rank_will_weigh_is_known_before_it_is_divided(folders: dict[str, Path]) -> None:
    """Keys and values have a head on each rank at least, norms are whole, and tables of tokens padded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    num_heads = model.config.num_key_value_heads
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    heads = sum(size for name, size in sizes.items() if "k_proj" in name or "v_proj" in name)
    size = 4 * num_heads
    ends = (model.lm_head.weight, model.model.embed_tokens.weight)
    padding = sum(-len(end) % size * end[0].nbytes for end in ends)
    others = sum(sizes.values()) + padding - norms - heads
    assert bytes_of_a_rank(model, size) == pytest.approx(norms + heads / num_heads + others / size, abs=16)


def test_a_stage_weighs_its_layers_and_the_end_that_it_has(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make_checkpoint("llama", tmp_path, num_hidden_layers=3))
    parts = (model.model.layers[0], model.model.norm)
    layer, norm = (sum(each.nbytes for each in part.parameters()) for part in parts)
    end = model.lm_head.weight.nbytes
    first, last = (bytes_of_a_rank(model, 1, Stage(index, 2)) for index in range(2))
    assert (first, last) == (2 * layer + norm + end, layer + norm + end)


def test_a_gpu_that_stages_of_shards_share_has_room_for_the_weights_of_all() -> None:
    """Each shard of the first stage has the whole embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes))
    config = config_of(Path(), SHARED, num_stages=2, gpu_kernels="off", max_num_batched_tokens=1)
    loaded = SimpleNamespace(
        model=model,
        ranks=SimpleNamespace(size=2, stage=Stage(0, 2)),
        text_config=model.config,
        dtype=torch.float32,
        checkpoint_len=64,
        vocab_size=4096,
        head_layers=lambda _: 0.0,
    )
    stages = [bytes_of_a_rank(model, 2, Stage(index, 2)) for index in range(2)]
    hidden_bytes = config.max_num_batched_tokens * 64 * torch.float32.itemsize
    found = _ON_GPU.reserve(config, loaded)
    assert found.buffer_bytes == 2 * sum(stages) + 4 * 4 * hidden_bytes, "four of each rank, on their way"


def test_a_rank_that_has_its_stage_to_itself_agrees_with_itself(tmp_path: Path) -> None:
    """Before it has met the other stage's."""
    config = config_of(tmp_path, OWN, num_ranks=1, num_stages=2)
    place = RankPlace(
        stage=1, shard=0, num_stages=2, num_shards=1, num_here=1, page=-1, world=-1, inlet=None, outlet=None
    )
    ranks = DeviceRanks(tmp_path, config, place)
    assert ranks.broadcast([3, 5]) == [3, 5]
    assert ranks.of_all([3, 5]).tolist() == [[3, 5]]


class ThreeRanks(Alone):
    size = 3


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_tied_ends_weigh_what_is_there_once_they_are_divided(family: str, tmp_path: Path) -> None:
    """Two parts of a table that only looks up; of one that does more, the whole and a part."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(family, tmp_path, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    model.model.layers = nn.ModuleList()
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert output.weight is embedding.weight
    assert len(output.weight) % ThreeRanks.size
    foreseen = bytes_of_a_rank(model, ThreeRanks.size)
    with LazyCuda():
        torch.cuda.set_device(DEVICE)
        with lent_to(DEVICE, output):
            linear = linear_of(output)
            assert linear is not None
            divide_ends(model, linear, RankOutput, ThreeRanks())
            del linear
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DEVICE)
        there = torch.cuda.memory_allocated(DEVICE)
    assert there == pytest.approx(foreseen, abs=1024), "but for the allocator's units"
