"""Fixtures of the tests of grammars: the built-in model's tokenizer, and a clock that only masks move."""

import pytest

from tests.worker.sampling.test_grammar import DEMO, World, _Clock
from worker.sampling import grammar_rows
from worker.sampling.grammar_rows import Grammars


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("demo"), DEMO.read_text(encoding="utf-8"), eos="<|end|>")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr(grammar_rows, "time", clock)
    return clock


@pytest.fixture
def grammars(demo: World) -> Grammars:
    return Grammars(demo.folder, vocab_size=demo.vocab_size, eos_token_ids=(demo.eos,))
