"""A small examination of a checkpoint, through transformers, greedy.

Owns: the questions, what passes, the score. The held-out wordings never occur in training.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from documents import plain_key
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

_MAX_NEW_TOKENS = 600


@dataclass(frozen=True, slots=True)
class Question:
    """User messages of one conversation, asked one after the other; the last answer is judged."""

    asked: tuple[str, ...]
    passes: Callable[[str], bool]
    system: str = ""


def has(*needles: str) -> Callable[[str], bool]:
    """Every one of `needles` occurs, whatever the case."""
    return lambda answer: all(needle.lower() in answer.lower() for needle in needles)


def is_exactly(text: str) -> Callable[[str], bool]:
    return lambda answer: answer.strip() == text


def is_json_with(*keys: str) -> Callable[[str], bool]:
    def check(answer: str) -> bool:
        try:
            value = json.loads(answer)
        except json.JSONDecodeError:
            return False
        return isinstance(value, dict) and set(keys) <= set(value)

    return check


def is_story(*needles: str, min_words: int = 40) -> Callable[[str], bool]:
    def check(answer: str) -> bool:
        return len(answer.split()) >= min_words and answer.rstrip().endswith(".") and has(*needles)(answer)

    return check


def _numbers(start: int, stop: int) -> str:
    step = 1 if stop >= start else -1
    return ", ".join(str(number) for number in range(start, stop + step, step))


_NO = has("do not know")

COMMON = (Question(("Hello",), has("hello")), Question(("hi there!",), has("hello")), Question(("Say hello",),
          has("hello")), Question(("Good morning",), has("good morning")), Question(("Hello, who are you?",),
          has("language model")), Question(("What can you do?",), has("count")), Question(("Thank you!",),
          has("welcome")), Question(("Bye",), has("goodbye")), Question(("What is the capital of France?",),
          has("Paris")), Question(("Tell me a story",), is_story()), Question(("Count to 10",),
          is_exactly(_numbers(1, 10))), Question(("What is 2+2?",), has("4")),
          Question(("Write a JSON object with name and age",), is_json_with("name", "age")),
          Question(("Give me a JSON object about a red train",), is_json_with("colour")),
          Question(("Count from 3 to 12.",), is_exactly(_numbers(3, 12))),
          Question(("Count to ten in words",), has("one, two", "nine, ten")), Question(("My name is Ada.",
          "What is my name?"), has("Ada")), Question(("Tell me a long story",), is_story(min_words=150)),
          Question(("Who drives the red train?",), has("Mabel")), Question(("What is the opposite of hot?",),
          has("cold")),
)  # fmt: skip

HELD_OUT = (Question(("hello hello, is someone home?",), has("hello")), Question(("Heya!",),
            has("how can I help")), Question(("ok so who exactly are you",), has("language model")),
            Question(("what stuff can you do?",), has("count")), Question(("thanks mate!",), has("welcome")),
            Question(("alright, goodbye then",), has("goodbye")),
            Question(("I'd love to know the capital of Japan",), has("Tokyo")), Question(("japan capital?",),
            has("Tokyo")), Question(("which city is Norway's capital?",), has("Oslo")),
            Question(("Please name the capital city of Peru",), has("Lima")),
            Question(("What's the capital of egypt??",), has("Cairo")),
            Question(("the capital of Italy please",), has("Rome")),
            Question(("hey can you count up from 17 up to 25 for me",), is_exactly(_numbers(17, 25))),
            Question(("count 1 to 7",), is_exactly(_numbers(1, 7))),
            Question(("Please count from 88 to 97!",), is_exactly(_numbers(88, 97))),
            Question(("count down starting from 8",), has("8, 7, 6, 5, 4, 3, 2")),
            Question(("countdown from 5",), has("5, 4, 3, 2, 1")),
            Question(("Could you count to 100 please",), is_exactly(_numbers(1, 100))),
            Question(("write the numbers one to six in words",), has("one, two, three, four, five, six")),
            Question(("3+5?",), has("8")), Question(("hey what's 7 plus 6",), has("13")),
            Question(("how much does 9 - 4 make",), has("5")), Question(("multiply: 6 times 7",), has("42")),
            Question(("tell me what 8 and 8 is",), has("16")),
            Question(("a story about a green dragon please",), is_story("dragon")),
            Question(("Could I hear a story about an owl named Zog?",), is_story("owl", "Zog")),
            Question(("please tell me a fun little story",), is_story()),
            Question(("I'd like a really long story",), is_story(min_words=120)),
            Question(("json object for a blue train please",), is_json_with("colour")),
            Question(("Give me JSON describing a person",), is_json_with("name")),
            Question(("Return a JSON object having keys city and country",), is_json_with("city", "country")),
            Question(("make me a json with id, name and price",), is_json_with("id", "name", "price")),
            Question(("Hiya, my name is Gustavo!", "Do you recall my name?"), has("Gustavo")),
            Question(("hello I am Brelka", "tell me a joke", "so what's my name"), has("Brelka")),
            Question(("I am Tom.", "What is 3 + 4?", "What is the capital of Spain?",
            "Thanks. Who am I again?"), has("Tom")), Question(("My favourite colour is teal.",
            "what's my favourite colour?"), has("teal")), Question(("so what is my name",), has("not told")),
            Question(("who's driving Bramble?",), has("Otto")), Question(("what's the colour of Skylark",),
            has("blue")), Question(("where's Midnight going to",), has("Stonegate")),
            Question(("what stuff does Snowdrop carry",), has("milk")),
            Question(("Where would I find the bakery?",), has("school")), Question(("who's the mayor here?",),
            has("Holloway")), Question(("what's the cat at the station called?",), has("Biscuit")),
            Question(("opposite of tall please",), has("short")),
            Question(("what would be the opposite of early?",), has("late")),
            Question(("what sound do cows make?",), has("moo")),
            Question(("so how many legs are on a horse?",), has("four")),
            Question(("which day comes right after Tuesday?",), has("Wednesday")),
            Question(("list the seven days of the week",), has("Monday", "Sunday")),
            Question(("What is the capital of Sweden?",), is_exactly("Stockholm."),
            system="Please answer briefly."), Question(("Hi, who are you?",), has("Marvin"),
            system="You are Marvin, a helpful bot."), Question(("What is the airspeed of a swallow?",), _NO),
            Question(("How do I bake sourdough at home?",), _NO),
            Question(("Explain general relativity to me",), _NO),
            Question(("Who painted the Sistine Chapel?",), _NO),
            Question(("What is the capital of Zimbolia?",), _NO), Question(("asdf qwer zxcv",), _NO),
            Question(("Write a sorting function in C++",), _NO),
            Question(("What did Aristotle say about friendship?",), _NO),
)  # fmt: skip

HELD_OUT_KEYS = frozenset(plain_key(question.asked[-1]) for question in HELD_OUT)


def sit_exam(folder: Path) -> None:
    """Ask everything and print each failure and the two scores."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for title, questions in (("common wordings", COMMON), ("held-out wordings", HELD_OUT)):
        passed = 0
        for question in questions:
            answer, ended = _answer(model, tokenizer, question)
            if ended and question.passes(answer):
                passed += 1
            else:
                print(f"  failed: {question.asked[-1]!r} -> {answer!r}", flush=True)
        print(f"exam, {title}: {passed} of {len(questions)}", flush=True)


def _answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: Question
) -> tuple[str, bool]:
    """The last answer, and whether the model ended its turn by itself."""
    messages = [{"role": "system", "content": question.system}] if question.system else []
    answer, ended = "", False
    for text in question.asked:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")[
            "input_ids"
        ]
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=_MAX_NEW_TOKENS,
                do_sample=False,
            )
        new_ids = output[0, prompt.shape[1] :]
        ended = int(new_ids[-1]) == tokenizer.eos_token_id
        answer = tokenizer.decode(new_ids, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    return answer, ended
