"""Turns that ask for facts: the town and its trains, capitals, opposites, animals, days, colours, lists.

Owns: the wording of these questions and answers.
Never: the facts (world.py).
"""

from random import Random

from talk import Talk, Turn
from wording import join_words, question, request, with_article
from world import (
    ANIMALS,
    CAPITALS,
    COLOURS_OF,
    DAYS,
    JOBS,
    LISTS,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
    PLACES,
    TOWN,
    TOWN_FACTS,
    TRAINS,
    Train,
)


def town(rng: Random, _talk: Talk) -> Turn:
    cores, answer, brief = rng.choice(TOWN_FACTS)
    return Turn(question(rng, rng.choice(cores)), answer, brief)


def train(rng: Random, _talk: Talk) -> Turn:
    one = rng.choice(TRAINS)
    name = rng.choice((one.name, one.name, f"the {one.name}", f"train {one.name}", f"the train {one.name}"))
    return rng.choice((_train_colour, _train_driver, _train_cargo, _train_goal, _train_size, _train_summary))(
        rng, one, name
    )


def _train_colour(rng: Random, one: Train, name: str) -> Turn:
    colour = rng.choice(("colour", "color"))
    if rng.random() < 0.4:
        cores = [f"Which train is {one.colour}?", f"What is the {one.colour} train called?",
                 f"What is the name of the {one.colour} train?",
                 f"Is there {with_article(one.colour)} train?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)), f"{one.name} is the {one.colour} train.", f"{one.name}."
        )
    cores = [f"What {colour} is {name}?", f"Which {colour} is {name}?", f"What is the {colour} of {name}?",
             f"What {colour} does {name} have?", f"Tell me the {colour} of {name}.",
             f"Do you know what {colour} {name} is?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), f"{one.name} is {one.colour}.", f"{one.colour.capitalize()}."
    )


def _train_driver(rng: Random, one: Train, name: str) -> Turn:
    colour_name = rng.choice((name, name, f"the {one.colour} train"))
    if rng.random() < 0.4:
        cores = [f"What does {one.driver} drive?", f"Which train does {one.driver} drive?",
                 f"Who is {one.driver}?", f"What train does {one.driver} drive?",
                 f"What is {one.driver}'s train?", f"What does {one.driver} do?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{one.driver} drives {one.name}.", f"{one.name}.")
    cores = [f"Who drives {colour_name}?", f"Who is the driver of {colour_name}?",
             f"Who is driving {colour_name}?", f"What is the name of the driver of {colour_name}?",
             f"Tell me who drives {colour_name}.", f"Do you know who drives {colour_name}?",
             f"{one.name} is driven by whom?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{one.driver} drives {one.name}.", f"{one.driver}.")


def _train_cargo(rng: Random, one: Train, name: str) -> Turn:
    if rng.random() < 0.4:
        cores = [f"Which train carries {one.cargo}?", f"What train carries the {one.cargo}?",
                 f"Who carries {one.cargo}?", f"What carries the {one.cargo}?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{one.name} carries {one.cargo}.", f"{one.name}.")
    cores = [f"What does {name} carry?", f"What is the cargo of {name}?", f"What is on {name}?",
             f"What does {name} transport?", f"What is {name} loaded with?", f"What goods does {name} carry?",
             f"What is in the wagons of {name}?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), f"{one.name} carries {one.cargo}.", f"{one.cargo.capitalize()}."
    )


def _train_goal(rng: Random, one: Train, name: str) -> Turn:
    if rng.random() < 0.4:
        cores = [f"Which train goes to {one.destination}?", f"How do I get to {one.destination}?",
                 f"What train goes to {one.destination}?", f"How can I go to {one.destination}?",
                 f"Which train do I take to {one.destination}?",
                 f"Is there a train to {one.destination}?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)), f"{one.name} goes to {one.destination}.", f"{one.name}."
        )
    cores = [f"Where does {name} go?", f"Where is {name} going?", f"What is the destination of {name}?",
             f"Where does {name} go to?", f"To which town does {name} go?", f"Where is {name} headed?",
             f"Where will {name} take me?", f"Where does {name} travel to?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), f"{one.name} goes to {one.destination}.", f"{one.destination}."
    )


def _train_size(rng: Random, one: Train, name: str) -> Turn:
    if rng.random() < 0.5:
        cores = [f"On which track is {name}?", f"Where does {name} stand?", f"Which track is {name} on?",
                 f"What track does {name} stand on?", f"Where is {name}?",
                 f"Where can I find {name}?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)),
            f"{one.name} stands on track {one.track}.",
            f"Track {one.track}.",
        )
    cores = [f"How many wagons does {name} have?", f"How long is {name}?", f"How many wagons has {name}?",
             f"How many wagons does {name} pull?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{one.name} has {one.wagons} wagons.", f"{one.wagons}.")


