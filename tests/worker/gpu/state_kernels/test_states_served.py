"""Families with recurrent layers on an interpreted GPU draw the tokens of a CPU."""

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from scheduler.config import PrefixCaching
from tests.checkpoints import make_checkpoint
from tests.worker.conftest import BLOCK_SIZE, MakeCheckpoint, load_worker
from tests.worker.gpu.ahead import AheadDriver
from tests.worker.gpu.interpreted_gpu import open_gpu
from tests.worker.gpu.test_gpu_worker import load_gpu, steps_of
from tests.worker.plan_driver import PlanDriver
from tests.worker.speculation.random_requests import TINY_REQUESTS
from tests.worker.speculation.speculated import Speculated, half_right
from tests.worker.states.test_poison import answers
from worker.attention.kv_cache import KeptShapes
from worker.gpu import graphs
from worker.gpu.state_kernels import chunks, convolution, executor, recurrence
from worker.startup.kernel_choice import refuse_kept
from worker.states.interface import StateShape
from worker.states.states_in_waves import StatesInWaves
from worker.worker import Worker
from worker.worker_config import DraftMethod, ModelFacts, SpeculationConfig, WorkerConfig
from worker.worker_errors import FamilyRefused

pytestmark = pytest.mark.night

LONG = [(7 * index + 3) % 300 for index in range(29)]
OTHER = [(11 * index + 5) % 300 for index in range(17)]
PREFIX = [(37 + 7 * index) % 300 for index in range(25)]
DRAFTING = SpeculationConfig(method=DraftMethod.NGRAM, num_speculative_tokens=4, prompt_lookup_min=1)

Loaded = tuple[Worker, ModelFacts]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Checkpoints of two layers, of which the second attends where some do."""
    root = tmp_path_factory.mktemp("of two layers")
    first = {"lfm2": "conv", "mamba": None}

    def make(family: str) -> Path:
        kind = first.get(family, "linear_attention")
        layer_types = kind and [kind, "full_attention"]
        return make_checkpoint(family, root / family, num_hidden_layers=2, layer_types=layer_types)

    return make


@pytest.fixture
def small_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes of 1, 2 and 4, and mixed steps of up to 24 tokens; chunks, which interpreted are exact."""
    monkeypatch.setattr(graphs, "_MIXED", (24,))
    monkeypatch.setattr(executor, "_DTYPES", {torch.float32})


def serve(driver: PlanDriver) -> list[list[int]]:
    """In a batch, in chunks beside decodes, preempted and swapped."""
    short, long, victim = (driver.add(prompt) for prompt in ([40, 41, 42], LONG, OTHER))
    driver.step({short: None, victim: None})
    for num_tokens in (6, 1, 20):
        driver.step({short: None, long: num_tokens, victim: None})
    driver.preempt(victim)
    driver.step({short: None})
    driver.step({short: None, long: None, victim: None})
    driver.swap_out(long)
    driver.step({short: None, victim: None})
    for _ in range(3):
        driver.step({short: None, long: None, victim: None})
    if isinstance(driver, AheadDriver):
        driver.collect_all()
    return [driver.generated(each) for each in (short, long, victim)]


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next", "lfm2", "mamba"])
def test_graphs_with_steps_in_flight_draw_the_cpus_tokens(
    checkpoints: MakeCheckpoint, family: str, small_graphs: None
) -> None:
    """Three sequences are padded to four."""
    folder, room = checkpoints(family), {"num_blocks": 300, "swap_space_bytes": 1 << 24}
    expected = serve(PlanDriver(load_worker(folder, **room)[0], BLOCK_SIZE, has_taps=False))
    worker, facts = load_gpu(folder, **room)
    assert facts.num_state_blocks
    assert serve(AheadDriver(worker, BLOCK_SIZE, depth=2, has_taps=False)) == expected
    steps = steps_of(worker)
    assert (steps._num_replayed, steps._num_eager) == (10, 0)
    assert steps._num_padding > 10


@pytest.mark.parametrize("options", [{}, {"gpu_kernels": "off"}], ids=["kernels", "torch"])
def test_restore_points_and_preemptions_in_a_few_blocks_change_nothing(
    checkpoints: MakeCheckpoint, options: dict[str, Any], small_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drawn = checkpoints("qwen3_5_text"), Random(1)
    ends = [tuple(drawn.randrange(300) for _ in range(drawn.randint(1, 6))) for _ in range(4)]
    prompts = [(*PREFIX[: drawn.choice((12, 25))], *drawn.choice(ends)) for _ in range(16)]
    cpu, cpu_facts = load_worker(folder, num_blocks=400)
    unique = sorted(set(prompts))
    alone, _ = answers(cpu, cpu_facts, unique, prefix_caching=PrefixCaching.OFF)
    cut: list[bool] = []
    begin = StatesInWaves.begin_step
    monkeypatch.setattr(
        StatesInWaves, "begin_step", lambda self, step: cut.append(bool(step.taps)) or begin(self, step)
    )
    worker, facts = load_gpu(folder, num_blocks=400, max_num_seqs=6, max_num_batched_tokens=48, **options)
    found, scheduler = answers(worker, facts, prompts, num_blocks=40 + 4 * facts.num_state_blocks)
    assert found == [dict(zip(unique, alone, strict=True))[each] for each in prompts]
    assert scheduler.stats().num_prefix_hits > 5, "states are found"
    assert any(cut), "and left"


class Variants:
    """A kernel, and the constants of its launches: each new set of them is compiled."""

    def __init__(self, kernel: Any, found: set[Any]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: Any) -> Any:
        return partial(self._launch, self._kernel[grid])

    def _launch(self, launch: Any, *given: Any, **constants: Any) -> None:
        self._found.add((self._kernel, *constants.items()))
        launch(*given, **constants)


def test_drafts_that_are_half_right_change_nothing_and_compile_nothing(
    checkpoints: MakeCheckpoint, small_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints("qwen3_5_text")
    found: set[Any] = set()
    for module, name in (
        (convolution, "convolve_kernel"),
        (recurrence, "recur_kernel"),
        (chunks, "prepare_kernel"),
        (chunks, "chunk_kernel"),
    ):
        monkeypatch.setattr(module, name, Variants(getattr(module, name), found))
    wide: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    expected = Speculated(*load_worker(folder), wide).answers(TINY_REQUESTS)
    loaded: Loaded = load_gpu(folder, num_blocks=200, speculation=DRAFTING)
    compiled = found.copy()
    world = Speculated(*loaded, {**wide, "max_plans_in_flight": 2})
    drawn = world.answers(TINY_REQUESTS, half_right(expected, Random(4), 335))
    assert [each[0] for each in drawn] == [each[0] for each in expected]
    assert compiled
    assert found == compiled, "kernels are compiled at start alone"
    assert 0 < world.num_accepted < world.num_drafted


def test_ranks_do_not_divide_states_on_gpus(checkpoints: MakeCheckpoint) -> None:
    config = WorkerConfig(model_path="", device="cpu", num_ranks=2)
    with pytest.raises(FamilyRefused, match="which ranks on GPUs do not divide yet"):
        refuse_kept("qwen3_next", KeptShapes({}, {0: StateShape()}), config, open_gpu(config))
