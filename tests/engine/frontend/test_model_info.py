"""The model as the server sees it, made from the worker's facts."""

from dataclasses import fields

from engine.types import ModelInfo
from tests.engine.model_facts import facts
from worker.worker_config import ModelFacts


def test_facts_of_the_worker_are_taken_over_and_the_rest_is_added() -> None:
    loaded = facts(groups=(), default_sampling={"top_k": 5})
    info = ModelInfo.of(
        loaded,
        served_names=("a", "b"),
        created_s=11,
        has_chat_template=True,
        chat_template="{{ messages }}",
        added_tokens={"<think>": 3},
    )
    shared = {each.name for each in fields(ModelInfo)} & set(dir(ModelFacts))
    assert {"vocab_size", "is_paged", "eos_token_ids", "default_sampling", "pooling"} <= shared
    for name in shared:
        assert getattr(info, name) == getattr(loaded, name)
    assert (info.served_names, info.created_s, info.chat_template) == (("a", "b"), 11, "{{ messages }}")
    assert (info.has_chat_template, info.added_tokens) == (True, {"<think>": 3})
