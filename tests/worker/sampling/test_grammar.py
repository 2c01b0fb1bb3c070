"""Whatever the logits say, the text matches the grammar; and nobody else notices."""

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.messages import GRAMMAR_TOO_DEAR, Grammar, GrammarKind, SamplingParams
from tests.checkpoints import write_tokenizer
from tests.engine import small_tokenizers
from tests.worker.plan_driver import PlanDriver
from worker.devices.device import CpuDevice
from worker.sampling import grammar_rows
from worker.sampling.grammar_library import GrammarRefused, as_lark, new_matcher, open_tokenizer
from worker.sampling.grammar_rows import Grammars, RowGrammar
from worker.sampling.mask_budget import MAX_REPLAY_S, MAX_STEP_S
from worker.sampling.sampler import Sampler
from worker.worker_config import WorkerConfig

CPU = CpuDevice(WorkerConfig(model_path="", num_threads=torch.get_num_threads()))
GREEDY = SamplingParams(temperature=0.0)
NUM_PADDING = 37
DEMO = Path(__file__).parents[3] / "engine" / "demo_model" / "tokenizer.json"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b é"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema(content: dict) -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(content))


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text)


def lark(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.LARK, text=text)


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    return (
        isinstance(person["name"], str)
        and len(person["name"]) <= 8
        and person["age"] in range(151)
        and len(person["tags"]) <= 2
        and set(person["tags"]) <= {"a", "b é"}
    )


# Each ends by itself within 200 tokens, whatever is drawn.
GRAMMARS: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "schema": (schema(PERSON), is_person),
    "regex": (regex(r"[a-f]{2,9}-[0-9]{4}"), re.compile(r"[a-f]{2,9}-[0-9]{4}").fullmatch),
    "choice": (lark('start: "yes" | "no" | "perhaps 😀\\n"'), ("yes", "no", "perhaps 😀\n").__contains__),
    "recursive": (lark('start: "(" start? ")" | "x"'), re.compile(r"[(x)]+").fullmatch),
}


class World:
    """A checkpoint's tokenizer, and a sampler for a model with more rows of logits than it has tokens."""

    def __init__(self, folder: Path, content: str, *, eos: str) -> None:
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
        self.folder = folder
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab_size = self.tokenizer.get_vocab_size() + NUM_PADDING
        self.eos = self.tokenizer.token_to_id(eos)
        self.base = SamplingParams(temperature=2.0, stop_token_ids=(self.eos,))
        # To open the tokenizer takes as long as to draw a text.
        self._grammars = Grammars(folder, vocab_size=self.vocab_size, eos_token_ids=(self.eos,))

    def sampler(self) -> Sampler:
        return Sampler(vocab_size=self.vocab_size, device=CPU, grammars=self._grammars)

    def logits(self, seed: int, step: int, num_rows: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 1000 + step)
        return torch.randn((num_rows, self.vocab_size), generator=generator) * 3

    def generate(
        self, params: SamplingParams, *, seed: int = 0, max_tokens: int = 200, before: Sequence[int] = ()
    ) -> list[int]:
        """Draw until the end; `before` was generated earlier, by a row that is gone."""
        sampler, output = self.sampler(), list(before)
        sampler.add_row(0, params, [5, *output], 1)
        while len(output) < max_tokens and self.eos not in output:
            result = sampler.sample(self.logits(seed, len(output)), [0])
            assert not result.failed
            output += result.token_ids
        return output

    def text(self, output: Sequence[int]) -> str:
        """Text as behind a prompt: without what a decoder does to the beginning of a text."""
        assert output[-1] == self.eos
        start = self.tokenizer.encode("hello", add_special_tokens=False).ids
        whole = self.tokenizer.decode([*start, *output], skip_special_tokens=True)
        return whole[len(self.tokenizer.decode(start)) :]