def _train_summary(rng: Random, one: Train, name: str) -> Turn:
    cores = [f"Tell me about {name}.", f"What is {name}?", f"Describe {name}.",
             f"What do you know about {name}?", f"Who is {name}?",
             f"Tell me something about {name}."]  # fmt: skip
    kind = with_article(f"{one.colour} train")
    rest = f"{one.driver} drives it to {one.destination}, and it carries {one.cargo}."
    return Turn(question(rng, rng.choice(cores)), f"{one.name} is {kind}. {rest}")


def place(rng: Random, _talk: Talk) -> Turn:
    name, where = rng.choice(tuple(PLACES.items()))
    cores = [f"Where is the {name}?", f"Where can I find the {name}?", f"How do I get to the {name}?",
             f"Where is the {name} of {TOWN}?", f"Do you know where the {name} is?",
             f"Where does the {name} stand?", f"I am looking for the {name}. Where is it?",
             f"Where's the {name}?", f"Tell me where the {name} is.", f"Is there a {name} in {TOWN}?",
             f"Which way to the {name}?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), f"The {name} is {where}.", f"{where[0].upper()}{where[1:]}."
    )


def job(rng: Random, _talk: Talk) -> Turn:
    title, person = rng.choice(tuple(JOBS.items()))
    if rng.random() < 0.35:
        cores = [f"Who is {person}?", f"What does {person} do?", f"What is {person}'s job?",
                 f"Tell me about {person}.", f"Do you know {person}?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{person} is the {title} of {TOWN}.", f"The {title}.")
    cores = [f"Who is the {title}?", f"Who is the {title} of {TOWN}?", f"What is the name of the {title}?",
             f"What is the {title} called?", f"Do you know the {title}?", f"Who is the {title} in {TOWN}?",
             f"Tell me who the {title} is.", f"Does {TOWN} have a {title}?",
             f"Who works as {title}?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{person} is the {title} of {TOWN}.", f"{person}.")


def capital(rng: Random, talk: Talk) -> Turn:
    country, city = rng.choice(tuple(CAPITALS.items()))
    if rng.random() < 0.2 and CAPITALS["England"] != city and country not in ("the USA", "Luxembourg"):
        cores = [f"{city} is the capital of which country?", f"Which country has the capital {city}?",
                 f"What country is {city} the capital of?", f"Where is {city}?", f"What is {city}?",
                 f"In which country is {city}?", f"Tell me about {city}.",
                 f"What country is {city} in?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{city} is the capital of {country}.", f"{country}.")
    asked = country.removeprefix("the ") if rng.random() < 0.3 else country
    follow_up = f"And of {asked}?" if talk.last_skill == "capital" else f"{asked}, what is its capital?"
    cores = [f"What is the capital of {asked}?", f"What is the capital of {asked}?",
             f"What's the capital of {asked}?", f"What is the capital city of {asked}?",
             f"Capital of {asked}?", f"Which city is the capital of {asked}?",
             f"Name the capital of {asked}.", f"Tell me the capital of {asked}.",
             f"Do you know the capital of {asked}?", f"What is {asked}'s capital?",
             f"The capital of {asked}?", f"Whats the capital of {asked}?",
             f"What city is the capital of {asked}?", f"Can you tell me the capital of {asked}?",
             f"The capital of {asked} is?", f"Give me the capital of {asked}.",
             follow_up]  # fmt: skip
    talk.last_skill = "capital"
    return Turn(question(rng, rng.choice(cores)), f"The capital of {country} is {city}.", f"{city}.")


def opposite(rng: Random, _talk: Talk) -> Turn:
    pair = rng.choice(OPPOSITES)
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    quote = rng.choice(("", "", "", '"', "'"))
    asked = f"{quote}{word}{quote}"
    cores = [f"What is the opposite of {asked}?", f"What's the opposite of {asked}?", f"Opposite of {asked}?",
             f"Name the opposite of {asked}.", f"Tell me the opposite of {asked}.",
             f"What is not {asked} but the opposite?", f"Which word is the opposite of {asked}?",
             f"Give me the opposite of {asked}.", f"Do you know the opposite of {asked}?",
             f"What word means the opposite of {asked}?", f"The opposite of {asked}?",
             f"What is the antonym of {asked}?", f"The opposite of {asked} is?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)), f"The opposite of {word} is {other}.", f"{other.capitalize()}."
    )


