"""Several models behind one application: each request has the model that it names, as far as its key may."""

import asyncio
import dataclasses

import httpx
import pytest

from engine.errors import EngineUnavailable
from engine.models.placement import Reservation
from engine.models.yard import KeepRule, ModelYard
from engine.options.api_keys import ApiKey, digest_of
from engine.types import (
    EngineState,
    Health,
    PoolingFacts,
    PoolingTask,
    Profile,
    PromptComputation,
    ServedAdapter,
)
from server.api.batches.app_client import AppClient
from server.api.operations.models import ModelList
from server.app import build_app
from server.edge.access.key_ring import KeyRing
from server.edge.http.edge import Parsers, Served
from tests.server.conftest import Settings, connect, eventually, serving
from tests.server.fake_engine import INFO, READY, FakeEngine

LAW = ServedAdapter(name="law", identity="law@0", folder="/x/law", rank=8, created_s=5)
CHAT = [{"role": "user", "content": "hi"}]
GENERATING = {
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/api/chat": {"messages": CHAT, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
    "/completion": {"prompt": "hi"},
}
PROMPTS = {
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70]},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": CHAT},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/api/show": {},
}
LOADING = Health(state=EngineState.LOADING, is_live=True, detail="loading", num_steps=0, progress=0.5)


class Address:
    """Three models: `fake`, `beside` with an adapter and a pattern, and `vectors`, which makes embeddings."""

    def __init__(self, *keys: ApiKey) -> None:
        self.first = FakeEngine()
        self.beside = FakeEngine(
            dataclasses.replace(
                INFO,
                served_names=("beside",),
                served_adapters=(LAW,),
                name_patterns=("claude-*",),
                vocab_size=299,
            )
        )
        pooling = PoolingFacts(task=PoolingTask.EMBED, num_dimensions=4, prompt=PromptComputation.AT_ONCE)
        self.vectors = FakeEngine(dataclasses.replace(INFO, served_names=("vectors",), pooling=pooling))
        models = [Served(each, Parsers()) for each in (self.first, self.beside, self.vectors)]
        self.app = build_app(self.first, Settings(), keys=KeyRing(keys) if keys else None, models=models)
        self.client = connect(self.app)

    @property
    def num_asked(self) -> tuple[int, int]:
        return len(self.first.requests), len(self.beside.requests)


def key(name: str, *models: str) -> ApiKey:
    return ApiKey(name=name, digest=digest_of(name.encode()), models=models or None)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_each_endpoint_asks_the_model_that_the_body_names_and_the_first_without_a_name():
    here = Address()
    for path, body in GENERATING.items():
        for name, expected in ((None, (1, 0)), ("fake", (1, 0)), ("beside", (0, 1)), ("claude-9", (0, 1))):
            before = here.num_asked
            reply = await here.client.post(path, json={**body, **({"model": name} if name else {})})
            assert reply.status_code == 200, (path, name, reply.text)
            asked = tuple(now - then for now, then in zip(here.num_asked, before, strict=True))
            assert asked == expected, (path, name)
    reply = await here.client.post("/v1/embeddings", json={"input": "hi", "model": "vectors"})
    assert (reply.status_code, reply.json()["model"], len(here.vectors.pooled)) == (200, "vectors", 1)


