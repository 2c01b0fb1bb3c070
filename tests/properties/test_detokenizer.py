"""However tokens are cut into pushes, the joined text is the text of decoding them all at once."""

import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.text.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopMatcher, StopText
from engine.text.tokenizer import DecoderKind, SpecialTokens, Tokenizer
from tests.engine import small_tokenizers

TOKENIZERS = {
    "byte_level": small_tokenizers.byte_level,
    "sentencepiece": small_tokenizers.sentencepiece,
    "sentencepiece_without_strip": small_tokenizers.sentencepiece_without_strip,
    "metaspace": small_tokenizers.metaspace,
    "word_piece": small_tokenizers.word_piece,
    "byte_fallback_bpe": small_tokenizers.byte_fallback_bpe,
    "byte_level_with_added_tokens": small_tokenizers.byte_level_with_added_tokens,
    "sentencepiece_with_added_tokens": small_tokenizers.sentencepiece_with_added_tokens,
    "word_piece_with_added_tokens": small_tokenizers.word_piece_with_added_tokens,
}

phrases = st.sampled_from(
    [
        *small_tokenizers.SAMPLE,
        "fox jumps",
        " lazy",
        "😀😃",
        "👩‍👩‍👧",
        "e\u0301\u0301",
        "日本",
        "\n\n# stop",
        "é x",
        "�",
        "<s>",
        "<tool>",
        "new word",
        " spaced ",
        "<|im_end|>",
        "",
    ]
)
texts = st.lists(phrases | st.text(max_size=8), max_size=4).map(" ".join)
cuts = st.lists(st.integers(min_value=0, max_value=5), max_size=40)
modes = st.sampled_from(SpecialTokens)
names = st.sampled_from(sorted(TOKENIZERS))


def streams(tokenizer: Tokenizer) -> st.SearchStrategy[tuple[int, ...]]:
    """Texts as a model would write them, and noise, with ids that no token has."""
    as_written = texts.map(tokenizer.encode_rendered_chat)
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12).map(tuple)
    return st.lists(as_written | noise, max_size=3).map(lambda parts: sum(parts, ()))


def pieces_of(detokenizer: IncrementalDetokenizer, token_ids: tuple[int, ...], cut: list[int]) -> list[str]:
    pieces, at = [], 0
    for length in cut:
        pieces.append(detokenizer.push(token_ids[at : at + length]))
        at += length
    return [*pieces, detokenizer.push(token_ids[at:]), detokenizer.finish()]


def assume_well_defined(tokenizer: Tokenizer, whole: str) -> None:
    """A malformed run of <0xNN> tokens spoils good characters in a whole decode, not in ours."""
    assume(tokenizer.rule.kind is DecoderKind.BYTE_LEVEL or REPLACEMENT not in whole)


def first_match(text: str, stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Slow and obvious: the first character at which a stop string is complete, and its longest one."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), end, longest
    return None


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=60, deadline=None)
@given(data=st.data(), cut=cuts, special=modes)
def test_pieces_join_to_the_whole_text_wherever_the_stream_is_cut(name, data, cut, special) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = data.draw(streams(tokenizer))
    whole = tokenizer.decode(token_ids, special=special)
    pieces = pieces_of(IncrementalDetokenizer(tokenizer, special=special), token_ids, cut)
    if REPLACEMENT in "".join(pieces):
        assert REPLACEMENT in whole
    assume_well_defined(tokenizer, whole)
    assert "".join(pieces) == whole


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=50, deadline=None)
@given(data=st.data(), cut=cuts, special=modes)
def test_text_after_a_prompt_is_what_it_adds_to_the_prompt(name, data, cut, special) -> None:
    tokenizer = TOKENIZERS[name]()
    prompt, output = data.draw(streams(tokenizer)), data.draw(streams(tokenizer))
    before = tokenizer.decode(prompt, special=special)
    whole = tokenizer.decode(prompt + output, special=special)
    assume(REPLACEMENT not in whole and whole.startswith(before))
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt, special=special)
    assert "".join(pieces_of(detokenizer, output, cut)) == whole[len(before) :]


def test_a_prompt_whose_tail_begins_inside_a_character_leaves_the_reply_whole() -> None:
    """The tail that gives context is cut by tokens; three of them are one character here."""
    tokenizer = small_tokenizers.metaspace()
    character = tokenizer.encode_rendered_chat("က")[-3:]
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=character * 2)
    assert detokenizer.push(character) + detokenizer.finish() == "က"


@settings(max_examples=80, deadline=None)
@given(data=st.data(), name=names, cut=cuts, special=modes, stop_text=st.sampled_from(StopText))
def test_text_ends_at_the_stop_string_that_is_complete_first(name, data, cut, special, stop_text) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = data.draw(streams(tokenizer))
    whole = tokenizer.decode(token_ids, special=special)
    assume_well_defined(tokenizer, whole)
    stops = tuple(data.draw(st.lists(stop_strings(whole), min_size=1, max_size=3)))
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop=StopMatcher(stops, stop_text) if stops else None, special=special
    )
    joined = "".join(pieces_of(detokenizer, token_ids, cut))
    match = first_match(whole, stops)
    if match is None:
        assert (joined, detokenizer.matched_stop) == (whole, None)
        assert detokenizer.num_tokens == len(token_ids)
    else:
        start, end, stop = match
        assert joined == whole[: end if stop_text is StopText.INCLUDE else start]
        assert detokenizer.matched_stop == stop
        assert detokenizer.num_tokens == num_tokens_until(tokenizer, token_ids, special, end)


