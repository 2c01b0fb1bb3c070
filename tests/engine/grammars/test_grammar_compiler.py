"""A grammar is tried in a process of its own, which may be killed, and which nothing outlives."""

import asyncio
import gc
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import decoders

from engine.errors import EngineUnavailable, Overloaded, RequestRejected
from engine.grammars import compiler as grammar_compiler
from engine.grammars.compiler import GrammarCompiler
from engine.types import ModelInfo
from scheduler.messages import GRAMMAR_TOO_DEAR, Grammar, GrammarKind
from tests.checkpoints import write_tokenizer
from tests.engine.small_tokenizers import sentencepiece_backend, word_piece_backend

pytestmark = pytest.mark.asyncio(loop_scope="module")

INTEGER = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"integer"}')
# Each level doubles what the compiler has to merge.
ENDLESS = Grammar(
    kind=GrammarKind.JSON_SCHEMA,
    text=json.dumps(
        {
            "$defs": {
                "d0": {"type": "string", "pattern": "a+"},
                **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 40)},
            },
            "$ref": "#/$defs/d39",
        }
    ),
)


def info_of(vocab_size: int) -> ModelInfo:
    return ModelInfo(
        served_names=("m",),
        model_type="llama",
        weight_bytes=1,
        num_parameters=1,
        dtype="float32",
        device="cpu",
        vocab_size=vocab_size,
        max_model_len=64,
        block_size=4,
        num_blocks=4,
        kv_cache_bytes=1,
        eos_token_ids=(2,),
    )


Try = Callable[..., "asyncio.Task[Grammar]"]


@pytest.fixture
def timeout_s() -> float:
    return 60.0


@pytest_asyncio.fixture(loop_scope="module")
async def compiler(tmp_path: Path, timeout_s: float) -> AsyncIterator[GrammarCompiler]:
    write_tokenizer(tmp_path)
    compiler = GrammarCompiler(str(tmp_path), timeout_s=timeout_s)
    yield compiler
    await compiler.close()


@pytest.fixture
def attempt(compiler: GrammarCompiler, tmp_path: Path) -> Try:
    info = info_of(write_tokenizer(tmp_path))
    return lambda grammar: asyncio.create_task(compiler.compile(grammar, info, param="field"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Try]:
    """Trials in one process, for tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("shared")
    info = info_of(write_tokenizer(folder))
    compiler = GrammarCompiler(str(folder), timeout_s=60.0)
    yield lambda grammar: asyncio.create_task(compiler.compile(grammar, info, param="field"))
    await compiler.close()


def used_ticks(pid: int) -> int:
    """Processor time of a process, in hundredths of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


async def busy_with_it(compiler: GrammarCompiler, attempt: Try) -> "tuple[asyncio.Task[Grammar], int]":
    """Begin what has no end, and wait until the process is at it; also its id."""
    await attempt(INTEGER)
    assert compiler._child.pid is not None
    before = used_ticks(compiler._child.pid)
    hopeless = attempt(ENDLESS)
    async with asyncio.timeout(30):
        while used_ticks(compiler._child.pid) < before + 5:
            await asyncio.sleep(0.02)
    return hopeless, compiler._child.pid


async def test_the_process_starts_with_the_first_grammar_and_is_gone_after_close(compiler, attempt) -> None:
    assert compiler._child.pid is None
    assert (await attempt(INTEGER)).text == INTEGER.text
    pid = compiler._child.pid
    assert Path(f"/proc/{pid}").exists()
    await compiler.close()
    assert not Path(f"/proc/{pid}").exists()


async def test_what_was_tried_is_not_tried_again_neither_good_nor_bad(compiler, attempt) -> None:
    bad = Grammar(kind=GrammarKind.REGEX, text="(")
    with pytest.raises(RequestRejected):
        await attempt(bad)
    await attempt(INTEGER)
    await compiler.close()
    assert (await attempt(INTEGER)).text == INTEGER.text
    with pytest.raises(RequestRejected, match="unclosed group"):
        await attempt(bad)
    assert compiler._child.pid is None


async def test_a_refusal_names_the_field_and_repeats_the_reason_at_bounded_length(shared) -> None:
    with pytest.raises(RequestRejected, match=r"^field: .*unknown name") as caught:
        await shared(Grammar(kind=GrammarKind.LARK, text=f"start: x{'y' * 60_000}"))
    assert (caught.value.param, caught.value.code) == ("field", "invalid_grammar")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("timeout_s", [1.0])
async def test_a_grammar_that_takes_too_long_is_refused_in_time_and_the_next_one_is_tried(attempt) -> None:
    await attempt(INTEGER)
    started_s = time.monotonic()
    with pytest.raises(RequestRejected, match=r"more than 1 s; make it simpler") as caught:
        await attempt(ENDLESS)
    assert caught.value.code == "invalid_grammar"
    assert time.monotonic() - started_s < 20.0
    assert await attempt(Grammar(kind=GrammarKind.REGEX, text="a+"))


@pytest.mark.parametrize("timeout_s", [1.0])
async def test_what_the_worker_would_need_long_for_is_refused_however_patient_we_are(
    attempt, monkeypatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_COST_S", 1e-9)
    for _ in range(2):  # remembered, too
        with pytest.raises(RequestRejected, match="of processor time; 1e-09 s are allowed; make it simpler"):
            await attempt(INTEGER)


async def test_what_is_cheap_for_one_choice_may_be_too_much_for_many(compiler, tmp_path, monkeypatch) -> None:
    info = info_of(write_tokenizer(tmp_path))
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(100)}}
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    monkeypatch.setattr(grammar_compiler, "_MAX_COST_S", 60.0)
    cost_s = await cost_of(compiler, grammar, info)
    monkeypatch.setattr(grammar_compiler, "_MAX_COST_OF_ALL_S", cost_s * 10.5)
    tried = await compiler.compile(grammar, info, param="field", num_choices=10)
    assert tried == replace(grammar, cost_s=cost_s)
    with pytest.raises(RequestRejected, match="for each of 11 choices") as told:
        await compiler.compile(grammar, info, param="field", num_choices=11)
    assert told.value.param == "field"