async def test_a_profile_has_its_defaults_a_request_wins_over_them_and_a_key_sees_it_by_its_own_name():
    quick = Profile(
        name="quick", sampling={"temperature": 0.25}, template_kwargs={"enable_thinking": False, "other": 1}
    )
    info = dataclasses.replace(
        INFO,
        profiles=(quick,),
        template_variables=frozenset({"enable_thinking"}),
        default_template_kwargs={"enable_thinking": True},
    )
    engine = FakeEngine(info)
    keys = KeyRing([key("all"), key("few", "fake"), key("one", "quick")])
    async with connect(build_app(engine, Settings(), keys=keys)) as client:

        async def ask(path: str, who: str = "all", **more) -> dict:
            body = {**GENERATING[path], "model": "quick", **more}
            reply = await client.post(path, json=body, headers=bearer(who))
            return {"status": reply.status_code, **reply.json()}

        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/v1/responses"):
            assert (await ask(path))["model"] == "quick"
            assert engine.requests[-1].params.temperature == 0.25
            assert engine.requests[-1].params.top_k == 40, "the checkpoint's own"
        await ask("/v1/chat/completions", temperature=1.5, chat_template_kwargs={"enable_thinking": True})
        await ask("/v1/completions", model="fake")
        assert [each.params.temperature for each in engine.requests[-2:]] == [1.5, 0.5]
        await client.post("/tokenize", json={"messages": CHAT, "model": "quick"}, headers=bearer("all"))
        hints = [chat.hints for _, chat in engine.chats]
        assert hints == [{"enable_thinking": False}] * len(hints)
        assert len(hints) == 6
        await ask("/v1/chat/completions", reasoning_effort="high")
        assert engine.chats[-1][1].hints["enable_thinking"] is True
        await ask("/api/chat", think=True)
        await ask("/v1/messages", thinking={"type": "enabled", "budget_tokens": 1024})
        for _, chat in engine.chats[-2:]:
            assert {**chat.hints, **chat.kwargs}["enable_thinking"] is True
        shown = await client.post("/api/show", json={"model": "quick:latest"}, headers=bearer("all"))
        assert "temperature 0.25" in shown.json()["parameters"]
        for who, status, listed in (("few", 404, ["fake", "org/fake-alias"]), ("one", 200, ["quick"])):
            assert (await ask("/v1/completions", who))["status"] == status
            models = (await client.get("/v1/models", headers=bearer(who))).json()["data"]
            assert [each["id"] for each in models] == listed


async def test_a_reply_names_the_model_or_the_adapter_that_made_it():
    here = Address()
    for asked, named in (("org/fake-alias", "fake"), ("claude-9", "beside"), ("law", "law")):
        reply = await here.client.post("/v1/completions", json={"prompt": "hi", "model": asked})
        assert reply.json()["model"] == named
    assert here.beside.requests[-1].adapter == LAW


async def test_a_name_of_no_model_is_refused_with_all_names_and_so_is_a_task_that_a_model_does_not_have():
    here = Address()
    for path, body in (GENERATING | PROMPTS).items():
        reply = await here.client.post(path, json={**body, "model": "nobody"})
        assert reply.status_code == 404, path
        assert "there is: fake, org/fake-alias, claude-*, beside, law, vectors" in reply.text
    reply = await here.client.post("/v1/completions", json={"prompt": "hi", "model": "vectors"})
    assert reply.status_code == 400
    assert here.num_asked == (0, 0)


async def test_lists_name_all_models_and_those_that_are_loaded_only():
    here = Address()
    listed = ["fake", "org/fake-alias", "beside", "law", "vectors"]

    async def names(path: str, entries: str, name: str) -> list[str]:
        return [each[name] for each in (await here.client.get(path)).json()[entries]]

    for path, entries, name in (("/v1/models", "data", "id"), ("/api/tags", "models", "name")):
        assert await names(path, entries, name) == listed
    for name in listed:
        assert (await here.client.get(f"/v1/models/{name}")).json()["id"] == name
    here.beside.state = LOADING
    assert await names("/v1/models", "data", "id") == ["fake", "org/fake-alias", "vectors"]
    here.first.state = here.vectors.state = LOADING
    assert (await here.client.get("/v1/models")).status_code == 503


async def test_pages_without_a_body_take_the_model_from_the_query():
    here = Address()
    for name in ("fake", "beside"):
        assert (await here.client.get("/props", params={"model": name})).json()["model_alias"] == name
        page = (await here.client.get("/admin/server", params={"model": name})).json()
        assert page["model"]["name"] == name
    assert (await here.client.get("/props", params={"model": "nobody"})).status_code == 404
    await here.client.post("/admin/reset_prefix_cache", params={"model": "beside"})
    assert (here.first.num_resets, here.beside.num_resets) == (0, 1)


