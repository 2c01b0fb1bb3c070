"""Turns about numbers: counting, sums and comparisons.

Owns: their wording and the arithmetic behind the answers.
"""

from random import Random

from talk import Talk, Turn
from wording import question, request
from world import NUMBER_WORDS

_MAX_LISTED = 102
"""No count runs past this many numbers, so that a longest answer stays near 320 tokens."""


def count(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "count"
    draw = rng.random()
    if draw < 0.2:
        return _count_in_words(rng)
    if draw < 0.4:
        return _count_down(rng)
    if draw < 0.5:
        return _count_by_steps(rng)
    return _count_up(rng)


def listed(numbers: range) -> str:
    """range(1, 4) -> "1, 2, 3"."""
    return ", ".join(str(number) for number in numbers)


def _spelt(rng: Random, number: int) -> str:
    return NUMBER_WORDS[number] if number <= 20 and rng.random() < 0.2 else str(number)


def _count_up(rng: Random) -> Turn:
    start = 1 if rng.random() < 0.45 else rng.randint(0, 90)
    stop = min(
        start + (rng.randint(1, 12) if rng.random() < 0.85 else rng.randint(2, 100)), start + _MAX_LISTED, 110
    )
    if start == 1 and rng.random() < 0.25:
        stop = rng.choice((5, 10, 10, 10, 20, 20, 50, 100))
    a, b = _spelt(rng, start), _spelt(rng, stop)
    if start == 1 and rng.random() < 0.5:
        cores = [f"count to {b}", f"count up to {b}", f"count until {b}", f"count to {b} in numbers",
                 f"list the numbers up to {b}", f"count to {b} in digits", f"count to number {b}",
                 f"start counting to {b}"]  # fmt: skip
    else:
        cores = [f"count from {a} to {b}", f"count from {a} up to {b}", f"list the numbers from {a} to {b}",
                 f"count {a} to {b}", f"write the numbers from {a} to {b}", f"count up from {a} to {b}",
                 f"say the numbers from {a} to {b}", f"give me the numbers {a} to {b}",
                 f"count starting at {a} until {b}", f"list all numbers between {a} and {b}",
                 f"write the numbers {a} to {b}", f"print the numbers {a} to {b}"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), listed(range(start, stop + 1)))


def _count_down(rng: Random) -> Turn:
    stop = rng.choice((0, 1, 1, 1, rng.randint(0, 80)))
    start = min(stop + rng.randint(1, 20) if rng.random() < 0.88 else stop + rng.randint(1, 99), 100)
    start = 10 if stop <= 1 and rng.random() < 0.3 else start
    a, b = _spelt(rng, start), _spelt(rng, stop)
    if stop == 1 and rng.random() < 0.4:
        cores = [f"count down from {a}", f"count backwards from {a}", f"do a countdown from {a}",
                 f"start a countdown from {a}", f"count back from {a}"]  # fmt: skip
    else:
        cores = [f"count down from {a} to {b}", f"count backwards from {a} to {b}",
                 f"count from {a} down to {b}", f"list the numbers from {a} down to {b}",
                 f"count back from {a} to {b}", f"count from {a} to {b}",
                 f"count {a} to {b} backwards"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), listed(range(start, stop - 1, -1)))


def _count_in_words(rng: Random) -> Turn:
    start = 1 if rng.random() < 0.6 else rng.randint(0, 15)
    stop = min(20, start + rng.randint(1, 12))
    stop = 10 if start == 1 and rng.random() < 0.3 else stop
    a, b = rng.choice((str(start), NUMBER_WORDS[start])), rng.choice((str(stop), NUMBER_WORDS[stop]))
    if start == 1:
        cores = [f"count to {b} in words", f"count from {a} to {b} in words", f"count to {b} using words",
                 f"write the numbers to {b} in words", f"count to {b} as words", f"count in words to {b}",
                 f"count to {b} with words", f"spell the numbers from {a} to {b}"]  # fmt: skip
    else:
        cores = [f"count from {a} to {b} in words", f"write the numbers from {a} to {b} in words",
                 f"count from {a} to {b} using words", f"in words, count from {a} to {b}"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), ", ".join(NUMBER_WORDS[start : stop + 1]))


