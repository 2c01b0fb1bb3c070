import asyncio
import base64
import socket

import pytest

from engine.errors import RequestRejected
from engine.options.media_options import MediaConfig
from server.reply.pictures import fetching
from server.reply.pictures.fetching import checked_address, is_public, picture_bytes
from tests.for_each import for_each

CONFIG = MediaConfig(domains=("pictures.example", "old.example"), plain_domains=("old.example",))

REFUSED = [
    "file:///etc/passwd",
    "file://pictures.example/etc/passwd",
    "FILE:/etc/passwd",
    "/etc/passwd",
    "pictures.example/cat.png",
    "//pictures.example/cat.png",
    "ftp://pictures.example/cat.png",
    "gopher://pictures.example/1",
    "javascript:alert(1)",
    "blob:https://pictures.example/9",
    "http://pictures.example/cat.png",
    "https://",
    "https:///cat.png",
    "https://other.example/cat.png",
    "https://pictures.example.other.example/cat.png",
    "https://xpictures.example/cat.png",
    "https://pictures.example./cat.png",
    "https://pictures.example@other.example/cat.png",
    "https://other.example#@pictures.example/cat.png",
    "https://user:word@pictures.example/cat.png",
    "https://pictures.example\\@other.example/cat.png",
    "https://other.example\\pictures.example/cat.png",
    "https://other.example?pictures.example/cat.png",
    "https://pictures.example:0/cat.png",
    "https://pictures.example:99999/cat.png",
    "https://pictures.example:44x3/cat.png",
    "https://pictures.example:443:80/cat.png",
    "https://pictures%2Eexample/cat.png",
    "https://pictures。example/cat.png",
    "https://picture\u017f.example/cat.png",
    "https://pictures.example/cat .png",
    "https://pictures.example/cat\r\nHost: other.example",
    "https://pictures.example/\tcat.png",
    " https://pictures.example/cat.png",
    "https://pictures.example/cat.png\n",
    "https://127.0.0.1/cat.png",
    "https://2130706433/cat.png",
    "https://0x7f.1/cat.png",
    "https://[::1]/cat.png",
    "https://[::ffff:127.0.0.1]/cat.png",
    "https://localhost/cat.png",
    "https://169.254.169.254/latest/meta-data/",
    "https://pictures.example/" + "a" * 2048,
]


def test_there_are_forty_of_them() -> None:
    assert len(set(REFUSED)) >= 40


@for_each(REFUSED, ids=repr)
def test_an_address_that_is_not_plainly_on_a_named_host_is_refused(url: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        checked_address(url, CONFIG, where="field")
    assert caught.value.param == "field"


@for_each(
    [
        ("https://pictures.example", ("https", "pictures.example", 443, "/")),
        ("https://Pictures.EXAMPLE/a/b.png?c=%20d", ("https", "pictures.example", 443, "/a/b.png?c=%20d")),
        ("https://pictures.example:8443/x", ("https", "pictures.example", 8443, "/x")),
        ("http://old.example/x", ("http", "old.example", 80, "/x")),
        ("https://old.example/x", ("https", "old.example", 443, "/x")),
    ]
)
def test_a_plain_address_is_read_once(case) -> None:
    url, expected = case
    assert checked_address(url, CONFIG, where="field") == expected


@for_each(
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.0.1", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::808:808", "2002:7f00:1::"),
        *("fec0::1", "64:ff9b:1::7f00:1", "::127.0.0.1", "::ffff:0:7f00:1", "192.88.99.1", "4000::1"),
    ]
)
def test_an_address_within_a_network_is_not_asked(address: str) -> None:
    assert not is_public(address)


def test_an_address_of_the_world_is_asked() -> None:
    assert all(map(is_public, ("8.8.8.8", "2606:4700:4700::1111")))


async def test_a_data_url_is_the_picture_itself() -> None:
    content = bytes(range(256))
    coded = base64.b64encode(content).decode()
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:image/png;name=a.png;BASE64,"):
        assert await picture_bytes(head + coded, CONFIG, where="field") == content
    lines = base64.encodebytes(content).decode()
    assert await picture_bytes(f"data:;base64,{lines}", CONFIG, where="field") == content
    for wrong in ("data:image/png;base64,%%%", "data:image/png;base64,abc", "data:image/png,abcd", "data:"):
        with pytest.raises(RequestRejected, match="field"):
            await picture_bytes(wrong, CONFIG, where="field")


class Host:
    """A host of pictures at a port of this machine, which stands for any address of the world."""

    def __init__(self, monkeypatch) -> None:
        self.reply = b""
        self.addresses = ["8.8.8.8"]
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self.port = 0
        loop = asyncio.get_running_loop()
        connect = asyncio.open_connection

        async def resolve(host, port, **_):
            self.asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in self.addresses]

        async def open_connection(address, port, *, ssl, server_hostname):
            assert (address, port, ssl, server_hostname) == ("8.8.8.8", 80, None, None)
            return await connect("127.0.0.1", self.port)

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(fetching.asyncio, "open_connection", open_connection)

    async def answer(self, reader, writer) -> None:
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.reply)
        writer.close()


@pytest.fixture
async def host(monkeypatch):
    made = Host(monkeypatch)
    server = await asyncio.get_running_loop().create_server(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(), made.answer), "127.0.0.1", 0
    )
    made.port = server.sockets[0].getsockname()[1]
    yield made
    server.close()
    await asyncio.sleep(0)


def replied(body: bytes, *, status: str = "200 OK", kind: str = "image/png") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nLocation: http://127.0.0.1/\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask() -> bytes:
    return await picture_bytes("http://old.example/cat.png?x=1", CONFIG, where="field")


async def test_a_picture_is_fetched_from_the_address_that_was_resolved_once(host) -> None:
    host.reply = replied(b"a picture")
    assert await ask() == b"a picture"
    assert host.asked == ["old.example"]
    assert host.heads[0].startswith(b"GET /cat.png?x=1 HTTP/1.1\r\nHost: old.example\r\n")


async def test_a_host_with_one_private_address_is_not_asked_at_all(host) -> None:
    host.addresses = ["8.8.8.8", "10.0.0.1"]
    with pytest.raises(RequestRejected, match="not public"):
        await ask()
    assert not host.heads


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (replied(b"", status="302 Found"), "answers 302"),
        (replied(b"", status="404 Not Found"), "answers 404"),
        (replied(b"<html>", kind="text/html"), "'text/html'"),
        (replied(b"<svg>", kind="image/svg+xml"), "svg"),
        (replied(b"x" * 2000), "more than 0 MiB"),
        (replied(b"x" * 500)[:-1], "could not be fetched"),
        (b"", "could not be fetched"),
        (b"SSH-2.0-x\r\n\r\n", "could not be fetched"),
    ],
)
async def test_any_other_answer_is_the_requests_refusal(host, monkeypatch, reply, told) -> None:
    monkeypatch.setattr(fetching, "MAX_FETCHED_BYTES", 1000)
    host.reply = reply
    with pytest.raises(RequestRejected, match=told) as caught:
        await ask()
    assert caught.value.param == "field"


async def test_a_host_that_is_silent_is_given_up(host, monkeypatch) -> None:
    monkeypatch.setattr(fetching, "_TIMEOUT_S", 0.05)

    async def say_nothing(reader, writer) -> None:
        await reader.read()  # until the server has given up
        writer.close()

    host.answer = say_nothing
    with pytest.raises(RequestRejected, match="could not be fetched"):
        await ask()