@pytest.fixture(scope="module", params=["demo", "byte level", "sentencepiece"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "demo":
        return World(folder, DEMO.read_text(encoding="utf-8"), eos="<|end|>")
    made = {
        "byte level": small_tokenizers.byte_level_backend,
        "sentencepiece": small_tokenizers.sentencepiece_backend,
    }[request.param]()
    return World(folder, made.to_str(), eos="</s>")


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_any_text_drawn_at_temperature_2_matches(world: World, name: str, seed: int) -> None:
    grammar, matches = GRAMMARS[name]
    output = world.generate(replace(world.base, grammar=grammar, seed=seed), seed=seed, max_tokens=400)
    assert matches(world.text(output))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(0, 30))
def test_a_row_that_was_preempted_goes_on_as_if_nothing_had_happened(
    demo: World, seed: int, cut: int
) -> None:
    params = replace(demo.base, grammar=schema(PERSON), seed=seed)
    whole = demo.generate(params, seed=seed)
    cut = min(cut, len(whole) - 1)
    assert demo.generate(params, seed=seed, before=whole[:cut]) == whole


def test_an_object_may_have_hundreds_of_optional_properties(demo: World) -> None:
    properties = {f"p{number}": {"type": "boolean"} for number in range(500)}
    grammar = schema({"type": "object", "properties": properties, "additionalProperties": False})
    begun = [demo.tokenizer.token_to_id("{")]
    tokens = demo.generate(replace(demo.base, grammar=grammar), max_tokens=60, before=begun)  # and none fails
    assert demo.text([*tokens, demo.eos]).startswith("{")


def test_greedy_rows_match_too(demo: World) -> None:
    params = replace(demo.base, grammar=schema(PERSON), temperature=0.0)
    assert is_person(demo.text(demo.generate(params)))


def test_rows_with_different_grammars_and_rows_with_none_do_not_touch_each_other(demo: World) -> None:
    everybody = [
        replace(demo.base, grammar=regex("[ab]{4}"), seed=1),
        replace(demo.base, seed=2),
        replace(demo.base, grammar=schema(PERSON), seed=3, presence_penalty=1.0),
        replace(demo.base, temperature=0.0),
        replace(demo.base, grammar=regex("[ab]{4}"), seed=4, top_k=3),
    ]
    together = _draw_four(demo, everybody, list(range(5)))
    alone = [_draw_four(demo, everybody, [row])[0] for row in range(5)]
    assert together == alone


def _draw_four(world: World, everybody: list[SamplingParams], rows: list[int]) -> list[list[int]]:
    sampler = world.sampler()
    for row in rows:
        sampler.add_row(row, everybody[row], [5], 1)
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(4):
        result = sampler.sample(world.logits(9, step, len(everybody))[rows], rows)
        assert not result.failed
        for output, token_id in zip(outputs, result.token_ids, strict=True):
            output.append(token_id)
    return outputs


def test_another_seed_gives_another_text(demo: World) -> None:
    texts = {
        demo.text(demo.generate(replace(demo.base, grammar=regex("[a-z]{12}"), seed=seed)))
        for seed in range(5)
    }
    assert len(texts) == 5


def test_until_the_token_after_which_it_begins_everything_is_free(demo: World) -> None:
    opening = demo.tokenizer.token_to_id("<|user|>")
    grammar = replace(regex("[ab]{4}"), begins_after=opening)
    params = replace(demo.base, grammar=grammar)
    free = demo.generate(params, max_tokens=20)
    assert free == demo.generate(demo.base, max_tokens=20)
    output = demo.generate(params, before=[9, 8, opening])
    assert re.fullmatch("[ab]{4}", demo.text(output[3:]))


def test_a_complete_text_ends_before_its_minimum_length(demo: World) -> None:
    params = replace(demo.base, grammar=lark('start: "yes"'), min_tokens=50)
    assert demo.text(demo.generate(params)) == "yes"


def test_a_text_that_can_go_on_does_so_to_its_minimum_length(demo: World) -> None:
    params = replace(demo.base, grammar=regex("[ab]+"), min_tokens=15)
    assert len(demo.generate(params)) > 15


def test_logprobs_are_those_of_the_model_not_of_the_grammar(demo: World) -> None:
    sampler = demo.sampler()
    sampler.add_row(0, replace(demo.base, grammar=lark('start: "yes"'), num_logprobs=2), [5], 1)
    logits = demo.logits(1, 0)
    logprobs = sampler.sample(logits, [0]).logprobs[0]
    assert [token_id for token_id, _ in logprobs.top] == logits[0].topk(2).indices.tolist()
    assert logprobs.logprob == pytest.approx(float(logits[0].log_softmax(-1)[logprobs.token_id]), abs=1e-4)


def test_what_is_forbidden_and_demanded_at_once_fails_that_row_alone(demo: World) -> None:
    sampler = demo.sampler()
    yes = lark('start: "yes"')
    sampler.add_row(0, replace(demo.base, grammar=yes, allowed_token_ids=(9,)), [5], 1)
    sampler.add_row(1, replace(demo.base, grammar=yes), [5], 1)
    assert set(sampler.sample(demo.logits(1, 0, 2), [0, 1]).failed) == {0}


def test_a_grammar_that_grows_too_complex_fails_that_row_alone(demo: World) -> None:
    sampler = demo.sampler()
    sampler.add_row(0, replace(demo.base, grammar=regex(r"(\w{1,500}){1,500}")), [5], 1)
    sampler.add_row(1, demo.base, [5], 1)
    failed: dict[int, str] = {}
    for step in range(40):
        failed = sampler.sample(demo.logits(1, step, 2), [0, 1]).failed
        if failed:
            break
    assert list(failed) == [0]
    assert GRAMMAR_TOO_DEAR in failed[0]


def test_a_row_whose_history_does_not_match_fails_alone(demo: World) -> None:
    sampler = demo.sampler()
    sampler.add_row(0, replace(demo.base, grammar=lark('start: "yes"')), [5, 70, 71], 1)
    result = sampler.sample(demo.logits(1, 0), [0])
    assert "the grammar failed" in result.failed[0]


def test_a_tokenizer_that_cannot_be_taken_apart_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(small_tokenizers.word_piece_backend().to_str())
    with pytest.raises(GrammarRefused, match="this model's tokenizer cannot be constrained"):
        open_tokenizer(tmp_path, vocab_size=500, eos_token_ids=(2,))


def test_a_tokenizer_may_know_more_tokens_than_the_model(tmp_path: Path) -> None:
    num_tokens = write_tokenizer(tmp_path)
    grammars = Grammars(tmp_path, vocab_size=num_tokens - 1, eos_token_ids=(num_tokens - 2,))
    logits = torch.zeros((1, num_tokens - 1))
    grammars.mask(logits, [grammars.row(regex("[ab]"), [])])
    allowed = logits[0].isfinite().nonzero().flatten().tolist()
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert allowed == [tokenizer.token_to_id("a"), tokenizer.token_to_id("b")]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (regex("(?=a)b"), "look-around"),
        (regex("(a)\\1"), "backreferences"),
        (schema({"type": "banana"}), "banana"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"$ref": "https://example.com/a.json"}), "not fetch"),
        (lark("start: other"), "unknown name"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="{"), "EOF"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    demo: World, grammar: Grammar, reason: str
) -> None:
    tokenizer = open_tokenizer(demo.folder, vocab_size=demo.vocab_size, eos_token_ids=(demo.eos,))
    with pytest.raises(GrammarRefused, match=reason):
        new_matcher(tokenizer, grammar)


