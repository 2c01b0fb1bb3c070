"""Adapters by name: twenty ways out of the directory, reloads, and what the metrics say."""

import asyncio
import os
from pathlib import Path

import pytest

from engine.adapters.registry import AdapterMetrics, AdapterRegistry
from engine.errors import AdapterConflict, EngineUnavailable, RequestRejected
from engine.process_messages import AdapterAnswer, AdapterUse, ForgetAdapter, LoadAdapter, ToEngine
from worker.worker_config import AdapterFacts


def facts_of(asked: LoadAdapter, content: str = "1") -> AdapterFacts:
    return AdapterFacts(
        name=asked.name, identity=f"{asked.name}@{content}", folder=asked.folder, rank=8, num_bytes=1
    )


class Engine:
    """Engines that take every adapter, of the content that the test says; one, unless it says more."""

    def __init__(self, directory: Path) -> None:
        self.sent: list[ToEngine] = []
        self.content = "1"
        self.refusal = ""
        self.others: dict[int, str] = {}
        """Content that engines after the first find; empty: they refuse."""
        self.registry = AdapterRegistry(str(directory), ("base",), self.send, lambda: (0, *self.others))

    def send(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, LoadAdapter):
            for number, content in {0: "" if self.refusal else self.content, **self.others}.items():
                facts = facts_of(message, content) if content else None
                refusal = self.refusal or "no room"
                answer = AdapterAnswer(question=message.question, facts=facts, refusal=refusal)
                self.registry.take_answer(number, answer)


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (path / name).write_text("{}")
    return path


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    directory = tmp_path / "adapters"
    make_folder(directory / "good")
    make_folder(directory / "good" / "deeper")
    make_folder(tmp_path / "outside")
    (directory / "link").symlink_to(tmp_path / "outside")
    make_folder(directory / "linked_file")
    (directory / "linked_file" / "adapter_model.safetensors").unlink()
    (directory / "linked_file" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    (directory / "empty").mkdir()
    (directory / "file").write_text("x")
    make_folder(directory / "half")
    (directory / "half" / "adapter_model.safetensors").unlink()
    os.mkfifo(directory / "half" / "adapter_model.safetensors")
    return Engine(directory)


ATTACKS = [
    *(
        "..",
        "../outside",
        "good/../../outside",
        "../adapters/good",
        "./good",
        "good/",
        "/good",
        "good/deeper",
    ),
    *("/etc", "link", "linked_file", "empty", "file", "half", "", " good", "good\x00", "good\n", "~", "."),
    *(
        "..\\outside",
        "%2e%2e/outside",
        "file:///etc",
        "https://example.org/adapter",
        "org/adapter",
        "g\u043e\u043ed",
    ),
    "g" * 300,
]


@pytest.mark.parametrize("folder", ATTACKS)
async def test_whatever_is_no_folder_in_the_directory_is_refused_unread(engine: Engine, folder: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        await engine.registry.load("new", folder, replaces=False)
    assert raised.value.param == "lora_path"
    assert str(engine.registry._directory) not in str(raised.value)
    assert not engine.sent


@pytest.mark.parametrize("name", ["base", "", "a,b", "a@b", "a b", "-x", "x" * 129, "a\nb", '"'])
async def test_a_name_that_would_be_ambiguous_is_refused(engine: Engine, name: str) -> None:
    with pytest.raises(RequestRejected) as raised:
        await engine.registry.load(name, "good", replaces=False)
    assert raised.value.param == "lora_name"


async def test_a_reload_is_another_adapter_and_the_old_one_is_forgotten(engine: Engine) -> None:
    await engine.registry.load("sql", "good", replaces=False)
    with pytest.raises(AdapterConflict):
        await engine.registry.load("sql", "good", replaces=False)
    engine.content = "2"
    await engine.registry.load("sql", "good", replaces=True)
    assert [each.identity for each in engine.registry.served] == ["sql@2"]
    assert engine.sent[-1] == ForgetAdapter(identity="sql@1")
    await engine.registry.load("sql", "good", replaces=True)
    assert len([each for each in engine.sent if isinstance(each, ForgetAdapter)]) == 1, "the same content"
    assert engine.registry.unload("sql")
    assert engine.sent[-1] == ForgetAdapter(identity="sql@2")
    assert not engine.registry.unload("sql")


async def test_a_reload_that_is_refused_leaves_the_old_one(engine: Engine) -> None:
    await engine.registry.load("sql", "good", replaces=False)
    engine.refusal = "use_dora is set"
    with pytest.raises(RequestRejected, match="the adapter 'sql' is refused: use_dora is set"):
        await engine.registry.load("sql", "good", replaces=True)
    assert [each.identity for each in engine.registry.served] == ["sql@1"]


async def test_a_load_ends_with_the_engine(engine: Engine) -> None:
    engine.registry = AdapterRegistry(str(engine.registry._directory), (), engine.sent.append, lambda: (0,))
    loading = asyncio.create_task(engine.registry.load("sql", "good", replaces=False))
    await asyncio.sleep(0)
    engine.registry.engine_died(0)
    with pytest.raises(EngineUnavailable):
        await loading
    assert engine.registry.served == ()


@pytest.mark.parametrize("found", ["", "2"], ids=["refused", "other files"])
async def test_a_load_that_fails_in_one_engine_is_undone_in_all(engine: Engine, found: str) -> None:
    engine.others = {1: "1", 2: found}
    with pytest.raises(RequestRejected, match=r"refused: (no room|engines read different files)"):
        await engine.registry.load("sql", "good", replaces=False)
    assert engine.registry.served == ()
    given_up = {each.identity for each in engine.sent if isinstance(each, ForgetAdapter)}
    assert given_up == ({"sql@1", "sql@2"} if found else {"sql@1"})


async def test_a_reload_that_fails_in_one_engine_leaves_what_the_name_stands_for(engine: Engine) -> None:
    engine.others = {1: "1"}
    await engine.registry.load("sql", "good", replaces=False)
    engine.others = {1: ""}
    with pytest.raises(RequestRejected):
        await engine.registry.load("sql", "good", replaces=True)
    assert [each.identity for each in engine.registry.served] == ["sql@1"]
    assert not [each for each in engine.sent if isinstance(each, ForgetAdapter)], "the same content"


async def test_a_load_waits_for_no_engine_that_died_and_undoes_an_answer_that_comes_late(
    engine: Engine,
) -> None:
    engine.registry = AdapterRegistry(str(engine.registry._directory), (), engine.sent.append, lambda: (0, 1))
    loading = asyncio.create_task(engine.registry.load("sql", "good", replaces=False))
    await asyncio.sleep(0)
    (asked,) = engine.sent
    assert isinstance(asked, LoadAdapter)
    engine.registry.engine_died(1)
    engine.registry.take_answer(0, AdapterAnswer(question=asked.question, facts=facts_of(asked)))
    await loading
    assert [each.identity for each in engine.registry.served] == ["sql@1"]
    engine.registry.take_answer(1, AdapterAnswer(question=asked.question, facts=facts_of(asked, "9")))
    assert engine.sent[1:] == [ForgetAdapter(identity="sql@9")]


async def test_a_load_that_is_cancelled_is_undone_where_it_was_done(engine: Engine) -> None:
    engine.registry = AdapterRegistry(str(engine.registry._directory), (), engine.sent.append, lambda: (0, 1))
    loading = asyncio.create_task(engine.registry.load("sql", "good", replaces=False))
    await asyncio.sleep(0)
    (asked,) = engine.sent
    assert isinstance(asked, LoadAdapter)
    engine.registry.take_answer(0, AdapterAnswer(question=asked.question, facts=facts_of(asked)))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.sent[1:] == [ForgetAdapter(identity="sql@1")]
    engine.registry.take_answer(1, AdapterAnswer(question=asked.question, facts=facts_of(asked, "9")))
    assert engine.sent[2:] == [ForgetAdapter(identity="sql@9")]
    assert engine.registry.served == ()


async def test_a_new_engine_process_changes_adapters_of_the_start_only(engine: Engine) -> None:
    def at_start(content: str) -> AdapterFacts:
        return facts_of(LoadAdapter(question=0, name="law", folder="/start/law"), content)

    engine.registry.model_is_ready([at_start("1")])
    await engine.registry.load("sql", "good", replaces=False)
    engine.registry.model_is_ready([at_start("2")])
    assert [each.identity for each in engine.registry.served] == ["law@2", "sql@1"]
    await engine.registry.load("law", "good", replaces=True)
    engine.registry.model_is_ready([at_start("3")])
    assert [each.identity for each in engine.registry.served] == ["law@1", "sql@1"]


async def test_the_gauges_say_running_and_waiting_apart_and_who_is_in_memory(engine: Engine) -> None:
    for name in ("a", "b", "c"):
        await engine.registry.load(name, "good", replaces=False)
    metrics = AdapterMetrics(2, lambda: engine.registry.served, lambda: ("d@1", "b@1"))
    metrics.beat(0, AdapterUse(running=("a@0", "a@1"), waiting=("b@1",), resident=("a@1", "b@1")))
    metrics.beat(1, AdapterUse(running=("a@1",), waiting=("c@1",), resident=("b@1",)))
    metrics.beat(2, AdapterUse(running=("c@1",), resident=("c@1",)))
    metrics.beat(2, None)  # it died
    requests, in_memory = metrics.collect()
    assert requests.samples[0].labels == {
        "max_lora": "2",
        "running_lora_adapters": "a",
        "waiting_lora_adapters": "b,c,d",
    }
    assert {each.labels["adapter"]: each.value for each in in_memory.samples} == {"a": 1, "b": 2, "c": 0}
