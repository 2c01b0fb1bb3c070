"""The pulse of a long step, without which the engine process is taken for hanging."""

import contextlib
import time
from pathlib import Path

import pytest

from engine.core import pulse
from engine.process_messages import Pulse
from engine.processes.transport import RankReports
from scheduler.messages import Grammar, GrammarKind
from worker.sampling.grammar_rows import Grammars

DEMO = Path(__file__).parents[3] / "engine" / "demo_model"


def test_masks_alone_keep_a_long_step_from_being_taken_for_a_hang(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_EVERY_S", 0.01)
    grammars = Grammars(DEMO, vocab_size=2560, eos_token_ids=(1,))
    row = grammars.row(Grammar(kind=GrammarKind.REGEX, text="[a-z]*"), ())
    directory = tmp_path_factory.mktemp("p")
    with contextlib.closing(RankReports(directory)) as reports:
        stepping = pulse.pulse_of_steps(directory)
        stepping.start()
        until_s = time.monotonic() + 60
        try:
            while not (heard := reports.receive()) and time.monotonic() < until_s:
                grammars.bitmasks([row])
                time.sleep(0.001)
        finally:
            stepping.stop()
    assert not row.failure
    assert set(heard) == {Pulse()}
