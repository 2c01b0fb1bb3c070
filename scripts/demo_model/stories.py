"""Tiny stories and poems from a small grammar.

Owns: the grammar; short stories of about 60 to 150 tokens, long ones of about 300, four-line poems.
Never: the request that asks for them (story_skills.py).
"""

from dataclasses import dataclass
from random import Random

from word_table import phrases, words
from wording import invented_word, with_article
from world import NAMES

HEROES = phrases(
    """fox|mouse|rabbit|bear|owl|cat|dog|duck|frog|hedgehog|squirrel|badger|horse|goat|sheep|cow|pig|hen
    |goose|bee|snail|turtle|wolf|lion|elephant|monkey|giraffe|whale|fish|crab|dragon|robot|giant|wizard
    |princess|prince|knight|pirate|king|queen|girl|boy|baker|farmer|sailor|tailor|teacher|driver|train
    |engine|wagon|tram|boat|kite|teapot|clock|lantern|snowman|cloud|star|moon|tree|witch|fairy|ghost
    |dinosaur|penguin|puppy|kitten|bird|spider|ant|butterfly|unicorn|mermaid|astronaut|gardener|painter
    |shepherd|postman|doctor|musician|tiger|deer|otter|beaver|crow|swan|mole|hamster|parrot|camel|donkey
    |bus|bicycle|balloon|shoe|spoon|pumpkin|flower|car|rocket|computer"""
)