def test_gbnf_becomes_lark_and_lark_stays(demo: World) -> None:
    converted = as_lark('root ::= "v" number\nnumber ::= [0-9]\n')
    assert re.fullmatch(r"v[0-9]", demo.text(demo.generate(replace(demo.base, grammar=lark(converted)))))
    assert as_lark('start: "x"') == 'start: "x"'


def test_the_worker_takes_its_tokens_from_the_model_folder_and_replays_after_a_preemption(
    llama: PlanDriver,
) -> None:
    params = SamplingParams(temperature=2.0, grammar=regex(r"[ab]{30}"), seed=7)
    staying, leaving, free = (llama.add([1, 2, 3, 4, 5], each) for each in (params, params, GREEDY))
    llama.generate([staying, leaving, free], 6)
    llama.preempt(leaving)
    llama.generate([staying, leaving, free], 12)
    assert llama.generated(staying) == llama.generated(leaving)
    assert set(bytes(llama.generated(staying)).decode()) == {"a", "b"}  # its first tokens are the bytes


# Cheap at first: each further letter has more readings, and the masks of later tokens take hundreds of times
# what the first one takes.
AMBIGUOUS = "start: s\ns: /[a-z ]/ | s s | s s s | s s s s"


def test_a_row_whose_masks_grow_dear_ends_soon_and_its_neighbour_goes_on(demo: World) -> None:
    sampler = demo.sampler()
    sampler.add_row(0, replace(demo.base, grammar=lark(AMBIGUOUS), min_tokens=300), [5], 1)
    sampler.add_row(1, replace(demo.base, grammar=regex("[ab]{300}")), [5], 1)
    for step in range(300):
        result = sampler.sample(demo.logits(1, step, 2), [0, 1])
        assert 1 not in result.failed
        if result.failed:
            break
    assert result.unfit == {0}
    assert "the grammar failed" in result.failed[0]


