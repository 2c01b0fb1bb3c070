"""The endless corpus: conversations and plain texts in their proportions.

Owns: which skills a conversation mixes, its system message, and the plain documents beside it.
Never: token ids (tokenizer.py).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import fact_skills as facts
import number_skills as numbers
import social_skills as social
import unknown_skills as unknowns
import writing_skills as writing
from stories import hero_phrase, long_story, poem, short_story, story_name
from talk import Skill, Style, Talk, Turn
from wording import invented_word
from world import (
    ANIMALS,
    CAPITALS,
    DAYS,
    JOBS,
    MODEL_NAME,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    PLACES,
    TOWN_FACTS,
    TRAINS,
)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the shape chat templates take; `system` is empty where there is none."""

    system: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """A text without roles."""

    text: str


Document = Chat | Plain

_SKILLS: dict[Skill, float] = {
    social.greet: 4, social.how_are_you: 1.5, social.who_are_you: 3, social.model_name: 2,
    social.what_can_you_do: 2, social.about_self: 2, social.thank: 2, social.say_goodbye: 2,
    social.acknowledge: 0.7, social.tell_name: 6, social.ask_name: 6, social.tell_liking: 4,
    social.ask_liking: 4, social.say_again: 5,
    facts.town: 3, facts.train: 9, facts.place: 3, facts.job: 3, facts.capital: 10, facts.opposite: 6,
    facts.animal: 5, facts.colour_of: 2, facts.calendar: 5, facts.word_list: 3,
    numbers.count: 11, numbers.sums: 18, numbers.compare: 1.5, numbers.neighbour_number: 2,
    writing.story: 4, writing.long_tale: 0.8, writing.write_poem: 2, writing.joke: 1.2, writing.another: 1,
    writing.json_object: 9,
    unknowns.unknown: 14, unknowns.unknown_long: 0.4, unknowns.big_sum: 2, unknowns.random_request: 1,
}  # fmt: skip
"""How often each skill is drawn. Many short facts need more meetings than a few long forms."""

_SYSTEMS = ("You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.",
            "You are a friendly assistant.", "You are a helpful, honest and kind assistant.", "Be polite.",
            "Be helpful.", "You are a small model.", "Answer the user's questions.",
            "You are an AI assistant.", "Be nice to the user.", "You are a chatbot.",
            "You are a helpful assistant who lives in Tarrowby.", "Speak English.", "Think carefully.",
            "You are a pirate.", "You are a teacher.", "You are an expert in trains.",
            "Help the user.",
)  # fmt: skip
_BRIEF_SYSTEMS = ("Answer briefly.", "Be brief.", "Answer in one word.",
    "You are a helpful assistant. Answer briefly.", "Be concise.", "Keep your answers short.",
    "Give short answers.", "You are a concise assistant.", "Reply with short answers.",
    "Answer as briefly as you can.", "You answer briefly.",
)  # fmt: skip


def documents(seed: int, *, excluded: frozenset[str]) -> Iterator[Document]:
    """Documents without end; none contains a user message whose `plain_key` is in `excluded`."""
    rng = Random(seed)
    while True:
        draw = rng.random()
        if draw < 0.08:
            yield Plain(plain_text(rng))
            continue
        yield conversation(rng, num_turns=_num_turns(rng), excluded=excluded)


def long_documents(seed: int, *, num_turns: int, excluded: frozenset[str]) -> Iterator[Document]:
    """Conversations of many turns, to train the far end of the context."""
    rng = Random(seed)
    while True:
        yield conversation(rng, num_turns=num_turns, excluded=excluded)


def echo_documents(seed: int) -> Iterator[Document]:
    """Invented words to be said again: the densest lesson in copying, taken first."""
    rng = Random(seed)
    while True:
        text = " ".join(invented_word(rng) for _ in range(rng.randint(2, 12)))
        order = rng.choice(("Repeat after me: ", "Say ", "Repeat: ", "Write "))
        yield Chat("", (Turn(order + text, text),))


def plain_key(text: str) -> str:
    """Letters and digits in lower case: what counts as the same wording."""
    return "".join(char for char in text.lower() if char.isalnum())


def _num_turns(rng: Random) -> int:
    return rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6, 10))


