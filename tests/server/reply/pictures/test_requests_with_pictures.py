"""Pictures on every way in: the request that reaches the engine, and what is left when it is over."""

import asyncio
import base64
import dataclasses
import gc
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

pytest.importorskip("PIL")

from starlette.requests import ClientDisconnect

from engine.errors import OverloadReason
from engine.media.messages import SHARED_MEMORY
from engine.media.pictures import PicturePreparer
from engine.options.media_options import MediaConfig
from engine.processes.turns import TurnsByKey
from engine.types import EncoderInput, ServiceTerms
from scheduler.cache_groups import ALL_TOKENS, CacheGroup, Lifetime, LifetimeKind
from server.api.batches import named_files
from server.api.batches.store import StateStore
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.turn import prepare_turn
from server.app import build_app
from server.reply.generate.calls import Origin
from server.reply.pictures import placing
from server.reply.pictures.placing import ChatPrompt
from tests.engine.media.made_pictures import SEEN, picture, pictures_of
from tests.server.conftest import EDGE, Settings, connect
from tests.server.fake_engine import INFO, FakeEngine

IMAGE = dataclasses.replace(SEEN, image_token_id=299)
SMALL, LARGE = picture(32, 32), picture(64, 32, seed=1)
NUM_SMALL, NUM_LARGE = 4, 8
MARK = "<|image_pad|>"

pytestmark = pytest.mark.asyncio(loop_scope="module")


class SeeingEngine(FakeEngine):
    """Shows pictures by a byte that no text has, and looks for their shared memory while it answers."""

    def __init__(self, pictures: PicturePreparer) -> None:
        super().__init__(model_info=dataclasses.replace(INFO, vision=IMAGE, max_model_len=256))
        self.pictures = pictures
        self.is_blind_to: str | None = None
        self.num_segments: list[int] = []

    async def encode_chat(self, chat, marks=None) -> tuple[int, ...]:
        self.chats.append((chat.messages, chat))
        ids: list[int] = []
        for message in chat.messages:
            content = message["content"] or ""
            parts = [{"text": content}] if isinstance(content, str) else content
            for part in parts:
                if "text" in part:
                    ids += part["text"].encode()
                elif message["role"] != self.is_blind_to:
                    ids.append(IMAGE.image_token_id)
        return (*ids, 10)

    async def generate(self, request):
        self.num_segments.append(sum((SHARED_MEMORY / each.segment).exists() for each in request.payloads))
        try:
            async for output in super().generate(request):
                yield output
        finally:
            request.at_end()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pictures(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PicturePreparer]:
    """One process for all tests, on the event loop of all."""
    pictures = pictures_of(tmp_path_factory.mktemp("seeing"), MediaConfig(max_pictures=3))
    yield pictures
    await pictures.close()


@pytest.fixture
def engine(pictures: PicturePreparer) -> SeeingEngine:
    return SeeingEngine(pictures)


@pytest_asyncio.fixture(loop_scope="module")
async def client(engine) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(build_app(engine, Settings())) as client:
        yield client


def coded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url(file: bytes = SMALL) -> str:
    return f"data:image/png;base64,{coded(file)}"


def part(file: bytes = SMALL, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url(file), **more}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def chat(*parts: dict, **fields) -> dict:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 2, **fields}


def block(file: bytes = SMALL) -> dict:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": coded(file)}}


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "shot "}, block()]}

WAYS = {
    "/v1/chat/completions": chat(text("see "), part()),
    "/v1/chat/completions of a url alone": chat(text("see "), {"type": "image_url", "image_url": url()}),
    "/v1/chat/completions of a tool": {
        "messages": [
            {"role": "user", "content": "s"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": [text("ee "), part()]},
        ],
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see "},
                    {"type": "input_image", "image_url": url(), "detail": "auto"},
                ],
            }
        ],
        "max_output_tokens": 2,
        "store": False,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "see "}, block()]}],
        "max_tokens": 2,
    },
    "/v1/messages of a tool": {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT]},
        ],
        "max_tokens": 2,
    },
    "/api/chat": {
        "messages": [{"role": "user", "content": "see ", "images": [coded(SMALL)]}],
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/api/chat of a data URL": {
        "messages": [{"role": "user", "content": "see ", "images": [url()]}],
        "options": {"num_predict": 2},
        "stream": False,
    },
    "/api/generate": {
        **{"prompt": "see ", "images": [coded(SMALL)], "options": {"num_predict": 2}, "stream": False}
    },
}