def test_a_grammar_that_fails_is_told_from_a_model_that_does(demo: World) -> None:
    plain, drafted = demo.sampler(), demo.sampler()
    for sampler in (plain, drafted):
        sampler.add_row(0, replace(demo.base, grammar=lark('start: "yes"')), [5, 70, 71], 1)
        sampler.add_row(1, demo.base, [5], 1)
    logits = demo.logits(1, 0, 2)
    logits[1] = torch.nan
    result = plain.sample(logits, [0, 1])
    assert set(result.failed) == {0, 1}
    assert result.unfit == {0}
    verified = drafted.verify(logits, [0, 1], [(), ()])
    assert [bool(each.failure) for each in verified] == [True, True]
    assert [each.is_unfit for each in verified] == [True, False]


class _Matcher:
    """A mask whose cost is what the test says; the library's own depends on the machine."""

    def __init__(self, clock: "_Clock", cost_s: float, advance_s: float = 0.0) -> None:
        self._clock = clock
        self._cost_s = cost_s
        self._advance_s = advance_s
        self.num_masks = self.num_consumed = 0

    def consume_token(self, token_id: int) -> None:
        self.num_consumed += 1
        self._clock.spend(self._advance_s)

    def rollback(self, num_tokens: int) -> None:
        self.num_consumed -= num_tokens

    def is_stopped(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self.num_masks += 1
        self._clock.spend(self._cost_s)

    def is_error(self) -> bool:
        return False


class _Clock:
    """Stands in for the module `time`: each thread's processor time is what its masks have cost."""

    def __init__(self) -> None:
        self._spent = threading.local()

    def spend(self, cost_s: float) -> None:
        self._spent.s = self.thread_time() + cost_s

    def thread_time(self) -> float:
        return getattr(self._spent, "s", 0.0)

    monotonic = thread_time


def _rows(clock: _Clock, costs_s: Sequence[float], *, name: int = 1) -> list[RowGrammar]:
    return [RowGrammar(_Matcher(clock, cost_s), None, name=name) for cost_s in costs_s]


def num_masks(rows: Sequence[RowGrammar]) -> int:
    return sum(row._matcher.num_masks for row in rows)


def num_consumed(rows: Sequence[RowGrammar]) -> int:
    return sum(row._matcher.num_consumed for row in rows)


def test_of_many_choices_that_grow_dear_at_one_token_a_few_are_computed_and_no_neighbour_ends(
    clock: _Clock, grammars: Grammars
) -> None:
    dear, modest = _rows(clock, [0.03] * 128, name=1), _rows(clock, [0.0004] * 100, name=2)
    grammars.begin_step(228)
    grammars.bitmasks([*dear, *modest])
    budget = MAX_STEP_S * min(8, os.cpu_count() or 1)
    assert num_masks(dear) <= budget / 0.03 + 10  # and one more for each thread
    assert sum(bool(row.failure) for row in dear) == 128 - num_masks(dear)
    assert num_masks(modest) == 100
    assert not any(row.failure for row in modest)


def test_a_tokenizer_that_was_opened_ahead_is_not_opened_in_a_step(demo: World, tmp_path: Path) -> None:
    shutil.copy(demo.folder / "tokenizer.json", tmp_path)
    grammars = Grammars(tmp_path, vocab_size=demo.vocab_size, eos_token_ids=(demo.eos,))
    grammars.open_ahead()
    (tmp_path / "tokenizer.json").unlink()
    assert not grammars.row(Grammar(kind=GrammarKind.REGEX, text="a"), ()).failure
    Grammars(tmp_path, vocab_size=demo.vocab_size, eos_token_ids=(demo.eos,)).open_ahead()  # no grammars then


def test_many_modest_rows_all_get_their_masks(clock: _Clock, grammars: Grammars) -> None:
    rows = _rows(clock, [0.0004] * 1000)
    for _ in range(20):
        grammars.begin_step(1000)
        grammars.bitmasks(rows)
    assert num_masks(rows) == 20_000
    assert not any(row.failure for row in rows)


@pytest.mark.parametrize(("cost_s", "num_tokens"), [(0.051, 1), (0.015, 5), (0.0051, 500)])
def test_a_row_may_spend_so_much_and_no_more(
    clock: _Clock, grammars: Grammars, cost_s: float, num_tokens: int
) -> None:
    (row,) = _rows(clock, [cost_s])
    num_computed = 0
    while not row.failure and num_computed < 2 * num_tokens:
        grammars.begin_step(1)
        grammars.bitmasks([row])
        num_computed += 1
    assert num_tokens <= num_computed <= num_tokens + 5


def test_the_masks_of_a_step_have_one_budget_in_however_many_parts_they_are_computed(
    clock: _Clock, grammars: Grammars
) -> None:
    rows = _rows(clock, [0.03] * 64)
    grammars.begin_step(64)
    for part in range(0, 64, 4):
        grammars.bitmasks(rows[part : part + 4])
    assert num_masks(rows) <= MAX_STEP_S * min(8, os.cpu_count() or 1) / 0.03 + 12


def test_to_advance_by_a_token_is_part_of_the_steps_budget(clock: _Clock, grammars: Grammars) -> None:
    rows = [RowGrammar(_Matcher(clock, 0.0001, advance_s=0.03), None) for _ in range(64)]
    for row in rows:
        row.record(7)
    assert not any(row._matcher.num_consumed for row in rows), (
        "a token is read when its successor's mask is due"
    )
    grammars.begin_step(64)
    grammars.bitmasks(rows)
    assert (
        sum(row._matcher.num_consumed for row in rows) <= MAX_STEP_S * min(8, os.cpu_count() or 1) / 0.03 + 12
    )


def test_what_was_not_read_yet_is_taken_back_without_the_matcher(clock: _Clock) -> None:
    row = RowGrammar(_Matcher(clock, 0.0), None)
    before = row.as_now(None)
    for token_id in (7, 8):
        row.record(token_id)
    row.read()
    row.record(9)
    row.go_back(2, to=before)
    assert num_consumed([row]) == 1


def test_a_text_that_takes_too_long_to_read_again_ends_its_row(clock: _Clock) -> None:
    cheap, dear = (RowGrammar(_Matcher(clock, 0.0, advance_s), None) for advance_s in (1e-5, 0.001))
    for row in (cheap, dear):
        [row.record(token_id) for token_id in range(1000)]
        row.read(max_s=MAX_REPLAY_S)
    assert (num_consumed([cheap]), cheap.failure) == (1000, "")
    assert num_consumed([dear]) <= MAX_REPLAY_S / 0.001 + 2
    assert "more processor time" in dear.failure


def test_masks_count_as_progress(clock: _Clock, grammars: Grammars) -> None:
    before = grammar_rows.num_masks_begun()
    grammars.bitmasks(_rows(clock, [0.0001] * 3))
    assert grammar_rows.num_masks_begun() == before + 3
