"""Heads that were trained for the demo model for a few seconds: they change no answer, and guess rightly."""

import runpy
import shutil
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.config import PreemptionMode
from scheduler.messages import SamplingParams
from tests.worker.conftest import load_worker
from tests.worker.speculation.random_requests import random_request
from tests.worker.speculation.speculated import ModelDrafted
from tests.worker.speculation.test_draft_heads import MTP
from tests.worker.speculation.test_eagle_heads import drafting
from tests.worker.speculation.test_verification import DEMO, EOS, TOKENIZER, Loaded, check_equal

pytestmark = pytest.mark.night

SCRIPTS = DEMO.parents[1] / "scripts" / "demo_model"
SETTINGS = {"num_blocks": 200, "block_size": 8, "swap_space_bytes": 1 << 22, "dtype": "bfloat16"}
TEXTS = ("Once upon a time", "Write a short story about a train.", "1, 2, 3,")
RECOMPUTE, SWAP = PreemptionMode.RECOMPUTE, PreemptionMode.SWAP


def train(script: str, *words: object) -> None:
    """Run a script of training. In a process of its own it would first import torch, for as long again."""
    loaded = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        patch.setattr(sys, "argv", [script, *map(str, words), "--batch-tokens", "512", "--threads", "1"])
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    for name in sys.modules.keys() - loaded:  # its neighbours have names such as `model`
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == SCRIPTS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("trained") / "demo"
    shutil.copytree(DEMO, folder)
    train("train_head.py", "--model", folder, "--steps", 50)
    return load_worker(folder, **SETTINGS, speculation=MTP)


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    head = tmp_path_factory.mktemp("trained") / "head"
    train("train_eagle.py", "--model", DEMO, "--out", head, "--steps", 30)
    return load_worker(DEMO, **SETTINGS, speculation=drafting(head))


@pytest.mark.parametrize(
    ("kind", "mode", "num_asked"), [("mtp", RECOMPUTE, 1), ("mtp", SWAP, 4), ("eagle", SWAP, 3)]
)
def test_random_requests_get_the_same_tokens_and_logprobs_with_a_head(
    request: pytest.FixtureRequest, kind: str, mode: PreemptionMode, num_asked: int
) -> None:
    trained: Any = request.getfixturevalue(kind)
    random = Random(300 + num_asked)
    requests = [random_request(random, TOKENIZER, EOS) for _ in range(20)]
    first_id = 10_000 * num_asked
    expected = ModelDrafted(*trained, num_asked=0, next_id=first_id).answers(requests)
    tight = {"num_blocks": 13, "preemption_mode": mode}
    for place, changes in enumerate(({}, tight, {"max_num_batched_tokens": 9}), start=1):
        world = ModelDrafted(*trained, changes, num_asked=num_asked, next_id=first_id + 1000 * place)
        check_equal(expected, world.answers(requests))
        assert world.num_accepted > 0, changes
        assert world.num_preemptions > 0 or changes is not tight
        check_equal(expected, world.answers(requests))  # in blocks of the prefix cache


def test_guesses_of_a_trained_head_are_right_often(mtp: Loaded) -> None:
    prompts = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in TEXTS]
    world = ModelDrafted(*mtp, num_asked=1, next_id=300_000)
    world.answers([(prompt, SamplingParams(temperature=0.0, max_tokens=40)) for prompt in prompts])
    assert world.num_accepted >= 0.3 * world.num_drafted > 10, "76 % after 110 steps, none after two"


def test_a_head_drafts_the_same_behind_a_swap_and_a_cached_prefix(mtp: Loaded) -> None:
    prompts = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in TEXTS]
    requests = [(prompt, SamplingParams(temperature=0.0, max_tokens=40)) for prompt in prompts * 2]
    often = ModelDrafted(*mtp, num_asked=2, next_id=200_000)
    often.answers(requests)
    for number, changes in enumerate(
        ({"num_blocks": 22, "preemption_mode": SWAP}, {"max_num_batched_tokens": 8})
    ):
        seldom = ModelDrafted(*mtp, changes, num_asked=2, next_id=210_000 + 1000 * number, ask_every=3)
        seldom.answers(requests)
        assert ("preemption_mode" in changes) == (seldom.num_preemptions > 0)
        both = often.offers.keys() & seldom.offers.keys()
        pairs = [(often.offers[place], seldom.offers[place]) for place in both if seldom.offers[place]]
        # A key at the end of a shared block may be that of the token with which another sequence went on.
        equal = sum(one[: len(other)] == other[: len(one)] for one, other in pairs)
        assert len(pairs) > 10
        assert equal >= 0.9 * len(pairs)