async def test_each_way_in_brings_a_picture_to_the_engine_and_leaves_nothing(client, engine) -> None:
    for way, body in WAYS.items():
        reply = await client.post(way.partition(" ")[0], json=body)
        assert reply.status_code == 200, (way, reply.text)
        request = engine.requests.pop()
        (seen,) = request.encoder_inputs
        assert seen.num_tokens == NUM_SMALL, way
        assert set(request.prompt_token_ids[seen.offset : seen.end]) == {IMAGE.image_token_id}, way
        assert [each.content for each in request.payloads] == [seen.content], way
        assert engine.num_segments.pop() == 1, way
        del request
    gc.collect()
    assert not engine.pictures._segments._stored


async def test_pictures_keep_their_order_and_one_that_comes_twice_is_there_once(client, engine) -> None:
    body = chat(part(LARGE), text("a"), part(SMALL), part(LARGE))
    usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    (request,) = engine.requests
    first, second, third = request.encoder_inputs
    assert [each.num_tokens for each in request.encoder_inputs] == [NUM_LARGE, NUM_SMALL, NUM_LARGE]
    assert (first.offset, second.offset, third.offset) == (0, NUM_LARGE + 1, NUM_LARGE + 1 + NUM_SMALL)
    assert first.content == third.content != second.content
    assert len(request.payloads) == 2
    assert usage["prompt_tokens"] == 2 * NUM_LARGE + NUM_SMALL + 2


async def test_tokens_of_pictures_are_counted_everywhere_alike(client, engine) -> None:
    num = len("see ") + NUM_SMALL + 1
    body = chat(text("see "), part())
    tokenized = (await client.post("/tokenize", json={"messages": body["messages"]})).json()
    assert (tokenized["count"], len(tokenized["tokens"])) == (num, num)
    counted = (await client.post("/v1/messages/count_tokens", json=WAYS["/v1/messages"])).json()
    assert counted == {"input_tokens": num}
    rendered = (await client.post("/v1/chat/completions/render", json=body)).json()
    assert len(rendered["token_ids"]) == num
    (where,) = rendered["features"]["mm_placeholders"]["image"]
    assert where == {"offset": 4, "length": NUM_SMALL}
    assert len(rendered["features"]["mm_hashes"]["image"]) == 1
    assert not engine.pictures._segments._stored


async def test_a_response_goes_on_with_the_pictures_before_it(client, engine) -> None:
    first = await client.post("/v1/responses", json={**WAYS["/v1/responses"], "store": True})
    items = (await client.get(f"/v1/responses/{first.json()['id']}/input_items")).json()["data"]
    assert items[0]["content"][1] == {"type": "input_image", "image_url": url(), "detail": "auto"}
    again = {"input": "more", "previous_response_id": first.json()["id"], "max_output_tokens": 2}
    assert (await client.post("/v1/responses", json=again)).status_code == 200
    before, after = engine.requests
    assert [each.content for each in after.encoder_inputs] == [each.content for each in before.encoder_inputs]


