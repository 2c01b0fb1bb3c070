"""Stop strings count from the first visible character of the answer on."""

from itertools import pairwise

import pytest

from engine.text.detokenizer import StopMatcher
from scheduler.input_messages import AnswerStart

OPEN = AnswerStart(text="</think>")
POSSIBLE = AnswerStart(text="</think>", begin="<think>")


def read(
    answer: AnswerStart | None, stop: str, pieces: list[str], min_tokens: int = 0
) -> tuple[str, str | None]:
    matcher = StopMatcher((stop,), answer=answer, min_tokens=min_tokens)
    shown = "".join(map(matcher.push, pieces)) + matcher.finish()
    return shown, matcher.matched


@pytest.mark.parametrize(
    ("answer", "stop", "text", "shown"),
    [
        (OPEN, "STOP", "a STOP b</think>\n\nc STOP d", "a STOP b</think>\n\nc "),
        (OPEN, "\n\n", "a\n\nb</think>\n\nc\n\nd", "a\n\nb</think>\n\nc"),
        (OPEN, "STOP", "a STOP </thinSTOP", "a STOP </thinSTOP"),
        (OPEN, "x", "</think></think>x", "</think></think>"),
        (POSSIBLE, "STOP", "\n<think>STOP</think>STOP", "\n<think>STOP</think>"),
        (POSSIBLE, "STOP", "<thinSTOP", "<thin"),
        (POSSIBLE, "STOP", "An answer STOP</think>", "An answer "),
        (POSSIBLE, "\n\n", "\n\nHi\n\nyou", "\n\nHi"),
        (POSSIBLE, "STOP", " <thi", " <thi"),
    ],
)
def test_stop_strings_count_in_the_answer_however_the_text_is_cut(answer, stop, text, shown) -> None:
    matched = None if shown == text else stop
    assert read(answer, stop, [text]) == (shown, matched)
    assert read(answer, stop, list(text)) == (shown, matched)
    for cut in range(1, len(text)):
        for places in ([0, cut, len(text)], [0, cut // 2, cut, len(text)]):
            assert read(answer, stop, [text[a:b] for a, b in pairwise(places)]) == (shown, matched)


@pytest.mark.parametrize(
    ("answer", "pieces", "min_tokens", "shown"),
    [
        (None, ["a", "STOP", "b", "STOP", "c"], 2, "aSTOPb"),
        (None, ["a", "STOP", "b"], 3, "aSTOPb"),
        (None, ["a", "ST", "OP", "b"], 2, "a"),
        (None, ["a", "ST", "OP", "b"], 3, "aSTOPb"),
        (OPEN, ["STOP", "</think>", "STOP", "a", "STOP"], 3, "STOP</think>STOPa"),
    ],
)
def test_a_stop_string_that_ends_within_the_first_tokens_is_text(answer, pieces, min_tokens, shown) -> None:
    matched = None if shown == "".join(pieces) else "STOP"
    assert read(answer, "STOP", pieces, min_tokens) == (shown, matched)


def test_text_held_behind_the_first_tokens_ends_no_reply_by_a_shorter_stop_string() -> None:
    matcher = StopMatcher(("abc", "b"), min_tokens=1)
    assert "".join(map(matcher.push, ["ab", "x"])) + matcher.finish() == "abx"
    assert matcher.matched is None