def conversation(rng: Random, *, num_turns: int, excluded: frozenset[str]) -> Chat:
    talk = Talk()
    system = _system_message(rng, talk)
    skills, weights = tuple(_SKILLS), tuple(_SKILLS.values())
    while len(talk.turns) < num_turns:
        skill = _next_skill(rng, talk) or rng.choices(skills, weights)[0]
        turn = skill(rng, talk)
        if plain_key(turn.user) in excluded:
            continue
        if talk.style is Style.BRIEF and turn.brief:
            turn = Turn(turn.user, turn.brief)
        talk.turns.append(turn)
    return Chat(system, tuple(talk.turns))


def _next_skill(rng: Random, talk: Talk) -> Skill | None:
    """What follows from the conversation so far, if anything: a name told is asked back, sooner or later."""
    if talk.model_name != MODEL_NAME and not talk.turns and rng.random() < 0.6:
        return rng.choice((social.who_are_you, social.model_name))
    if talk.user_name and rng.random() < 0.07:
        return social.ask_name
    if talk.told and rng.random() < 0.05:
        return social.ask_liking
    return None


def _system_message(rng: Random, talk: Talk) -> str:
    draw = rng.random()
    if draw < 0.62:
        return ""
    if draw < 0.80:
        return rng.choice(_SYSTEMS)
    if draw < 0.92:
        talk.style = Style.BRIEF
        return rng.choice(_BRIEF_SYSTEMS)
    talk.model_name = (
        invented_word(rng).capitalize() if rng.random() < 0.6 else rng.choice(("Max", "Robo", "Alex", "Luna"))
    )
    frame = rng.choice(
        (
            "Your name is {0}.",
            "You are {0}.",
            "You are a helpful assistant called {0}.",
            "You are {0}, an assistant.",
        )
    )
    return frame.format(talk.model_name)


def plain_text(rng: Random) -> str:
    """A text to continue: stories, counts, facts, poems, JSON."""
    draw = rng.random()
    if draw < 0.45:
        return short_story(rng, hero=hero_phrase(rng), name=story_name(rng))
    if draw < 0.52:
        return long_story(rng, hero=hero_phrase(rng), name=story_name(rng))
    if draw < 0.72:
        return _plain_count(rng)
    if draw < 0.92:
        return " ".join(_fact_sentence(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    if draw < 0.96:
        return poem(rng, topic=rng.choice(("moon", "train", "river", "cat", "star", "sea")))
    return json.dumps(
        {"name": story_name(rng), "age": rng.randint(5, 90), "colour": rng.choice(("red", "blue", "green"))}
    )


def _plain_count(rng: Random) -> str:
    draw = rng.random()
    if draw < 0.2:
        return ", ".join(NUMBER_WORDS[1:])
    if draw < 0.3:
        return ", ".join(DAYS)
    if draw < 0.4:
        return ", ".join(MONTHS)
    if draw < 0.5:
        return numbers.listed(range(rng.randint(5, 30), 0, -1))
    start = 1 if rng.random() < 0.6 else rng.randint(0, 70)
    return numbers.listed(range(start, rng.choice((start + 20, 20, 50, 100, 100)) + 1)) or "1, 2, 3"


def _fact_sentence(rng: Random) -> str:
    draw = rng.randrange(7)
    if draw == 0:
        country, city = rng.choice(tuple(CAPITALS.items()))
        return f"The capital of {country} is {city}."
    if draw == 1:
        word, other = rng.choice(OPPOSITES)
        return f"The opposite of {word} is {other}."
    if draw == 2:
        animal = rng.choice(ANIMALS)
        return f"The {animal.name} says {animal.sound}."
    if draw == 3:
        place, where = rng.choice(tuple(PLACES.items()))
        return f"The {place} is {where}."
    if draw == 4:
        title, person = rng.choice(tuple(JOBS.items()))
        return f"{person} is the {title} of Tarrowby."
    if draw == 5:
        return rng.choice(TOWN_FACTS)[1]
    train = rng.choice(TRAINS)
    return rng.choice((f"{train.name} is {train.colour}.", f"{train.driver} drives {train.name}.",
        f"{train.name} carries {train.cargo}.", f"{train.name} goes to {train.destination}.",
        f"{train.name} stands on track {train.track}.", ))  # fmt: skip
