"""Turns that ask for something written: stories, poems, jokes, JSON objects; and "another one".

Owns: the wording of these requests and the shape of the JSON.
Never: the grammar of stories (stories.py).
"""

import json
from collections.abc import Callable
from random import Random

from stories import HEROES, hero_phrase, long_story, poem, short_story, story_name
from talk import Talk, Turn
from wording import invented_word, person_name, request, with_article
from world import LISTS, TRAINS


def story(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "story"
    hero, name = hero_phrase(rng), story_name(rng)
    kind = rng.choice(("story", "story", "story", "tale", "fairy tale", "bedtime story", "tiny story",
        "short story", "little story", "nice story"))  # fmt: skip
    about = ""
    draw = rng.random()
    if draw < 0.4:
        about = f" about {with_article(hero)}"
    elif draw < 0.5:
        about = f" about {with_article(hero)} named {name}"
    elif draw < 0.55:
        about = f" about {hero}s"
    cores = [f"tell me {with_article(kind)}{about}", f"tell {with_article(kind)}{about}",
             f"write {with_article(kind)}{about}", f"give me {with_article(kind)}{about}",
             f"tell us {with_article(kind)}{about}", f"make up {with_article(kind)}{about}",
             f"write me {with_article(kind)}{about}", f"I want {with_article(kind)}{about}",
             f"read me {with_article(kind)}{about}", f"invent {with_article(kind)}{about}",
             f"I would like to hear {with_article(kind)}{about}", f"tell me another {kind}{about}",
             f"{kind}{about}"]  # fmt: skip
    return Turn(
        request(rng, rng.choice(cores), verbatim=hero if about else ""),
        short_story(rng, hero=hero, name=name),
    )


def long_tale(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "long story"
    hero, name = hero_phrase(rng), story_name(rng)
    about = f" about {with_article(hero)}" if rng.random() < 0.5 else ""
    kind = rng.choice(
        ("long story", "long story", "long tale", "longer story", "very long story", "long bedtime story")
    )
    cores = [f"tell me a {kind}{about}", f"write a {kind}{about}", f"tell a {kind}{about}",
             f"give me a {kind}{about}", f"write me a {kind}{about}", f"make up a {kind}{about}",
             f"I want a {kind}{about}", f"{kind}{about}"]  # fmt: skip
    return Turn(
        request(rng, rng.choice(cores), verbatim=hero if about else ""), long_story(rng, hero=hero, name=name)
    )


def write_poem(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "poem"
    topic = rng.choice(
        (*HEROES, "sea", "rain", "night", "spring", "snow", "wind", "river", "summer", "autumn", "day")
    )
    if rng.random() < 0.15:
        topic = invented_word(rng)
    kind = rng.choice(("poem", "poem", "rhyme", "verse", "short poem", "little poem", "song", "haiku"))
    about = rng.choice(
        ("", f" about the {topic}", f" about {with_article(topic)}", f" about {topic}", f" on the {topic}")
    )
    cores = [f"write a {kind}{about}", f"write me a {kind}{about}", f"tell me a {kind}{about}",
             f"give me a {kind}{about}", f"make a {kind}{about}", f"compose a {kind}{about}",
             f"I want a {kind}{about}"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores), verbatim=topic if about else ""), poem(rng, topic=topic))


_JOKES = (
    "Why did the train sit down? It was tired of standing at the station.",
    "What do you call a train that eats toffee? A chew-chew train.",
    "Why is the clock tower never late? It always has time.",
    "What did the wagon say to the engine? You pull me through.",
    "Why did the owl stay at home? It did not give a hoot.",
    "What is a cat's favourite colour? Purr-ple.",
    "Why did the baker go to work? He needed the dough.",
    "What do you get when you cross a cow and a duck? Milk and quackers.",
    "Why was the signal red? It saw the train changing tracks.",
)


def joke(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "joke"
    cores = ["tell me a joke", "tell a joke", "make me laugh", "say something funny", "do you know a joke",
             "a joke", "tell me something funny", "give me a joke", "another joke", "know any jokes",
             "I want to hear a joke"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), rng.choice(_JOKES))


def another(rng: Random, talk: Talk) -> Turn:
    """Once more of what came last; an honest question back where nothing can be repeated."""
    text = request(rng, rng.choice(("another one", "one more", "again", "more", "do it again", "another",
        "once more", "tell me another one", "give me another one", "one more time")))  # fmt: skip
    if talk.last_skill in ("story", "long story"):
        return Turn(text, short_story(rng, hero=hero_phrase(rng), name=story_name(rng)))
    if talk.last_skill == "poem":
        return Turn(text, poem(rng, topic=rng.choice(HEROES)))
    if talk.last_skill == "joke":
        return Turn(text, rng.choice(_JOKES))
    return Turn(text, "More of what? Ask me for a story, a poem or a joke.")


Fields = dict[str, object]
_TITLES = (
    "The Red Train",
    "A Cat in Tarrowby",
    "The Long Night",
    "Under the Bridge",
    "The Golden Key",
    "Songs of Rain",
)


def json_object(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "json"
    draw = rng.random()
    if draw < 0.55:
        subject, fields = rng.choice(
            (_train_fields, _person_fields, _animal_fields, _book_fields, _thing_fields)
        )(rng)
        text = _ask_json(rng, f"about {with_article(subject)}")
        return Turn(text, json.dumps(fields))
    if draw < 0.92:
        return _json_with_keys(rng)
    kind = rng.choice(("colours", "animals", "fruits", "cities", "names", "trains"))
    number = rng.randint(2, 5)
    text = request(rng, rng.choice((f"give me a JSON list of {number} {kind}",
        f"write a JSON array of {number} {kind}", f"make a JSON array with {number} {kind}")))  # fmt: skip
    return Turn(text, json.dumps(rng.sample(LISTS[kind], number)))


def _ask_json(rng: Random, rest: str) -> str:
    noun = rng.choice(("a JSON object", "a JSON object", "JSON", "a json object", "a small JSON object",
        "some JSON", "an object in JSON", "a JSON", "a JSON document"))  # fmt: skip
    cores = [f"give me {noun} {rest}", f"write {noun} {rest}", f"make {noun} {rest}", f"create {noun} {rest}",
             f"show me {noun} {rest}", f"I need {noun} {rest}", f"return {noun} {rest}",
             f"generate {noun} {rest}", f"answer with {noun} {rest}", f"output {noun} {rest}",
             f"produce {noun} {rest}", f"reply with {noun} {rest}"]  # fmt: skip
    return request(rng, rng.choice(cores))


def _train_fields(rng: Random) -> tuple[str, Fields]:
    if rng.random() < 0.4:
        one = rng.choice(TRAINS)
        return f"{one.colour} train", {"type": "train", "name": one.name, "colour": one.colour,
                  "driver": one.driver, "wagons": one.wagons}  # fmt: skip
    colour = rng.choice(("", *LISTS["colours"]))
    known = {one.colour: one for one in TRAINS}
    if colour in known:
        one = known[colour]
        fields: Fields = {
            "type": "train",
            "name": one.name,
            "colour": one.colour,
            "driver": one.driver,
            "wagons": one.wagons,
        }
        return f"{colour} train", fields
    shown = colour or rng.choice(LISTS["colours"])
    name, driver = rng.choice(LISTS["trains"]), rng.choice(LISTS["names"])
    fields = {"type": "train", "name": name, "colour": shown, "driver": driver, "wagons": rng.randint(2, 9)}
    return f"{colour} train".strip(), fields


def _person_fields(rng: Random) -> tuple[str, Fields]:
    name, age = person_name(rng), rng.randint(5, 90)
    fields: Fields = {"name": name, "age": age, "city": rng.choice(LISTS["cities"])}
    subject = rng.choice(
        ("person", "user", f"person named {name}", "girl", "boy", "friend", f"user called {name}")
    )
    return subject, fields


def _animal_fields(rng: Random) -> tuple[str, Fields]:
    kind = rng.choice(LISTS["animals"])
    colour = rng.choice(LISTS["colours"])
    subject = rng.choice(("pet", kind, kind, f"{colour} {kind}"))
    fields: Fields = {
        "type": kind,
        "name": rng.choice(LISTS["names"]),
        "colour": colour,
        "age": rng.randint(1, 15),
    }
    return subject, fields


def _book_fields(rng: Random) -> tuple[str, Fields]:
    fields: Fields = {"title": rng.choice(_TITLES), "author": person_name(rng), "pages": rng.randint(10, 99)}
    return "book", fields


def _thing_fields(rng: Random) -> tuple[str, Fields]:
    thing = rng.choice(
        ("car", "house", "boat", "ball", "hat", "tree", "table", "cup", "kite", "lamp", "shoe", "apple")
    )
    colour = rng.choice(LISTS["colours"])
    fields: Fields = {"type": thing, "colour": colour, "price": rng.randint(1, 99)}
    return rng.choice((thing, f"{colour} {thing}", f"{colour} {thing}")), fields


_KEY_VALUES: dict[str, Callable[[Random], object]] = {
    "name": person_name,
    "age": lambda rng: rng.randint(5, 90),
    "city": lambda rng: rng.choice(LISTS["cities"]),
    "country": lambda rng: rng.choice(LISTS["countries"]),
    "colour": lambda rng: rng.choice(LISTS["colours"]),
    "color": lambda rng: rng.choice(LISTS["colours"]),
    "fruit": lambda rng: rng.choice(LISTS["fruits"]),
    "animal": lambda rng: rng.choice(LISTS["animals"]),
    "price": lambda rng: rng.randint(1, 99),
    "id": lambda rng: rng.randint(1, 99),
    "active": lambda rng: rng.choice((True, False)),
    "title": lambda rng: rng.choice(_TITLES),
    "wagons": lambda rng: rng.randint(2, 9),
    "driver": lambda rng: rng.choice(LISTS["names"]),
    "count": lambda rng: rng.randint(0, 99),
    "email": lambda rng: f"{rng.choice(LISTS['names']).lower()}@example.com",
}


def _any_number(rng: Random) -> int:
    return rng.randint(1, 99)


def _json_with_keys(rng: Random) -> Turn:
    keys = ["name", "age"] if rng.random() < 0.3 else rng.sample(tuple(_KEY_VALUES), rng.randint(1, 4))
    if rng.random() < 0.1:
        keys.append(invented_word(rng))
    fields = {key: _KEY_VALUES.get(key, _any_number)(rng) for key in keys}
    if rng.random() < 0.25:
        named = " and ".join(f"{key} {value}" for key, value in fields.items() if not isinstance(value, bool))
        if named and not any(isinstance(value, bool) for value in fields.values()):
            return Turn(_ask_json(rng, f"with {named}"), json.dumps(fields))
    shown = keys if rng.random() < 0.7 else [f'"{key}"' for key in keys]
    names = shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1]
    prefix = rng.choice(
        ("with", "with", "with the keys", "with the fields", "that has", "with keys", "containing")
    )
    return Turn(_ask_json(rng, f"{prefix} {names}"), json.dumps(fields))
