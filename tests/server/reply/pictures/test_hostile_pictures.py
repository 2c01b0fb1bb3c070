"""Hostile files and addresses on every way in: 400 with the reason, and nothing is left."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx
import pytest

pytest.importorskip("PIL")

from engine.options.media_options import MediaConfig
from server.app import build_app
from tests.engine.media.made_pictures import further_hostile_files, hostile_files, pictures_of
from tests.server.conftest import Settings, connect
from tests.server.reply.pictures.test_fetching import REFUSED
from tests.server.reply.pictures.test_requests_with_pictures import SMALL, SeeingEngine, coded

DOMAINS = ("pictures.example", "inside.example", "10.0.0.1", "0x7f.1", "2130706433", "localhost")
CONFIG = MediaConfig(domains=DOMAINS, plain_domains=DOMAINS)
FURTHER_REFUSED = [
    # Hosts that are named, and are at addresses that are not public.
    "https://inside.example/cat.png",
    "http://inside.example:8080/cat.png",
    "http://INSIDE.example/cat.png",
    "http://10.0.0.1/cat.png",
    "http://0x7f.1/cat.png",
    "http://2130706433/cat.png",
    "http://localhost/cat.png",
    # Others in the place of a host that is named.
    "http://017700000001/cat.png",
    "http://127.1/cat.png",
    "http://[::]/cat.png",
    "http://[::ffff:7f00:1]/cat.png",
    "http://[64:ff9b::7f00:1]/cat.png",
    "http://[fe80::1%25eth0]/cat.png",
    "http://[::1]:80@pictures.example/cat.png",
    "http://pictures.example%00.other.example/cat.png",
    "http://pictures.example%2f@other.example/cat.png",
    "http://pictures.example%23@other.example/",
    "http://pictures.example;@other.example/",
    "http://pictures.example:80@other.example/",
    "http://pictures.example:+80/cat.png",
    "http://pictures.example:\uff18\uff10/cat.png",
    "http://pictures.example:/cat.png",
    "http://pictures\uff0eexample/cat.png",
    "http://\u24dfictures.example/cat.png",
    "http://xn--pictures-.example/cat.png",
    "http://pictures..example/cat.png",
    "http://.pictures.example/cat.png",
    "http://pictures.example#.other.example/cat.png",
    "http://\u200bpictures.example/cat.png",
    "http:pictures.example/cat.png",
    "http:/pictures.example/cat.png",
    "http:///pictures.example/cat.png",
    "http:\\\\pictures.example\\cat.png",
    "url:http://pictures.example/cat.png",
    "http://pictures.example/\u2028cat.png",
    "http://pictures.example/cat\0.png",
    "view-source:http://pictures.example/",
    "file://localhost/etc/passwd",
    "file:////etc/passwd",
    "fi\tle:///etc/passwd",
    "data:image/png,%89PNG",
    "data:image/png;base64",
    "data:image/png;base64;,AAAA",
    "data:image/png;base64,%41%41",
    "data:image/png;base64,AAAA====",
    "data:image/png;base64,AA=AAA",
    "data:image/png;base64,QUJD\u00e9",
    "data:image/png;base64,\uff21\uff22\uff23\uff24",
    "data:image/png;base64,-_-_",
    "data:;base64,",
    "data://pictures.example/cat.png",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "data: image/png ;base64,bm8=",
    "",
    "\n",
]


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch) -> AsyncIterator[SeeingEngine]:
    engine = SeeingEngine(pictures_of(tmp_path, CONFIG))

    async def resolve(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def open_connection(*_, **__):
        pytest.fail("a host was asked")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    yield engine
    await engine.pictures.close()


def chat(url: str) -> dict:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def anthropic(url: str) -> dict:
    source = {"type": "url", "url": url}
    if url.startswith("data:image/png;base64,"):
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"max_tokens": 2, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}


def ollama(url: str) -> dict:
    return {"messages": [{"role": "user", "content": "x", "images": [url]}], "stream": False}


def responses(url: str) -> dict:
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


def generate(url: str) -> dict:
    return {"prompt": "x", "images": [url], "stream": False}


WAYS: dict[Callable[[str], dict], tuple[str, ...]] = {
    chat: ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"),
    responses: ("/v1/responses",),
    anthropic: ("/v1/messages", "/v1/messages/count_tokens"),
    ollama: ("/api/chat",),
    generate: ("/api/generate",),
}


async def refuse_all(engine: SeeingEngine, urls: Iterable[tuple[str, str]]) -> None:
    """Try each in bodies of every shape, at the paths of a shape by turns."""
    async with connect(build_app(engine, Settings(max_body_bytes=2**22))) as client:
        for number, (name, url) in enumerate(urls):
            for body, paths in WAYS.items():
                way = paths[number % len(paths)]
                reply: httpx.Response = await client.post(way, json=body(url))
                message: str = (
                    reply.json()["error"] if way.startswith("/api") else reply.json()["error"]["message"]
                )
                assert reply.status_code == 400, (name, way, message)
                assert "the picture is not taken: " in message, (name, way, message)
        good = await client.post("/v1/chat/completions", json=chat(f"data:;base64,{coded(SMALL)}"))
        assert good.status_code == 200, good.text
    assert len(engine.requests) == 1
    engine.requests.clear()
    assert not engine.pictures._segments._stored


async def test_hostile_addresses_are_refused_on_all_ways_in(engine) -> None:
    assert len({*FURTHER_REFUSED} - {*REFUSED}) >= 40
    await refuse_all(engine, [(repr(url), url) for url in (*FURTHER_REFUSED, *REFUSED)])


@pytest.mark.night
async def test_hostile_files_are_refused_on_all_ways_in(engine) -> None:
    files = {**hostile_files(), **further_hostile_files()}
    await refuse_all(
        engine,
        [(name, f"data:image/png;base64,{base64.b64encode(file).decode()}") for name, file in files.items()],
    )