async def cost_of(compiler: GrammarCompiler, grammar: Grammar, info: ModelInfo) -> float:
    await compiler.compile(grammar, info, param="field")
    verdict = compiler._recall(grammar)
    assert verdict is not None
    return verdict.cost_s


def optional_properties(num: int) -> Grammar:
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(num)}}
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))


async def test_what_fails_after_its_first_token_is_refused_before_a_model_writes_it(
    compiler, attempt, monkeypatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_COST_S", 60.0)
    assert await attempt(optional_properties(500))
    for _ in range(2):  # remembered, too
        with pytest.raises(RequestRejected, match=r"fails at its token 2; make it simpler: .*max is") as told:
            await attempt(optional_properties(1100))
        assert told.value.code == "invalid_grammar"
    assert compiler._child.pid is not None


@pytest.mark.parametrize("text", ["yes", "[a-z]+", "(a|)", "😀{2,}", '[^"]*'])
async def test_a_text_that_is_soon_complete_or_never_ends_is_no_failure(shared, text: str) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text=text)
    assert (await shared(grammar)).text == text


@pytest.mark.night
async def test_the_event_loop_goes_on_meanwhile(attempt) -> None:
    hopeless = attempt(ENDLESS)
    longest_s = 0.0
    while not hopeless.done():
        started_s = time.monotonic()
        await asyncio.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - started_s)
    assert longest_s < 0.5
    with pytest.raises(RequestRejected):
        await hopeless


async def test_kill_9_in_the_middle_is_said_and_the_next_one_is_tried(compiler, attempt) -> None:
    hopeless, pid = await busy_with_it(compiler, attempt)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match=r"was killed; the request may be sent again"):
        await hopeless
    other = Grammar(kind=GrammarKind.REGEX, text="a")
    assert (await attempt(other)).text == "a"


async def test_a_crash_by_its_own_doing_is_the_grammars_fault(compiler, attempt) -> None:
    hopeless, pid = await busy_with_it(compiler, attempt)
    os.kill(pid, signal.SIGABRT)
    with pytest.raises(RequestRejected, match="too much memory, or fails"):
        await hopeless


async def test_a_caller_who_gives_up_leaves_no_answer_behind_and_the_process_as_it_is(
    compiler, attempt
) -> None:
    await attempt(INTEGER)
    pid = compiler._child.pid
    given_up = attempt(Grammar(kind=GrammarKind.REGEX, text="[ab]{1,50}"))
    waiting = attempt(Grammar(kind=GrammarKind.REGEX, text="b"))
    for _ in range(3):
        await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert (await waiting).text == "b"
    assert (await attempt(Grammar(kind=GrammarKind.REGEX, text="a"))).text == "a"
    assert compiler._child.pid == pid


async def test_the_verdict_for_a_caller_who_gave_up_serves_the_next(compiler, attempt, monkeypatch) -> None:
    await attempt(INTEGER)
    dear = Grammar(kind=GrammarKind.REGEX, text="[ab]{1,50}")
    given_up = attempt(dear)
    for _ in range(3):
        await asyncio.sleep(0)
    given_up.cancel()
    await attempt(Grammar(kind=GrammarKind.REGEX, text="b"))  # behind it
    monkeypatch.setattr(compiler._child, "ask", None)  # nothing is asked again
    assert (await attempt(dear)).text == "[ab]{1,50}"


async def test_a_refusal_for_a_caller_who_gave_up_is_no_error_in_the_log(compiler, attempt, caplog) -> None:
    hopeless, pid = await busy_with_it(compiler, attempt)
    hopeless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hopeless
    os.kill(pid, signal.SIGABRT)
    assert (await attempt(INTEGER)).text
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_of_many_that_bring_a_grammar_at_once_some_are_sent_away(shared) -> None:
    grammars = [Grammar(kind=GrammarKind.REGEX, text="a" * length) for length in range(1, 41)]
    results = await asyncio.gather(*map(shared, grammars), return_exceptions=True)
    assert [type(result) for result in results] == [Grammar] * 32 + [Overloaded] * 8