async def test_a_response_takes_a_picture_from_a_file_of_the_same_key(engine, tmp_path) -> None:
    edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"))
    app = build_app(engine, Settings(edge=edge, api_keys=("a", "b")))
    mine, others = ({"authorization": f"Bearer {key}"} for key in ("a", "b"))
    async with connect(app) as client:
        files = {"file": ("a.png", SMALL), "purpose": (None, "vision")}
        file = (await client.post("/v1/files", files=files, headers=mine)).json()
        assert file["purpose"] == "vision"
        content = [{"type": "input_image", "file_id": file["id"], "detail": "auto"}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
        assert (await client.post("/v1/responses", json=body, headers=mine)).status_code == 200
        refused = await client.post("/v1/responses", json=body, headers=others)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file_id")
        batch = {"input_file_id": file["id"], "endpoint": "/v1/responses", "completion_window": "24h"}
        assert (await client.post("/v1/batches", json=batch, headers=mine)).status_code == 400
        files["purpose"] = (None, "fine-tune")
        assert (await client.post("/v1/files", files=files, headers=mine)).status_code == 400
    (request,) = engine.requests
    assert [each.num_tokens for each in request.encoder_inputs] == [NUM_SMALL]
    app.state.desk.store.close()


@pytest.mark.night
async def test_files_are_read_for_pictures_alone_and_only_within_bounds(
    engine, tmp_path, monkeypatch
) -> None:
    edge = dataclasses.replace(EDGE, state_folder=str(tmp_path / "state"))
    app = build_app(engine, Settings(edge=edge))
    num_read = 0
    read = StateStore.part

    def part_of(store, file_id, after):
        nonlocal num_read
        num_read += after == 0
        return read(store, file_id, after)

    async with connect(app) as client:

        async def upload(purpose: str, content: bytes = SMALL) -> str:
            files = {"file": ("a", content), "purpose": (None, purpose)}
            return (await client.post("/v1/files", files=files)).json()["id"]

        async def told(*parts: dict) -> str:
            body = {"input": [{"role": "user", "content": [*parts]}], "max_output_tokens": 2}
            reply = await client.post("/v1/responses", json=body)
            return "" if reply.status_code == 200 else reply.json()["error"]["message"]

        def seen(file_id: str) -> dict:
            return {"type": "input_image", "file_id": file_id}

        vision, data = await upload("vision"), await upload("user_data", LARGE)
        lines = await upload("batch", b"{}\n" * 9)
        monkeypatch.setattr(StateStore, "part", part_of)
        assert not await told(*[{"type": "input_text", "text": "x", "file_id": lines}] * 9)
        assert "uploaded for batch" in await told(seen(lines))
        assert "4 pictures" in await told(*[seen(vision)] * 4)
        assert num_read == 0
        assert not await told(seen(vision), seen(data), seen(vision))
        assert num_read == 2
        monkeypatch.setattr(named_files, "_MAX_BYTES", 2 * len(SMALL))
        assert "in all" in await told(*[seen(vision)] * 3)
        monkeypatch.setattr(named_files, "MAX_FETCHED_BYTES", len(SMALL))
        assert "of a picture" in await told(seen(data))
        assert num_read == 2
    app.state.desk.store.close()


async def test_bad_pictures_are_refused_by_the_field_that_has_them(client, engine) -> None:
    cases = [
        (chat(part(b"a cat")), "messages[0].content[0].image_url", "no PNG, JPEG, WebP or GIF"),
        (chat(text("x"), part(SMALL[:100])), "messages[0].content[1].image_url", "broken"),
        (
            chat({"type": "image_url", "image_url": "file:///etc/passwd"}),
            "messages[0].content[0].image_url",
            "",
        ),
        (
            chat({"type": "image_url", "image_url": "https://a.example/x"}),
            "messages[0].content[0].image_url",
            "",
        ),
        (chat(*[part()] * 4), "messages", "4 pictures; this server takes at most 3"),
        (chat(text(f"so {MARK}"), part()), "messages", "leave it out"),
        (chat(part(), chat_template_kwargs={"known": MARK}), "chat_template_kwargs", "leave it out"),
        (
            chat({"type": "input_audio", "input_audio": {}}),
            "messages[0].content[0].type",
            "audio is not served",
        ),
        (chat({"type": "video_url", "video_url": {}}), "messages[0].content[0].type", "video is not served"),
        ({"messages": [{"role": "system", "content": [part()]}]}, "messages[0].content[0].type", "system"),
    ]
    for body, param, told in cases:
        reply = await client.post("/v1/chat/completions", json=body)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param), reply.text
        assert told in error["message"]
    theirs = {**WAYS["/v1/messages"], "messages": [{"role": "user", "content": [block(b"a cat")]}]}
    reply = await client.post("/v1/messages", json=theirs)
    assert "messages[0].content[0].source: the picture is not taken" in reply.json()["error"]["message"]
    engine.is_blind_to = "user"
    reply = await client.post("/v1/chat/completions", json=chat(part()))
    assert "0 places for 1 pictures" in reply.json()["error"]["message"]
    assert not engine.requests
    assert not engine.pictures._segments._stored