def _count_by_steps(rng: Random) -> Turn:
    step = rng.choice((2, 5, 10))
    stop = step * rng.randint(2, 12 if step != 10 else 10)
    by = rng.choice(
        (f"by {NUMBER_WORDS[step]}s", f"in steps of {step}", f"in {NUMBER_WORDS[step]}s", f"by {step}")
    )
    cores = [f"count to {stop} {by}", f"count {by} to {stop}", f"count {by} up to {stop}",
             f"count from {step} to {stop} {by}"]  # fmt: skip
    return Turn(request(rng, rng.choice(cores)), listed(range(step, stop + 1, step)))


def sums(rng: Random, talk: Talk) -> Turn:
    talk.last_skill = "sums"
    draw = rng.random()
    if draw < 0.5:
        a, b = (rng.randint(0, 9), rng.randint(0, 9)) if rng.random() < 0.85 else (10, rng.randint(1, 10))
        return _asked_sum(rng, a, b, ("+", "plus", "and"), a + b)
    if draw < 0.75:
        b = rng.randint(0, 9)
        return _asked_sum(rng, b + rng.randint(0, 9), b, ("-", "minus"), None)
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return _asked_sum(rng, a, b, ("*", "times", "x", "multiplied by"), a * b)


def _asked_sum(rng: Random, a: int, b: int, words: tuple[str, ...], result: int | None) -> Turn:
    value = a - b if result is None else result
    sign, word = words[0], rng.choice(words)
    spaced = rng.random() < 0.6
    if word in ("*", "+", "-", "x"):
        term = f"{a} {word} {b}" if spaced else f"{a}{word}{b}"
    else:
        term = f"{_spelt(rng, a)} {word} {_spelt(rng, b)}"
    cores = [f"What is {term}?", f"What is {term}?", f"What's {term}?", f"How much is {term}?", f"{term}",
             f"{term} = ?", f"{term}=", f"Calculate {term}.", f"Compute {term}.", f"Tell me {term}.",
             f"Solve {term}.", f"Do you know what {term} is?", f"What does {term} make?",
             f"What do you get for {term}?", f"{term} is what?", f"{term}?",
             f"Can you tell me what {term} is?"]  # fmt: skip
    if sign == "+" and rng.random() < 0.1:
        cores = [f"Add {a} and {b}.", f"What is the sum of {a} and {b}?", f"Add {a} to {b}.",
                 f"Sum of {a} and {b}?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{a} {sign} {b} = {value}", f"{value}")


def compare(rng: Random, _talk: Talk) -> Turn:
    a, b = rng.sample(range(100), 2)
    if rng.random() < 0.5:
        cores = [f"Which is bigger, {a} or {b}?", f"What is bigger, {a} or {b}?",
                 f"Which number is larger: {a} or {b}?", f"Which number is bigger, {a} or {b}?",
                 f"Is {a} or {b} bigger?", f"What is more, {a} or {b}?"]  # fmt: skip
        return Turn(
            question(rng, rng.choice(cores)), f"{max(a, b)} is bigger than {min(a, b)}.", f"{max(a, b)}"
        )
    cores = [f"Which is smaller, {a} or {b}?", f"What is smaller, {a} or {b}?",
             f"Which number is smaller: {a} or {b}?", f"Is {a} or {b} smaller?",
             f"What is less, {a} or {b}?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{min(a, b)} is smaller than {max(a, b)}.", f"{min(a, b)}")


def neighbour_number(rng: Random, _talk: Talk) -> Turn:
    number = rng.randint(1, 99)
    if rng.random() < 0.6:
        cores = [f"What comes after {number}?", f"What number comes after {number}?",
                 f"Which number follows {number}?", f"What is the next number after {number}?"]  # fmt: skip
        return Turn(question(rng, rng.choice(cores)), f"{number + 1} comes after {number}.", f"{number + 1}")
    cores = [f"What comes before {number}?", f"What number comes before {number}?",
             f"Which number is before {number}?"]  # fmt: skip
    return Turn(question(rng, rng.choice(cores)), f"{number - 1} comes before {number}.", f"{number - 1}")