async def test_a_key_sees_and_uses_its_models_only_and_others_are_as_if_they_did_not_exist():
    here = Address(key("team", "bes*"), key("lawyer", "law"), key("boss"), key("stranger", "no-such"))

    async def ask(who: str, name: str | None) -> httpx.Response:
        body = {"prompt": "hi", **({"model": name} if name else {})}
        return await here.client.post("/v1/completions", json=body, headers=bearer(who))

    hidden = await ask("team", "vectors")
    unknown = await ask("team", "nothing")
    assert (hidden.status_code, unknown.status_code) == (404, 404)
    assert hidden.text == unknown.text.replace("nothing", "vectors")
    assert "fake" not in hidden.text
    assert (await ask("team", "law")).status_code == 404
    assert (await ask("team", None)).json()["model"] == "beside"
    assert (await ask("team", "claude-1")).json()["model"] == "beside"
    assert (await ask("lawyer", "law")).json()["model"] == "law"
    assert (await ask("lawyer", "beside")).status_code == 404
    assert (await ask("boss", "law")).status_code == 200
    assert "no model" in (await ask("stranger", None)).text
    for who, shown in (("team", ["beside"]), ("lawyer", ["law"]), ("stranger", [])):
        listed = (await here.client.get("/v1/models", headers=bearer(who))).json()["data"]
        assert [each["id"] for each in listed] == shown


async def test_a_key_is_limited_with_one_model_too():
    app = build_app(FakeEngine(), Settings(), keys=KeyRing([key("team", "other")]))
    async with connect(app) as client:
        reply = await client.post("/v1/completions", json={"prompt": "hi"}, headers=bearer("team"))
    assert reply.status_code == 404


@pytest.mark.parametrize("pattern", ["*", "law*"])
async def test_no_pattern_leads_a_key_to_an_adapter_that_it_may_not_use(pattern: str):
    engine = FakeEngine(
        dataclasses.replace(INFO, served_names=("base",), name_patterns=(pattern,), served_adapters=(LAW,))
    )
    app = build_app(engine, Settings(), keys=KeyRing([key("team", "base"), key("boss")]))
    async with connect(app) as client:

        async def ask(who: str, name: str) -> tuple[int, ...]:
            bodies = {path: {**GENERATING[path], "model": name} for path in ("/v1/completions", "/api/chat")}
            replies = [await client.post(path, json=bodies[path], headers=bearer(who)) for path in bodies]
            replies.append(await client.get(f"/v1/models/{name}", headers=bearer(who)))
            return tuple(each.status_code for each in replies)

        assert await ask("team", "law") == (404, 404, 404)
        tagged = {**GENERATING["/api/chat"], "model": "law:latest"}
        assert (await client.post("/api/chat", json=tagged, headers=bearer("team"))).status_code == 404
        assert not engine.requests
        assert await ask("team", "law-and-order") == (200, 200, 200)
        assert {each.adapter for each in engine.requests} == {None}
        assert await ask("boss", "law") == (200, 200, 200)


async def test_the_server_is_ready_while_all_models_are_and_one_that_is_given_up_does_not_keep_it_back():
    here = Address()

    async def ready(**query: str) -> tuple[int, str]:
        reply = await here.client.get("/health/ready", params=query)
        return reply.status_code, reply.json()["detail"]

    assert await ready() == (200, "ready")
    here.beside.state = LOADING
    assert await ready() == (503, "beside: loading")
    assert (await ready(model="fake"))[0] == 200
    assert (await ready(model="law"))[0] == 503
    here.beside.state = dataclasses.replace(LOADING, is_given_up=True, detail="given up: it is broken")
    assert await ready() == (200, "beside: given up: it is broken")
    here.first.state = here.vectors.state = here.beside.state
    assert (await ready())[0] == 503
    here.first.state = dataclasses.replace(READY, is_live=False)
    assert (await here.client.get("/health/live")).status_code == 503


async def test_the_page_of_metrics_has_each_family_once_and_each_sample_by_model():
    here = Address()
    await here.client.post("/v1/completions", json={"prompt": "hi", "model": "beside"})
    page = (await here.client.get("/metrics")).text
    families = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    assert (
        'tokenyard:http_requests_total{limit="",method="POST",route="/v1/completions",status="200"} 1.0'
        in page
    )