@pytest.mark.parametrize("kind", ["audio", "video"])
async def test_sound_and_films_are_refused_by_name_in_all_protocols(client, engine, kind: str) -> None:
    wave = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt ").decode()
    user = {"role": "user", "content": [{"type": f"input_{kind}"}]}
    source = {"type": "base64", "media_type": f"{kind}/mp4", "data": wave}
    cases = {
        "/v1/chat/completions": ({"messages": [user]}, f"{kind} is not served"),
        "/v1/responses": ({"input": [user]}, f"{kind} is not served"),
        "/v1/messages": (
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": kind, "source": source}]}]},
            f"of type '{kind}' are not supported",
        ),
        "/api/chat": (
            {"messages": [{"role": "user", "content": "x", "images": [wave]}]},
            "it is no PNG, JPEG, WebP or GIF file",
        ),
    }
    for path, (body, told) in cases.items():
        reply = await client.post(path, json={"model": "fake", **body})
        assert reply.status_code == 400, reply.text
        assert told in reply.text
    assert not engine.requests


async def test_what_a_model_sees_is_said_where_clients_look(client) -> None:
    assert (await client.get("/v1/models")).json()["data"][0]["capabilities"] == {"vision": True}
    assert "vision" in (await client.post("/api/show", json={"model": "fake"})).json()["capabilities"]
    assert (await client.get("/props")).json()["modalities"]["vision"]


async def test_truncation_leaves_a_picture_out_as_a_whole(client, engine) -> None:
    body = chat(text("ab"), part(), text("cd"), truncate_prompt_tokens=5)
    await client.post("/v1/chat/completions", json=body)
    (request,) = engine.requests
    assert request.encoder_inputs == request.payloads == ()
    assert request.prompt_token_ids == (*b"cd", 10)


async def test_a_cut_moves_pictures_and_goes_around_them() -> None:
    prompt = ChatPrompt(tuple(range(10)), (EncoderInput(2, 3, "a"), EncoderInput(6, 2, "b")))

    def left(num: int, *, keeps_end: bool) -> tuple[tuple[int, ...], list[tuple[int, str]]]:
        cut = prompt.cut_to(num, keeps_end=keeps_end)
        return cut.token_ids, [(each.offset, each.content) for each in cut.pictures]

    assert prompt.cut_to(10, keeps_end=True) is prompt
    assert left(8, keeps_end=True) == (tuple(range(2, 10)), [(0, "a"), (4, "b")])
    assert left(7, keeps_end=True) == (tuple(range(5, 10)), [(1, "b")])
    assert left(3, keeps_end=True) == ((8, 9), [])
    assert left(7, keeps_end=False) == (tuple(range(6)), [(2, "a")])
    assert left(5, keeps_end=False) == (tuple(range(5)), [(2, "a")])
    assert left(4, keeps_end=False) == ((0, 1), [])


async def test_a_client_that_leaves_ends_the_work_for_its_pictures(engine, monkeypatch) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def prepare(*_, **__):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def leave():
        await begun.wait()
        return {"type": "http.disconnect"}

    monkeypatch.setattr(engine.pictures, "prepare", prepare)
    edge = build_app(engine, Settings()).state.edge
    origin = Origin(reply_id="r", terms=ServiceTerms(), receive=leave)
    async with asyncio.timeout(60):
        with pytest.raises(ClientDisconnect):
            await prepare_turn(edge, ChatCompletionRequest(**chat(part())), origin)
    assert ended.is_set()


