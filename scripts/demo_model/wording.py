"""How ordinary people type: courtesy, casing, punctuation and slips.

Owns: the variation of a request's wording, and invented words and names.
Never: what is asked or answered.
"""

import re
from random import Random

from word_table import words
from world import NAMES

_ONSETS = words("b c d f g h j k l m n p r s t v w z br ch cl cr dr fl gr kr pl qu sh sk sl sp st th tr")
_VOWELS = words("a e i o u a e i o ai ee oo ou ea y")
_CODAS = ("", "", "", "n", "r", "l", "s", "m", "t", "k", "x", "nd", "rt", "lo", "ck")

_REQUEST_FRAMES = ("{0}.", "{0}.", "{0}.", "{0}", "{0}!", "Please {1}.", "please {1}", "{0}, please.",
    "{0} please", "Can you {1}?", "Could you {1}?", "Could you please {1}?", "Would you {1}?",
    "Will you {1}?", "I want you to {1}.", "I would like you to {1}.", "Can you please {1}?", "Hey, {1}.",
    "Hi, can you {1}?", "Now {1}.", "Ok, {1}.", "Next, {1}.", "Go ahead and {1}.", "Try to {1}.",
    "Hello! Please {1}.", "And now {1}.", "{0} for me.", "Are you able to {1}?", "Would you please {1}?",
    "I need you to {1}.", "Let's see you {1}.", "Kindly {1}.",
)  # fmt: skip

_QUESTION_FRAMES = ("{0}", "{0}", "{0}", "{0}", "{0}", "{0}", "{0}", "Hey, {1}", "Hello, {1}", "Hi! {0}",
    "Please tell me: {1}", "Tell me, {1}", "Quick question: {1}", "I have a question. {0}", "Ok, {1}",
    "So {1}", "And {1}", "Now, {1}", "Question: {1}", "{0} Do you know?", "One more thing: {1}",
    "I wonder: {1}", "Can you tell me: {1}", "{0} Please answer.", "Well, {1}",
    "Do you know this? {0}",
)  # fmt: skip


def request(rng: Random, core: str, *, verbatim: str = "") -> str:
    """Dress an imperative such as "tell me a story"; `verbatim` is a part that keeps its spelling."""
    frame = rng.choice(_REQUEST_FRAMES)
    text = frame.format(_upper_first(core), core)
    return restyle(rng, text, verbatim=verbatim)


def question(rng: Random, core: str, *, verbatim: str = "") -> str:
    """Dress a question such as "What is 2 + 2?"; `verbatim` is a part that keeps its spelling."""
    lowered = core if core.startswith(("I ", "I'")) else core[0].lower() + core[1:]
    text = rng.choice(_QUESTION_FRAMES).format(core, lowered)
    return restyle(rng, text, verbatim=verbatim)


def restyle(rng: Random, text: str, *, verbatim: str = "") -> str:
    """Change case and punctuation and make slips, everywhere but inside `verbatim`."""
    parts = text.split(verbatim, 1) if verbatim else [text]
    draw = rng.random()
    if draw < 0.30:
        parts = [part.lower() for part in parts]
    elif draw < 0.33:
        parts = [part.upper() for part in parts]
    if rng.random() < 0.25 and len(parts[-1]) > 1:
        parts[-1] = parts[-1].rstrip(".?!")
    elif rng.random() < 0.06:
        parts[-1] = parts[-1] + rng.choice(("!", "?", "??", "!!", "...", " :)", " "))
    if rng.random() < 0.06:
        parts[0] = _slip(rng, parts[0])
    return verbatim.join(parts).strip()


def _slip(rng: Random, text: str) -> str:
    # "count" is left alone: one of its slips is rude.
    spans = [match.span() for match in re.finditer(r"\b(?!count)[A-Za-z]{4,}", text, re.IGNORECASE)]
    if not spans:
        return text
    start, end = rng.choice(spans)
    at = rng.randrange(start + 1, end - 1)
    if rng.random() < 0.5:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :]


def _upper_first(text: str) -> str:
    return text[0].upper() + text[1:]


def invented_word(rng: Random) -> str:
    """One to four random syllables, lower case."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4)))
    )


def person_name(rng: Random) -> str:
    """A common first name or, as often, one nobody has heard: copying must not depend on a list."""
    if rng.random() < 0.5:
        return rng.choice(NAMES)
    return invented_word(rng).capitalize()


def join_words(items: list[str] | tuple[str, ...]) -> str:
    """Write ["a", "b", "c"] as "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def with_article(noun: str) -> str:
    """Put "a" or "an" before a noun."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
