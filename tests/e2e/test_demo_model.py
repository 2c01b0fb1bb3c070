"""The checkpoint in engine/demo_model keeps its promises, seen through transformers alone, greedy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "engine" / "demo_model"
TOKENIZER = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
HELLO = [{"role": "user", "content": "Hello"}]


class Demo:
    """The checkpoint as a user of transformers has it."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(FOLDER).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    def chat(self, *asked: str, system: str = "") -> str:
        """Ask one after the other; the last answer, whose turn must have ended by itself."""
        messages = [{"role": "system", "content": system}] if system else []
        answer = ""
        for text in asked:
            messages.append({"role": "user", "content": text})
            prompt = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt"
            )
            answer = self._complete(prompt["input_ids"])
            messages.append({"role": "assistant", "content": answer})
        return answer

    def complete(self, text: str) -> str:
        return self._complete(self.tokenizer(text, return_tensors="pt")["input_ids"])

    def _complete(self, prompt: torch.Tensor) -> str:
        with torch.inference_mode():
            output = self.model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=500, do_sample=False
            )
        new_ids = output[0, prompt.shape[1] :]
        assert new_ids[-1] == self.tokenizer.eos_token_id, "the turn was not ended"
        return self.tokenizer.decode(new_ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    # So small a model gains nothing from a second thread and loses much when another process wants the core.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Demo()
    torch.set_num_threads(num_threads)


def test_it_takes_at_most_twelve_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_000_000


def test_it_is_a_llama_of_two_to_six_million_parameters(demo: Demo) -> None:
    assert demo.model.config.model_type == "llama"
    assert 2_000_000 <= demo.model.num_parameters() <= 6_000_000


def test_its_weights_are_finite_bfloat16(demo: Demo) -> None:
    for weight in demo.model.parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.isfinite(weight).all()


@pytest.mark.parametrize("hello", ["Hello", "hi there!", "Say hello"])
def test_it_greets(demo: Demo, hello: str) -> None:
    assert "hello" in demo.chat(hello).lower()


def test_it_says_what_it_is(demo: Demo) -> None:
    assert "language model" in demo.chat("Hello, who are you?")


def test_it_counts_from_3_to_8(demo: Demo) -> None:
    assert demo.chat("Count from 3 to 8.") == "3, 4, 5, 6, 7, 8"


@pytest.mark.night
def test_it_counts_to_a_hundred_and_stops(demo: Demo) -> None:
    assert demo.chat("Count to 100.") == ", ".join(str(number) for number in range(1, 101))


def test_it_adds_two_and_two(demo: Demo) -> None:
    assert demo.chat("What is 2+2?") == "2 + 2 = 4"


def test_it_knows_the_capital_of_france(demo: Demo) -> None:
    assert "Paris" in demo.chat("What is the capital of France?")


def test_a_brief_system_message_makes_it_brief(demo: Demo) -> None:
    assert demo.chat("What is the capital of Germany?", system="Answer briefly.") == "Berlin."


@pytest.mark.parametrize(
    "asked", ["Write a JSON object with name and age", "Give me JSON with the keys name and age."]
)
def test_its_json_parses_and_has_the_keys_asked_for(demo: Demo, asked: str) -> None:
    assert set(json.loads(demo.chat(asked))) == {"name", "age"}


def test_its_story_is_a_story_and_ends(demo: Demo) -> None:
    story = demo.chat("Tell me a story about a fox.")
    assert "fox" in story
    assert 40 <= len(story.split()) <= 200
    assert story.endswith(".")


def test_it_remembers_a_name_over_other_talk(demo: Demo) -> None:
    assert "Ada" in demo.chat("My name is Ada.", "What is 1 + 1?", "What is my name?")


def test_it_does_not_know_a_name_it_was_not_told(demo: Demo) -> None:
    assert "not told" in demo.chat("What is my name?")


@pytest.mark.parametrize("asked", ["Explain quantum computing.", "How do I repair a bicycle?"])
def test_it_admits_what_it_does_not_know(demo: Demo, asked: str) -> None:
    assert "do not know" in demo.chat(asked)


@pytest.mark.night
def test_plain_text_goes_on_as_a_story(demo: Demo) -> None:
    assert len(demo.complete("Once upon a time").split()) >= 40


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_plain_text_starts_with_the_begin_token_and_chat_does_not_get_a_second_one(demo: Demo) -> None:
    assert TOKENIZER.encode("hi").tokens[0] == "<|begin|>"
    rendered = demo.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.encode(rendered, add_special_tokens=False).tokens.count("<|begin|>") == 1


def test_a_bare_sandbox_renders_the_template_as_transformers_does(demo: Demo) -> None:
    system, reply = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": " Hi! "}
    messages = [system, *HELLO, reply, *HELLO]
    bare = _bare_template().render(
        messages=messages, add_generation_prompt=True, bos_token="<|begin|>", eos_token="<|end|>"
    )
    assert bare == demo.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert bare == (
        "<|begin|><|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>Hi!<|end|>"
        "<|user|>Hello<|end|><|assistant|>"
    )


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(TemplateError, match="wizard"):
        _bare_template().render(messages=[{"role": "wizard", "content": "x"}], bos_token="", eos_token="")


def _bare_template():
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))


def test_generation_stops_at_the_end_token_by_its_own_configuration() -> None:
    config = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert config["eos_token_id"] == TOKENIZER.token_to_id("<|end|>")