def animal(rng: Random, _talk: Talk) -> Turn:
    one = rng.choice(ANIMALS)
    a_name = with_article(one.name)
    asked = rng.choice((a_name, a_name, f"the {one.name}"))
    topic = rng.randrange(5)
    if topic == 0:
        cores = [f"How many legs does {asked} have?", f"How many legs has {asked}?",
                 f"{asked} has how many legs?"]  # fmt: skip
        legs = NUMBER_WORDS[one.legs] if one.legs else "no"
        return Turn(
            question(rng, rng.choice(cores)),
            f"{a_name.capitalize()} has {legs} legs.",
            f"{legs.capitalize()}.",
        )
    if topic == 1:
        cores = [f"Where does {asked} live?", f"What is the home of {asked}?", f"Where do you find {asked}?"]
        return Turn(question(rng, rng.choice(cores)), f"{a_name.capitalize()} lives {one.home}.")
    if topic == 2:
        cores = [f"What is the young of {asked} called?", f"What is a baby {one.name} called?",
                 f"What do you call a young {one.name}?", f"What do you call a baby {one.name}?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)), f"A young {one.name} is called {with_article(one.young)}."
        )
    cores = [f"What sound does {asked} make?", f"What does {asked} say?", f"What noise does {asked} make?",
             f"How does {asked} go?", f"Which sound does {asked} make?", f"What is the sound of {asked}?",
             f"Make the sound of {asked}.", f"Do you know what {asked} says?", f"How does {asked} sound?",
             f"What do {one.name}s say?"]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)),
        f"{a_name.capitalize()} says {one.sound}.",
        f"{one.sound.capitalize()}!",
    )


def colour_of(rng: Random, _talk: Talk) -> Turn:
    thing, colour = rng.choice(tuple(COLOURS_OF.items()))
    word = rng.choice(("colour", "color"))
    definite = thing in ("sky", "sun", "sea", "night")
    subject = f"the {thing}" if definite else thing if thing in _MASS_NOUNS else with_article(thing)
    cores = [f"What {word} is {subject}?", f"Which {word} is {subject}?", f"What is the {word} of {subject}?",
             f"What {word} does {subject} have?", f"Tell me the {word} of {subject}."]  # fmt: skip
    return Turn(
        question(rng, rng.choice(cores)),
        f"{subject[0].upper()}{subject[1:]} is {colour}.",
        f"{colour.capitalize()}.",
    )


_MASS_NOUNS = ("grass", "snow", "coal", "blood", "milk", "chocolate", "fire")


def calendar(rng: Random, _talk: Talk) -> Turn:
    names, unit = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    at = rng.randrange(len(names))
    draw = rng.random()
    if draw < 0.35:
        nxt = names[(at + 1) % len(names)]
        is_day = unit == "day"
        indirect = (
            f"Today is {names[at]}. What day is tomorrow?" if is_day else f"Which month follows {names[at]}?"
        )
        cores = [f"What {unit} comes after {names[at]}?", f"Which {unit} is after {names[at]}?",
                 f"What comes after {names[at]}?", f"What {unit} follows {names[at]}?",
                 f"What is the {unit} after {names[at]}?",
                 indirect]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{nxt} comes after {names[at]}.", f"{nxt}.")
    if draw < 0.6:
        last = names[at - 1]
        cores = [f"What {unit} comes before {names[at]}?", f"Which {unit} is before {names[at]}?",
                 f"What comes before {names[at]}?", f"What is the {unit} before {names[at]}?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{last} comes before {names[at]}.", f"{last}.")
    whole = "week" if unit == "day" else "year"
    if draw < 0.7:
        cores = [f"How many {unit}s are in a {whole}?", f"How many {unit}s does a {whole} have?",
                 f"How many {unit}s are there in a {whole}?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)), f"A {whole} has {len(names)} {unit}s.", f"{len(names)}."
        )
    cores = [f"name the {unit}s of the {whole}", f"list the {unit}s of the {whole}",
             f"tell me the {unit}s of the {whole}", f"say the {unit}s of the {whole}",
             f"list all {unit}s of the {whole}", f"name all the {unit}s",
             f"give me the {unit}s of the {whole}", f"what are the {unit}s of the {whole}",
             f"recite the {unit}s of the {whole}", f"write down the {unit}s of the {whole}"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), f"The {unit}s of the {whole} are {join_words(names)}.")


def word_list(rng: Random, _talk: Talk) -> Turn:
    kind = rng.choice(tuple(LISTS))
    count = rng.randint(2, 6)
    asked = rng.choice((str(count), NUMBER_WORDS[count]))
    spelt = kind.replace("colours", rng.choice(("colours", "colors")))
    cores = [f"name {asked} {spelt}", f"list {asked} {spelt}", f"give me {asked} {spelt}",
             f"tell me {asked} {spelt}", f"write a list of {asked} {spelt}",
             f"give me a list of {asked} {spelt}", f"say {asked} {spelt}", f"make a list of {asked} {spelt}",
             f"write down {asked} {spelt}"]  # fmt: skip
    if rng.random() < 0.15:
        count = 4
        cores = [f"name some {spelt}", f"list some {spelt}", f"give me some {spelt}", f"list {spelt}"]
    if rng.random() < 0.15:
        count = 1
        thing = {"cities": "city", "countries": "country"}.get(spelt, spelt[:-1])
        cores = [f"name {with_article(thing)}", f"name one {thing}", f"give me {with_article(thing)}",
                 f"say {with_article(thing)}"]  # fmt: skip
    chosen = join_words(rng.sample(LISTS[kind], count))
    return Turn(request(rng, rng.choice(cores)), f"{chosen[0].upper()}{chosen[1:]}.")