async def test_an_adapter_is_loaded_into_the_model_that_is_named_and_its_name_is_taken_everywhere():
    here = Address()

    async def load(name: str, **more: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": "good", **more}
        return await here.client.post("/v1/load_lora_adapter", json=body)

    assert "several models take adapters: fake, beside, vectors" in (await load("sql")).text
    assert (await load("sql", base_model_name="beside")).status_code == 200
    assert here.beside.model_info.adapter_named("sql") is not None
    for taken in ("sql", "beside"):
        assert (await load(taken, base_model_name="fake")).json()["error"]["code"] == "adapter_loaded"
    here.first.takes_adapters = here.vectors.takes_adapters = False
    assert (await load("tax")).status_code == 200
    gone = await here.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
    assert gone.status_code == 200
    assert [each.name for each in here.beside.model_info.served_adapters] == ["law", "tax"]


class Processes:
    """The processes of a model that comes when it is asked for."""

    def __init__(self) -> None:
        self.may_load = asyncio.Event()
        self.has_begun = False
        self.fault = ""

    def start(self, spare: object = None) -> None:
        """Begin to load."""
        self.has_begun = True

    async def ready(self) -> None:
        await self.may_load.wait()
        if self.fault:
            raise EngineUnavailable(self.fault)

    def health(self) -> Health:
        return LOADING

    async def gave_up(self) -> None:
        await asyncio.Event().wait()

    async def unload(self, fault: str = "") -> None:
        """End at once."""


class ComingAndGoing:
    """One model on demand behind an application."""

    def __init__(self, *keys: ApiKey, max_waiting: int = 1) -> None:
        self.engine, self.processes = FakeEngine(), Processes()
        yard = ModelYard(max_waiting=max_waiting)
        rule = KeepRule(at_start=False, keep_alive_s=600)
        room = Reservation(device="cpu", num_bytes=1, budget_bytes=1)
        self.place = yard.add("fake", self.processes, rule, room)
        models = [Served(self.engine, Parsers(), self.place)]
        self.app = build_app(self.engine, Settings(), keys=KeyRing(keys) if keys else None, models=models)
        self.client = connect(self.app)

    async def ask(self, **headers: str) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "hi"}, headers=headers)


async def test_a_request_waits_until_its_model_is_loaded_and_keeps_it_to_the_end_of_its_reply():
    here = ComingAndGoing()
    waiting = asyncio.create_task(here.ask())
    await eventually(lambda: here.place.waiting)
    full = await here.ask()
    assert (full.status_code, full.json()["error"]["code"]) == (429, "server_overloaded")
    assert not here.engine.requests
    here.processes.may_load.set()
    assert (await waiting).status_code == 200
    assert (len(here.engine.requests), here.place.num_leases) == (1, 0)
    here.engine.stall_after = 1
    async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"prompt": "hi", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            await anext(stream.aiter_lines())
            assert here.place.num_leases == 1
        await eventually(lambda: not here.place.num_leases)


async def test_lines_of_batches_and_responses_in_the_background_wait_behind_clients():
    here = ComingAndGoing()
    responses = asyncio.create_task(
        here.client.post("/v1/responses", json={"input": "hi", "background": True})
    )
    await eventually(lambda: here.place.waiting)
    assert not here.place.is_urgent
    here.processes.may_load.set()
    assert (await responses).status_code == 200
    await here.app.state.background.close()
    here = ComingAndGoing()
    line = asyncio.create_task(AppClient(here.app, owner="").post("/v1/completions", b'{"prompt": "hi"}'))
    await eventually(lambda: here.place.waiting)
    assert not here.place.is_urgent
    refused = await here.ask(**{"x-tokenyard-load": "no"})
    assert (refused.status_code, here.place.is_urgent) == (503, True)
    here.processes.may_load.set()
    assert (await line).status == 200


async def test_a_reader_of_a_response_in_the_background_does_not_keep_the_model_that_it_waits_for():
    here = ComingAndGoing()
    here.processes.may_load.set()
    here.app.state.background.places.num_places = 0  # the response waits for its turn
    async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        body = {"input": "hi", "background": True, "stream": True}
        async with client.stream("POST", "/v1/responses", json=body) as stream:
            await anext(stream.aiter_lines())
            assert here.place.num_leases == 0
            await here.app.state.background.close()