def stop_strings(whole: str) -> st.SearchStrategy[str]:
    """Mostly pieces of the text itself, so that matches and near matches happen."""
    invented = st.sampled_from(["stop", "x", "aaab", " l", "日", "ox j"])
    if not whole:
        return invented
    starts = st.integers(0, len(whole) - 1)
    pieces = st.builds(lambda at, length: whole[at : at + length], starts, st.integers(1, 6))
    return pieces | pieces.map(lambda piece: piece + "~") | invented


def num_tokens_until(
    tokenizer: Tokenizer, token_ids: tuple[int, ...], special: SpecialTokens, end: int
) -> int:
    """Number of tokens that, one by one and without stop strings, bring at least `end` characters."""
    detokenizer = IncrementalDetokenizer(tokenizer, special=special)
    length = 0
    for place, token_id in enumerate(token_ids):
        length += len(detokenizer.push((token_id,)))
        if length >= end:
            return place + 1
    return len(token_ids)


def test_an_emoji_cut_across_pushes_comes_out_whole() -> None:
    tokenizer = small_tokenizers.sentencepiece()
    ids = tokenizer.encode_rendered_chat("😀!")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push((token_id,)) for token_id in ids[:4]] == ["", "", "", "😀"]


def test_a_character_begun_in_the_prompt_is_finished_by_the_output() -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = tokenizer.encode_rendered_chat("日")
    assert len(ids) == 2
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=ids[:1])
    assert detokenizer.push(ids[1:]) == "日"


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.sentencepiece])
def test_a_character_that_the_output_does_not_finish_stays_the_prompts(make) -> None:
    """A prompt of token ids may end anywhere, and a grammar's text would not match with U+FFFD before it."""
    tokenizer = make()
    begun = tokenizer.encode_rendered_chat("😀")[:-1]
    output = tokenizer.encode_rendered_chat("fox")
    for prompt in (begun, tokenizer.encode_rendered_chat("x") + begun[:-1]):
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt)
        assert (detokenizer.push(output) + detokenizer.finish()).strip() == "fox"
        assert IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt).finish() == ""


def test_the_space_of_the_first_word_is_kept_after_a_prompt_and_dropped_without() -> None:
    tokenizer = small_tokenizers.sentencepiece()
    prompt, (fox,) = tokenizer.encode_rendered_chat("lazy"), tokenizer.encode_rendered_chat("fox")
    assert IncrementalDetokenizer(tokenizer, prompt_token_ids=prompt).push((fox,)) == " fox"
    assert IncrementalDetokenizer(tokenizer).push((fox,)) == "fox"


def test_a_wrong_byte_spoils_no_character_that_was_already_whole() -> None:
    tokenizer = small_tokenizers.sentencepiece_without_strip()
    euro = tokenizer.encode_rendered_chat("€")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push((*euro, euro[1])) + detokenizer.finish() == "€" + REPLACEMENT


@pytest.mark.parametrize("make", [small_tokenizers.byte_level, small_tokenizers.metaspace])
def test_endless_noise_is_not_held_back_for_ever(make) -> None:
    tokenizer = make()
    (token_id,) = (i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xff")
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert len(detokenizer.push((token_id,) * 200)) > 150


def test_what_may_become_a_stop_string_is_held_back_and_then_released() -> None:
    tokenizer = small_tokenizers.byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=StopMatcher(("# stopping",)))
    ids = tokenizer.encode_rendered_chat("x # sto")
    assert detokenizer.push(ids) == "x "
    assert detokenizer.push(tokenizer.encode_rendered_chat("re")) == "# store"
    assert detokenizer.push(ids) + detokenizer.finish() == "x # sto"


def test_tokens_after_the_stop_string_give_no_text_and_are_not_counted() -> None:
    tokenizer = small_tokenizers.byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=StopMatcher(("lazy",)))
    ids = tokenizer.encode_rendered_chat("the lazy dog")
    assert detokenizer.push(ids + ids) == "the "
    assert detokenizer.push(ids) + detokenizer.finish() == ""
    assert detokenizer.matched_stop == "lazy"
    assert tokenizer.decode(ids[: detokenizer.num_tokens], special=SpecialTokens.KEEP) == "the lazy"


def test_an_empty_stop_string_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        IncrementalDetokenizer(small_tokenizers.byte_level(), stop=StopMatcher(("a", "")))


def test_a_token_costs_microseconds() -> None:
    tokenizer = small_tokenizers.byte_level()
    ids = tokenizer.encode_rendered_chat("hello world, hello there: naïve café\n" * 200)
    for stop in ((), ("###", "\n\nUser:")):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=StopMatcher(stop))
        started = time.thread_time()
        for token_id in ids:
            detokenizer.push((token_id,))
        assert (time.thread_time() - started) / len(ids) < 100e-6  # measured 1 to 3; a slow machine may pass


@given(names, st.data(), cuts)
@settings(max_examples=80, deadline=None)
def test_shown_special_tokens_are_text_although_the_others_are_skipped(name, data, cut) -> None:
    tokenizer = TOKENIZERS[name]()
    token_ids = data.draw(streams(tokenizer))
    special = [token_id for token_id in set(token_ids) if tokenizer.is_special(token_id)]
    shown = frozenset(data.draw(st.sets(st.sampled_from(special))) if special else ())
    left = tuple(one for one in token_ids if one in shown or not tokenizer.is_special(one))
    found = IncrementalDetokenizer(tokenizer, shown=shown)
    expected = IncrementalDetokenizer(tokenizer, special=SpecialTokens.KEEP)
    assert "".join(pieces_of(found, token_ids, cut)) == "".join(pieces_of(expected, left, cut))
