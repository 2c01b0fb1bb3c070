"""A draft model in the blocks of the sequences: it changes no answer, and keeps what it computed."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest

from scheduler.config import DraftSupply, PreemptionMode
from scheduler.messages import ModelRunnerOutput, SamplingParams, SchedulerOutput
from tests.quantized_checkpoints import write_quantized
from tests.worker.conftest import MakeCheckpoint, load_worker
from tests.worker.speculation.draft_checkpoints import write_draft
from tests.worker.speculation.random_requests import random_request
from tests.worker.speculation.speculated import ModelDrafted
from tests.worker.speculation.test_verification import DEMO, EOS, TOKENIZER, Loaded, check_equal
from worker.devices.device import CpuDevice
from worker.doctor_findings import Verdict
from worker.load.model_kind import find_kind
from worker.load.weight_files import weight_bytes
from worker.steps.protocol import LaunchedStep
from worker.survey.draft_forecast import foresee_draft
from worker.survey.forecast import forecast
from worker.survey.survey import survey
from worker.worker import Worker
from worker.worker_config import DraftMethod, SpeculationConfig, WorkerConfig
from worker.worker_errors import StartupError

pytestmark = pytest.mark.night


def drafting(folder: Path) -> SpeculationConfig:
    return SpeculationConfig(method=DraftMethod.DRAFT_MODEL, model_path=str(folder), num_speculative_tokens=4)


def load_with(draft: Path, **options: object) -> Loaded:
    settings = {"num_blocks": 200, "block_size": 8, "swap_space_bytes": 1 << 22, "num_threads": 2}
    return load_worker(DEMO, speculation=drafting(draft), **{"dtype": "bfloat16", **settings, **options})


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("draft") / "four", DEMO, num_layers=4)


@pytest.fixture(scope="module")
def half_right(four_layers: Path) -> Loaded:
    return load_with(four_layers)


@pytest.fixture(scope="module")
def always_right() -> Loaded:
    """A model that drafts for itself: where its keys and values are right, it guesses every token."""
    return load_with(DEMO)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_get_the_same_tokens_and_logprobs_with_a_draft_model(
    half_right: Loaded, seed: int
) -> None:
    random = Random(100 + seed)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(12)]
    expected = ModelDrafted(*half_right, num_asked=0).answers(requests)
    world = ModelDrafted(*half_right, num_asked=4, next_id=100)
    check_equal(expected, world.answers(requests))
    assert 20 < world.num_accepted < world.num_drafted
    mode = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP)[seed % 2]
    pressed = ModelDrafted(
        *half_right, {"num_blocks": 13, "preemption_mode": mode}, num_asked=4, next_id=1000
    )
    check_equal(expected, pressed.answers(requests))
    assert pressed.num_preemptions > 0 or seed == 2  # whose requests are short


def plain_requests(num: int, *, max_tokens: int = 24) -> list[tuple[list[int], SamplingParams]]:
    """Requests without grammars and stop tokens, whose drafts are never cut."""
    texts = ("one two three one two three one", "Write a short story about a train.", "The yard is full")
    return [
        (
            TOKENIZER.encode(texts[number % 3], add_special_tokens=False).ids,
            SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=max_tokens),
        )
        for number in range(num)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_blocks": 14, "preemption_mode": PreemptionMode.SWAP},
        {"num_blocks": 14, "preemption_mode": PreemptionMode.RECOMPUTE},
        {"max_num_batched_tokens": 8},
    ],
)
def test_a_model_that_drafts_for_itself_is_right_however_its_blocks_have_moved(
    always_right: Loaded, changes: dict[str, object]
) -> None:
    requests = plain_requests(6)
    expected = ModelDrafted(*always_right, num_asked=0).answers(requests)
    world = ModelDrafted(*always_right, changes, num_asked=3, next_id=100)
    check_equal(expected, world.answers(requests))
    assert world.num_drafted > 40
    assert world.num_accepted == world.num_drafted
    assert ("preemption_mode" in changes) == (world.num_preemptions > 0)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_drafts_depend_on_the_text_alone_and_not_on_what_was_drafted_or_moved_before(
    half_right: Loaded, mode: PreemptionMode
) -> None:
    requests = plain_requests(6, max_tokens=40)
    often = ModelDrafted(*half_right, num_asked=4)
    often.answers(requests)
    assert often.num_accepted < often.num_drafted
    seldom = ModelDrafted(
        *half_right, {"num_blocks": 22, "preemption_mode": mode}, num_asked=4, next_id=100, ask_every=3
    )
    seldom.answers(requests)
    assert seldom.num_preemptions > 0
    both = often.offers.keys() & seldom.offers.keys()
    assert len(both) > 10
    for place in both:
        pairs = zip(often.offers[place], seldom.offers[place], strict=False)
        assert all(one == other for one, other in pairs), place


def test_tokens_that_were_sampled_without_drafts_are_caught_up_and_cached_blocks_too(
    always_right: Loaded,
) -> None:
    world = ModelDrafted(*always_right, num_asked=2, ask_every=7)
    (first, _) = world.answers(plain_requests(2, max_tokens=40))
    assert world.num_accepted == world.num_drafted > 0
    prompt = [*plain_requests(1)[0][0], *first[0]]  # its blocks are in the prefix cache, most without drafts
    world.answers([(prompt, SamplingParams(temperature=0.0, max_tokens=12))])
    assert world.num_accepted == world.num_drafted


def test_drafts_go_on_behind_a_cached_prefix_whose_beginning_a_window_of_the_model_has_passed(
    checkpoints: MakeCheckpoint,
) -> None:
    """All tokens of a draft model are kept, so it catches up from the first one."""
    folder = checkpoints("mistral")
    loaded = load_worker(folder, num_blocks=200, speculation=drafting(folder))
    assert len(loaded[1].groups) == 2
    prompt = [(7 * index + 3) % 300 for index in range(40)]  # the window has 12
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=num)) for num in (1, 12)]
    world = ModelDrafted(*loaded, {"max_num_seqs": 1}, num_asked=3)
    world.answers(requests)
    assert world.num_found == 36
    assert world.num_accepted == world.num_drafted > 4


def test_blocks_hold_the_layers_of_both_and_the_model_says_that_drafts_are_to_be_asked_for(
    always_right: Loaded, half_right: Loaded
) -> None:
    _, plain = load_worker(DEMO, dtype="bfloat16", num_blocks=200, block_size=8)
    (_, twice), (_, nearly) = always_right, half_right
    assert twice.kv_cache_bytes == 2 * plain.kv_cache_bytes
    assert nearly.kv_cache_bytes * 5 == plain.kv_cache_bytes * 9
    assert twice.has_draft_model
    assert not plain.has_draft_model


def test_a_draft_model_works_where_torch_computes_all(four_layers: Path) -> None:
    loaded = load_with(four_layers, dtype="float32", cpu_kernels="off")
    requests = plain_requests(3)
    expected = ModelDrafted(*loaded, num_asked=0).answers(requests)
    world = ModelDrafted(*loaded, num_asked=3, next_id=100)
    assert [each[0] for each in world.answers(requests)] == [each[0] for each in expected]
    assert world.num_accepted > 0


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(tmp_path: Path) -> None:
    other = write_draft(tmp_path / "other", DEMO, num_layers=1)
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    (one, two) = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(StartupError, match=r"draft model .*other: it has another vocabulary") as refused:
        load_with(other)
    assert repr(one) in str(refused.value) or repr(two) in str(refused.value)


@pytest.mark.parametrize(
    "names", [{"speculators_model_type": "eagle"}, {"architectures": ["EagleLlamaForCausalLM"]}]
)
def test_a_head_of_a_kind_that_is_not_read_is_refused_by_name(
    tmp_path: Path, names: dict[str, object]
) -> None:
    head = write_draft(tmp_path / "head", DEMO, num_layers=1)
    content = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(content | names))
    with pytest.raises(
        StartupError, match=r"draft model .*head: it is a head of a kind that is not read \(.*agle"
    ):
        load_with(head)


def test_only_a_scheduler_that_asks_gets_drafts_of_a_model(always_right: Loaded) -> None:
    world = ModelDrafted(*always_right, {"draft_supply": DraftSupply.FREE}, num_asked=3)
    world.answers(plain_requests(2))
    assert world.num_drafted == 0


@dataclass
class Recorded(ModelDrafted):
    """The same, which keeps what the worker answered."""

    results: list[ModelRunnerOutput] = field(default_factory=list)

    def _launch(self, plan: SchedulerOutput) -> LaunchedStep:
        launched = super()._launch(plan)
        self.results.append(launched.result())
        return launched


def test_the_worker_says_how_much_of_a_long_prompt_its_draft_model_has_computed(four_layers: Path) -> None:
    loaded = load_with(four_layers, max_num_batched_tokens=16)
    world = Recorded(*loaded, {"max_num_batched_tokens": 16}, num_asked=1)
    ((words, _),) = plain_requests(1)
    world.answers([((words * 7)[:40], SamplingParams(temperature=0.0, max_tokens=9))])
    told = [
        (list(each.num_followed.values()), bool(each.draft_token_ids))
        for each in world.results
        if each.num_followed
    ]
    assert told[:3] == [([16], False), ([32], False), ([44], True)]


def test_nothing_is_guessed_behind_a_token_that_ends_its_sequence(half_right: Loaded) -> None:
    ((prompt, params),) = plain_requests(1)
    ((tokens, _, _),) = ModelDrafted(*half_right, num_asked=0).answers([(prompt, params)])
    stop = next(token for place, token in enumerate(tokens) if place > 4 and token not in tokens[:place])
    world = Recorded(*half_right, num_asked=3, next_id=100)
    world.answers([(prompt, replace(params, stop_token_ids=(stop,)))])
    *before, last = world.results
    assert any(each.draft_passes for each in before)
    assert [ids[-1] for ids in last.token_ids.values()] == [stop]
    assert not last.draft_passes
    ignoring = Recorded(*half_right, num_asked=3, next_id=200)
    ignoring.answers([(prompt, params)])
    assert all(each.draft_passes for each in ignoring.results if stop in sum(each.token_ids.values(), ()))


def test_inputs_are_rounded_for_a_model_of_codes_beside_a_draft_model_without(tmp_path: Path) -> None:
    codes = write_quantized("llama", "int4", tmp_path)[0]
    plain = codes.parent / "llama plain int4"
    for folder in (codes, plain):
        shutil.copy(DEMO / "tokenizer.json", folder)
    load_worker(codes, activations="int8", speculation=drafting(plain))
    with pytest.raises(StartupError, match="--activations int8 has no effect"):
        load_worker(plain, activations="int8", speculation=drafting(codes))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_doctor_foresees_the_memory_of_both_models(four_layers: Path, num_ranks: int) -> None:
    config = WorkerConfig(
        model_path=str(DEMO),
        device="cpu",
        kv_cache_bytes=32 << 20,
        num_threads=1,
        num_ranks=num_ranks,
        speculation=drafting(four_layers),
    )
    kind, device = find_kind(config), CpuDevice(config)
    draft = foresee_draft(config, kind, device)
    assert draft is not None
    found = forecast(
        config, kind, device, weight_bytes(config, kind, device) + draft.weight_bytes, draft.kept
    )
    if num_ranks == 1:
        facts = Worker(config).load(lambda progress: None)
        assert found.size.num_blocks == facts.num_blocks
    memory = next(each for each in survey(config) if each.topic == "memory")
    assert memory.verdict is Verdict.OK
    assert "of the draft model" in memory.what


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"kv_cache_dtype": "fp8", "cpu_kernels": "off"}, "does not go with a draft model"),
        ({"num_stages": 2}, "stages verify no drafts yet"),
    ],
)
def test_doctor_refuses_a_draft_model_where_the_start_does(
    four_layers: Path, options: dict[str, object], part: str
) -> None:
    config = WorkerConfig(
        model_path=str(DEMO),
        device="cpu",
        num_threads=1,
        kv_cache_bytes=4 << 20,
        speculation=drafting(four_layers),
        **options,
    )
    *_, last = survey(config)
    assert last.verdict is Verdict.FAULT
    assert part in last.what