_ADJECTIVES = words(
    "little small young old brave shy clever kind lazy curious happy hungry sleepy quiet tiny lonely busy "
    "funny grey red blue green proud gentle cheerful grumpy"
)
_PLACES = ("in a quiet valley", "by the River Tarn", "in the town of Tarrowby", "at the edge of the forest",
           "on a high hill", "in a small house near the station", "under an old bridge", "beside a blue lake",
           "in a garden full of roses", "in a village by the sea", "near the rail yard", "in a hollow tree",
           "behind the old mill", "on a green island", "in a tall stone tower",
           "at the end of Lantern Street",
)  # fmt: skip
_HABITS = ("Every morning {n} walked to the river and sang a song.",
           "Every day {n} looked out of the window and dreamed.", "{n} liked to watch the trains go by.",
           "{n} liked warm bread and long naps.", "Each evening {n} counted the stars.",
           "{n} knew every path and every stone.", "{n} had many questions and few answers.",
           "{n} had never been far from home.", "Every Saturday {n} went to the market.",
           "{n} loved rainy days most of all.",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Trouble:
    """A want or a mishap, with the ways it may be put right. {n} is the hero, {f} the friend."""

    event: str
    tries: tuple[str, ...]
    endings: tuple[str, ...]


_TROUBLES = (Trouble("One day {n} lost a golden key.",
             ("{n} looked under the bed and behind the door, but the key was not there.",
             "{n} searched the whole garden, but found only a button."),
             ("{f} helped, and together they found the key in a shoe.",
             "At last {f} saw something shine in the grass. It was the key!"), ),
             Trouble("One night a great storm came, and the bridge broke.",
             ("Nobody could cross the river any more.",
             "The water was cold and fast, and everyone was afraid."),
             ("So {n} and {f} brought wood and rope and built a new bridge.",
             "{n} called all the neighbours, and with {f} they built a bridge of stone."), ),
             Trouble("One day {n} wanted to see the sea.",
             ("But the sea was far away, and the road was long.",
             "{n} walked and walked until the sun went down."),
             ("Then {f} came by with a cart and took {n} to the shore.",
             "{f} showed the way, and the next morning they stood before the wide blue sea."), ),
             Trouble("One winter morning there was no food left.",
             ("{n} knocked on every door, but nobody was at home.",
             "The snow was deep and the wind was cold."),
             ("Then {f} opened the door and shared a pot of hot soup.",
             "{f} had saved some apples, and they ate them by the fire."), ),
             Trouble("One day {n} heard somebody crying.", ("It was {f}, who had lost the way home.",
             "Behind a tree sat {f}, small and afraid."), ("{n} took {f} by the hand and led the way home.",
             "{n} told {f} a funny tale, and then they found the way home."), ),
             Trouble("One day the big clock stopped.", ("Nobody knew when to wake up and when to sleep.",
             "The trains were late and the bread was burnt."),
             ("{n} climbed the tower with {f} and found a feather between the wheels.",
             "{n} and {f} cleaned every wheel, and soon the clock said tick and tock."), ),
             Trouble("One spring {n} planted a strange seed.", ("For many days nothing grew.",
             "Rain fell and the sun shone, but the earth stayed brown."),
             ("Then {f} said, wait a little longer. The next day a flower as tall as a house stood there.",
             "{f} brought water each day, and at last a silver tree grew."), ),
             Trouble("One evening {n} found a small box on the road.", ("It had no key and no name on it.",
             "{n} shook it, and something inside went ding."),
             ("{f} knew how to open it. Inside was a bell that made everyone smile.",
             "{n} gave it to {f}, who had lost it. {f} was so glad that they danced."), ),
             Trouble("One day {n} wanted to learn to fly.", ("{n} jumped from a chair and fell on the floor.",
             "{n} made wings of paper, but the wind tore them."),
             ("Then {f} built a kite so big that it carried {n} over the roofs.",
             "{f} came with a red balloon, and up they went."), ),
             Trouble("One foggy morning a train did not come home.",
             ("The yard was quiet and the signal was dark.", "Everyone waited and listened."),
             ("{n} took a lantern, and with {f} walked along the track until they found it.",
             "{n} rang the bell so long that {f} heard it and led the train home."), ),
)  # fmt: skip
_MORALS = (
    "From that day on they were best friends.", "And they lived happily ever after.",
    "That night {n} slept very well.", "And {n} was never lonely again.",
    "Everyone in town still tells this story.", "And {n} learned that it is good to ask for help.",
    "Then they went home and drank hot cocoa.", "And that is how it ended.",
    "And {n} learned that small friends can do great things.",
)  # fmt: skip
_OPENINGS = (
    "Once upon a time there was {a} named {n}, who lived {place}.",
    "Once upon a time, {a} named {n} lived {place}.",
    "Once there was {a} called {n}, who lived {place}.",
    "There once was {a} named {n}, who lived {place}.",
    "Long ago, {a} named {n} lived {place}.",
)
_LINKS = ("But that was not all.", "A week later something new happened.",
          "Soon after that, there was new trouble.", "When summer came, everything changed.",
          "The friends did not rest for long.",
)  # fmt: skip


def hero_phrase(rng: Random) -> str:
    """A hero without article: "fox", "brave robot", now and then an invented creature."""
    noun = rng.choice(HEROES) if rng.random() < 0.85 else invented_word(rng)
    return f"{rng.choice(_ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun


def story_name(rng: Random) -> str:
    if rng.random() < 0.8:
        return rng.choice(NAMES)
    return invented_word(rng).capitalize()


def short_story(rng: Random, *, hero: str, name: str) -> str:
    """One trouble, 60 to 150 tokens."""
    return _story(rng, hero=hero, name=name, num_troubles=1)


def long_story(rng: Random, *, hero: str, name: str) -> str:
    """Four or five troubles, 250 to 400 tokens."""
    return _story(rng, hero=hero, name=name, num_troubles=rng.randint(4, 5))


def _story(rng: Random, *, hero: str, name: str, num_troubles: int) -> str:
    opening = rng.choice(_OPENINGS[:3] if rng.random() < 0.7 else _OPENINGS)
    sentences = [opening.format(a=with_article(hero), n=name, place=rng.choice(_PLACES))]
    sentences.append(rng.choice(_HABITS).format(n=name))
    for number, trouble in enumerate(rng.sample(_TROUBLES, num_troubles)):
        friend = _friend(rng)
        if number:
            sentences.append(rng.choice(_LINKS))
        for line in (
            trouble.event,
            *rng.sample(trouble.tries, rng.randint(1, 2)),
            rng.choice(trouble.endings),
        ):
            filled = line.format(n=name, f=friend)
            sentences.append(filled[0].upper() + filled[1:])
    sentences.append(rng.choice(_MORALS).format(n=name))
    return " ".join(sentences)


def _friend(rng: Random) -> str:
    return rng.choice(("the {0}", "a kind {0}", "an old {0}", "a friendly {0}", "the little {0}")).format(
        rng.choice(HEROES)
    )


_COUPLETS = (
    ("The {t} is bright, the {t} is near,", "It is the best of all the year."),
    ("I saw the {t} at break of day,", "And then it softly went away."),
    ("O little {t}, so soft and light,", "You keep me company at night."),
    ("The {t} goes up, the {t} goes down,", "And all is well in our small town."),
    ("A train went by, the bell went ding,", "And with the {t} I start to sing."),
    ("The moon is high, the stars are few,", "Dear {t}, I always think of you."),
    ("The rain may fall, the wind may blow,", "But where the {t} is, I will go."),
    ("The clock says tick, the clock says tock,", "The {t} sits quiet on a rock."),
)


def poem(rng: Random, *, topic: str) -> str:
    """Two couplets on `topic`, a noun without article."""
    return "\n".join(line.format(t=topic) for couplet in rng.sample(_COUPLETS, 2) for line in couplet)