async def test_a_response_in_the_background_ends_once_where_its_model_cannot_be_loaded_any_more():
    here = ComingAndGoing()
    here.processes.may_load.set()
    places = here.app.state.background.places
    places.num_places = 0
    made = (await here.client.post("/v1/responses", json={"input": "hi", "background": True})).json()
    here.place.leave()
    await eventually(lambda: not here.place.is_loaded)
    here.place.give_up("its files are gone")
    places.num_places = 1
    async with places.held_by("another"):
        pass

    async def found() -> dict:
        return (await here.client.get(f"/v1/responses/{made['id']}")).json()

    async with asyncio.timeout(30):
        while (response := await found())["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert "its files are gone" in response["error"]["message"]
    assert not here.engine.requests


async def test_a_request_may_ask_not_to_wait_and_lists_say_what_is_loaded():
    here = ComingAndGoing()

    async def status() -> str:
        return (await here.client.get("/v1/models")).json()["data"][0]["status"]["value"]

    async def num_loaded() -> int:
        return len((await here.client.get("/api/ps")).json()["models"])

    assert (await status(), await num_loaded()) == ("unloaded", 0)
    assert (await here.ask(**{"x-tokenyard-load": "perhaps"})).status_code == 400
    refused = await here.ask(**{"x-tokenyard-load": "no"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "fake is being loaded")
    assert int(refused.headers["retry-after"]) >= 1
    await eventually(lambda: here.place.state.value == "loading")
    assert (await status(), await num_loaded()) == ("loading", 0)
    here.processes.may_load.set()
    await eventually(lambda: here.place.is_loaded)
    assert (await status(), await num_loaded()) == ("loaded", 2)  # it has two names
    assert (await here.ask(**{"x-tokenyard-load": "no"})).status_code == 200
    ModelList.model_validate((await here.client.get("/v1/models")).json(), strict=True)


@pytest.mark.parametrize(
    ("asked", "kept_s"),
    [("5m", 300), ("1h30m", 600), (-1, 600), (7.5, 7.5), ("-1", 600), ("20", 20), (None, 600)],
)
async def test_ollamas_keep_alive_shortens_the_time_for_which_a_model_stays_idle(asked, kept_s):
    here = ComingAndGoing()
    here.processes.may_load.set()
    body = {"prompt": "hi", "stream": False, "keep_alive": asked}
    assert (await here.client.post("/api/generate", json=body)).status_code == 200
    assert here.place.keep_alive_s == kept_s
    wrong = await here.client.post("/api/generate", json={**body, "keep_alive": "soon"})
    assert wrong.status_code == 400
    await here.ask()
    assert here.place.keep_alive_s == 600, "a request that says nothing leaves it to the entry"
    await here.client.post("/api/chat", json={"messages": [], "keep_alive": 0})
    await eventually(lambda: not here.place.is_loaded)


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
async def test_ollamas_request_to_unload_loads_nothing_and_lets_the_model_leave(path: str):
    here = ComingAndGoing()

    async def unload(name: str) -> httpx.Response:
        return await here.client.post(path, json={"model": name, "keep_alive": 0})

    assert (await unload("fake:latest")).json()["done_reason"] == "unload"
    assert (await unload("nobody")).status_code == 404
    assert here.place.state.value == "unloaded"
    here.processes.may_load.set()
    await here.ask()
    async with here.place.held():
        here.place.keep_for(None)
        assert (await unload("fake")).json()["done"]
        assert here.place.is_loaded
    await eventually(lambda: not here.place.is_loaded)


async def test_the_place_in_line_of_a_client_that_leaves_is_free_and_the_model_is_loaded_all_the_same():
    here = ComingAndGoing()
    async with serving(here.app) as url, httpx.AsyncClient(base_url=url, timeout=30) as client:
        leaving = asyncio.create_task(client.post("/v1/completions", json={"prompt": "hi"}))
        await eventually(lambda: here.place.waiting)
        leaving.cancel()
        await eventually(lambda: not here.place.waiting)
        here.processes.may_load.set()
        await eventually(lambda: here.place.is_loaded)
    assert not here.engine.requests