async def test_what_the_trial_took_goes_with_the_grammar_to_the_scheduler(shared, monkeypatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_COST_S", 60.0)
    cheap, dear = [(await shared(optional_properties(num))).cost_s for num in (2, 500)]
    assert 0 < cheap < dear / 4


async def test_gbnf_comes_back_as_lark_with_the_rest_of_the_message(shared) -> None:
    tried = await shared(Grammar(kind=GrammarKind.LARK, text='root ::= "a" | "b"\n', begins_after=7))
    assert tried.text.startswith("%llguidance")
    assert tried.begins_after == 7


@pytest.mark.parametrize(
    "text",
    ["", "root", 'root ::= "\\', f'root ::= {"(" * 5000}"a"{")" * 5000}', "root ::= other\n", "start: \0"],
)
async def test_noise_is_refused(shared, text: str) -> None:
    with pytest.raises(RequestRejected, match=r"^field: ."):
        await shared(Grammar(kind=GrammarKind.LARK, text=text))


async def test_a_grammar_without_any_text_is_refused(shared) -> None:
    with pytest.raises(RequestRejected):
        await shared(Grammar(kind=GrammarKind.REGEX, text=r"[^\s\S]"))


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (word_piece_backend(), "WordPiece"),
        (
            sentencepiece_backend(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
            "its decoder is unknown",
        ),
    ],
    ids=["word piece", "other decoder"],
)
async def test_a_tokenizer_that_is_not_understood_is_told_at_once(tmp_path: Path, backend, reason) -> None:
    (tmp_path / "tokenizer.json").write_text(backend.to_str())
    compiler = GrammarCompiler(str(tmp_path), timeout_s=1.0)
    for _ in range(2):
        with pytest.raises(RequestRejected, match=f"tokenizer cannot be constrained: .*{reason}") as caught:
            await compiler.compile(INTEGER, info_of(500), param="field")
        assert caught.value.code == "unsupported_parameter"
    await compiler.close()


async def test_a_folder_without_a_tokenizer_is_a_refusal_not_a_crash(tmp_path: Path) -> None:
    compiler = GrammarCompiler(str(tmp_path), timeout_s=1.0)
    with pytest.raises(RequestRejected, match="field: this model's tokenizer cannot be read"):
        await compiler.compile(INTEGER, info_of(10), param="field")
    await compiler.close()


async def test_a_grammar_that_writes_too_slowly_is_refused_by_its_trial(shared) -> None:
    rule = " | ".join(" ".join(["s"] * num) for num in range(2, 13))
    with pytest.raises(RequestRejected, match=r"^field: the plainest text (takes|fails)"):
        await shared(Grammar(kind=GrammarKind.LARK, text=f"start: s\ns: /[a-z ]/ | {rule}"))


async def test_tokens_that_are_dear_for_many_choices_are_priced_by_the_trial(
    compiler, tmp_path, monkeypatch
) -> None:
    info = info_of(write_tokenizer(tmp_path))
    await compiler.compile(INTEGER, info, param="field")
    mask_s = compiler._recall(INTEGER).mask_s
    assert mask_s > 0
    monkeypatch.setattr(grammar_compiler, "_MAX_MASKS_OF_ALL_S", mask_s * 10.5)
    await compiler.compile(INTEGER, info, param="field", num_choices=10)
    with pytest.raises(RequestRejected, match="one token of each of 11 choices"):
        await compiler.compile(INTEGER, info, param="field", num_choices=11)


async def test_a_grammar_that_ended_a_request_is_refused_from_then_on(attempt, compiler) -> None:
    gbnf = Grammar(kind=GrammarKind.LARK, text='root ::= "a" | "b"\n')
    compiler.blame(await attempt(gbnf), f"the grammar failed: {GRAMMAR_TOO_DEAR}")
    for _ in range(2):
        with pytest.raises(RequestRejected, match="an earlier request with it was ended: the grammar failed"):
            await attempt(gbnf)
    assert await attempt(INTEGER)


async def test_a_failure_that_others_may_not_share_is_forgotten(attempt, compiler) -> None:
    gbnf = Grammar(kind=GrammarKind.LARK, text='root ::= "a" | "b"\n')
    compiler.blame(await attempt(gbnf), "the grammar failed: nothing can follow")
    assert await attempt(gbnf)


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.LARK])
async def test_a_pattern_that_matches_a_property_is_refused_from_the_first_request_on(attempt, kind) -> None:
    """The library takes it, and fails in some texts."""
    inner = {"properties": {"ab": {"type": "integer"}}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"x": {"type": "object", **inner}}, "required": ["x"]}
    text = json.dumps(schema)
    assert await attempt(
        Grammar(kind=kind, text=text if kind is GrammarKind.JSON_SCHEMA else f"start: %json {text}")
    )
    schema["properties"]["x"]["patternProperties"] = {"^a": {"type": "integer"}}
    text = json.dumps(schema)
    with pytest.raises(RequestRejected, match="matches the property 'ab' as well"):
        await attempt(
            Grammar(kind=kind, text=text if kind is GrammarKind.JSON_SCHEMA else f"start: %json {text}")
        )