async def test_a_mark_behind_pictures_is_where_their_places_end(client, engine) -> None:
    lifetimes = (ALL_TOKENS, Lifetime(LifetimeKind.WINDOW, 1024))
    engine.model_info = dataclasses.replace(engine.model_info, groups=tuple(map(CacheGroup, lifetimes)))
    marked = text("marked") | {"cache_control": {"type": "ephemeral"}}
    contents = [
        [text("abc"), part(LARGE), text("defgh"), part(SMALL), marked],
        "ok",
        [part(LARGE), text("h")],
    ]
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": each} for role, each in zip(roles, contents, strict=True)]
    response = await client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert response.status_code == 200, response.text
    assert 3 + NUM_LARGE + 5 + NUM_SMALL + 6 in engine.requests[0].restore_at


async def test_a_url_is_fetched_once_for_a_request_and_few_at_a_time(client, engine, monkeypatch) -> None:
    asked: list[str] = []
    num_under_way = most = 0

    async def fetch(url, config, *, where):
        nonlocal num_under_way, most
        asked.append(url)
        num_under_way += 1
        most = max(most, num_under_way)
        await asyncio.sleep(0.01)
        num_under_way -= 1
        return SMALL

    monkeypatch.setattr(placing, "picture_bytes", fetch)
    monkeypatch.setattr(engine.pictures, "_files", TurnsByKey(1, 64, OverloadReason.PICTURES))
    bodies = [chat(*[{"type": "image_url", "image_url": f"https://a.example/{name}"}] * 3) for name in "abc"]
    replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    assert [reply.status_code for reply in replies] == [200] * 3
    assert sorted(asked) == [f"https://a.example/{name}" for name in "abc"]
    assert most == 1


@pytest.mark.night
async def test_pictures_are_shared_among_requests_of_one_salt(client, engine) -> None:
    for salt in ("one", "two", "two"):
        await client.post("/v1/chat/completions", json=chat(part(), cache_salt=salt))
    one, two, again = (request.encoder_inputs[0].content for request in engine.requests)
    assert one != two == again


async def test_a_server_that_takes_no_pictures_says_so(client, engine, monkeypatch) -> None:
    monkeypatch.setattr(engine.pictures, "config", MediaConfig(max_pictures=0))
    assert (await client.get("/v1/models")).json()["data"][0]["capabilities"] == {"vision": False}
    assert "vision" not in (await client.post("/api/show", json={"model": "fake"})).json()["capabilities"]
    assert not (await client.get("/props")).json()["modalities"]["vision"]


def turn_of(words: str, *files: bytes) -> dict:
    images = [{"type": "input_image", "image_url": url(file)} for file in files]
    return {"role": "user", "content": [{"type": "input_text", "text": words}, *images]}


@pytest.mark.night
async def test_auto_truncation_prepares_each_picture_once(client, engine) -> None:
    num_before = engine.pictures.new_lease()._segments._num_named
    turns = [turn_of("x" * 250, SMALL), turn_of("y", LARGE)]
    body = {"input": turns, "truncation": "auto", "max_output_tokens": 2}
    assert (await client.post("/v1/responses", json=body)).status_code == 200
    assert [each.num_tokens for each in engine.requests[0].encoder_inputs] == [NUM_LARGE]
    assert engine.pictures._segments._num_named == num_before + 2


@pytest.mark.night
async def test_auto_truncation_leaves_out_turns_with_too_many_pictures(client, engine) -> None:
    turns = [turn_of("x", SMALL, SMALL), turn_of("y", LARGE, LARGE)]
    body = {"input": turns, "max_output_tokens": 2}
    assert (await client.post("/v1/responses", json=body)).status_code == 400
    assert (await client.post("/v1/responses", json={**body, "truncation": "auto"})).status_code == 200
    assert [each.num_tokens for each in engine.requests[0].encoder_inputs] == [NUM_LARGE] * 2
