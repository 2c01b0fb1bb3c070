"""HTTPS over real sockets, with certificates made here."""

import asyncio
import logging
import shutil
import socket
import ssl
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import pytest

from engine.options.edge_config import TlsFiles
from engine.options.options import OptionError
from server.app import build_app
from server.edge.access.credentials import Credentials, LiveTls
from server.edge.http.edge import ClientTimeouts
from server.edge.sockets.accepting import ENCRYPTED_READ_BYTES
from server.edge.sockets.places import RESERVED_PLACES
from tests.server.certificates import encrypted, needs_openssl, self_signed
from tests.server.conftest import EDGE, Settings, eventually, serving

pytestmark = needs_openssl

POST = b'POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 15\r\n\r\n{"prompt": "x"}'


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def other_pair(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"), "other")


def files(pair, client_ca=None) -> TlsFiles:
    return TlsFiles(cert=str(pair.cert), key=str(pair.key), client_ca=client_ca and str(client_ca))


def served(engine, tls_files: TlsFiles, **patience: float):
    app = build_app(engine, Settings(), patience=ClientTimeouts(**patience))
    return serving(app, context=LiveTls(tls_files).context)


def trusting(pair, *, own=None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pair.cert))
    if own is not None:
        context.load_cert_chain(own.cert, own.key)
    return context


def https(url: str) -> str:
    return url.replace("http:", "https:")


async def shown_by(url: str) -> bytes:
    """The certificate that a new connection gets to see, in DER."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port, ssl=context)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return certificate


def der(pair) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pair.cert.read_text())


async def test_requests_whole_and_streamed_are_answered_over_https(engine, pair):
    client = httpx.AsyncClient(verify=trusting(pair))
    async with served(engine, files(pair)) as url, client:
        for body in ({"prompt": "abc"}, {"prompt": "abc", "stream": True}, {"prompt": "x" * 40_000}):
            reply = await client.post(f"{https(url)}/v1/completions", json=body)
            assert reply.status_code == (400 if len(body["prompt"]) > 128 else 200)
    assert len(engine.requests) == 2


async def test_what_comes_in_the_same_breath_as_the_handshake_is_not_lost(engine, pair):
    address = None
    async with served(engine, files(pair)) as url:
        address = urlsplit(url)
        for _ in range(10):
            reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=trusting(pair))
            writer.write(POST)
            async with asyncio.timeout(30):
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.transport.abort()


async def test_an_encrypted_connection_reads_into_a_buffer_as_small_as_we_ask_for(engine, pair):
    """The size is an attribute of asyncio's protocol, which a later Python may name otherwise."""
    sizes: list[int] = []

    class NotedReads(ssl.SSLObject):
        def read(self, len: int = 1024, buffer=None):
            sizes.append(len)
            return super().read(len, buffer)

    context = LiveTls(files(pair)).context
    context.sslobject_class = NotedReads
    async with serving(build_app(engine, Settings()), context=context) as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=trusting(pair))
        writer.write(POST)
        async with asyncio.timeout(30):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        # The client's, of the same class.
        assert len(writer.transport._ssl_protocol.get_buffer(-1)) == ENCRYPTED_READ_BYTES
        writer.transport.abort()
    assert set(sizes) == {ENCRYPTED_READ_BYTES}


async def test_plain_http_on_the_port_ends_without_an_answer(engine, pair):
    async with served(engine, files(pair)) as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(POST)
        async with asyncio.timeout(30):
            assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
    assert engine.requests == []


async def test_a_silent_client_has_little_time_for_its_handshake(engine, pair, monkeypatch):
    monkeypatch.setattr("server.edge.sockets.accepting.HANDSHAKE_TIMEOUT_S", 0.1)
    async with served(engine, files(pair)) as url:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_a_crowd_without_a_handshake_gives_way_to_one_that_asks(engine, pair):
    async with served(engine, files(pair), max_connections=1) as url:
        address = urlsplit(url)
        crowd = [
            await asyncio.open_connection(address.hostname, address.port) for _ in range(2 * RESERVED_PLACES)
        ]
        async with httpx.AsyncClient(verify=trusting(pair)) as client:
            assert (await client.get(f"{https(url)}/health")).status_code == 200
        num_ended = engine.metrics.registry.get_sample_value("tokenyard:refused_connections_total")
        assert num_ended >= RESERVED_PLACES
        for _, writer in crowd:
            writer.close()


async def test_a_client_without_a_certificate_of_the_authority_gets_nothing(engine, pair, other_pair):
    async with served(engine, files(pair, client_ca=other_pair.cert)) as url:
        for own in (None, pair):
            async with httpx.AsyncClient(verify=trusting(pair, own=own), base_url=https(url)) as client:
                with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                    await client.get("/health")
        async with httpx.AsyncClient(verify=trusting(pair, own=other_pair), base_url=https(url)) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_client_that_hangs_up_takes_its_request_with_it(engine, pair):
    engine.stall_after = 1
    async with served(engine, files(pair)) as url:
        address = urlsplit(url)
        _, writer = await asyncio.open_connection(address.hostname, address.port, ssl=trusting(pair))
        writer.write(POST)
        await eventually(lambda: engine.num_running == 1)
        writer.close()
        await eventually(lambda: engine.num_running == 0)


async def test_a_reader_that_stopped_is_cut_off(engine, pair):
    engine.texts = ("x" * 65536,)
    body = b'{"prompt": "x", "max_tokens": 127, "stream": true}'
    post = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with served(engine, files(pair), send_timeout_s=0.1) as url:
        address = urlsplit(url)
        raw = socket.create_connection((address.hostname, address.port))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def ask() -> ssl.SSLSocket:
            stalled = trusting(pair).wrap_socket(raw, server_hostname="127.0.0.1")
            stalled.sendall(post)
            return stalled

        stalled = await asyncio.to_thread(ask)
        await eventually(lambda: len(engine.aborted) == 1)
        stalled.close()


# The files, followed.


@pytest.fixture
async def followed(tmp_path, pair, engine, monkeypatch):
    monkeypatch.setattr("server.edge.access.credentials.LOOK_EVERY_S", 0.01)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(pair.cert, cert)
    shutil.copy(pair.key, key)
    edge = replace(EDGE, tls=TlsFiles(cert=str(cert), key=str(key), client_ca=None))
    credentials = Credentials([], edge)
    following = asyncio.create_task(credentials.keep_current())
    await asyncio.sleep(0.05)
    async with serving(build_app(engine, Settings()), context=credentials.tls.context) as url:
        yield url, cert, key
    following.cancel()


async def test_new_connections_see_a_new_certificate_and_old_ones_go_on(followed, pair, other_pair, caplog):
    caplog.set_level(logging.INFO)
    url, cert, key = followed
    async with httpx.AsyncClient(verify=trusting(pair), base_url=https(url)) as client:
        assert (await client.get("/health")).status_code == 200
        shutil.copy(other_pair.cert, cert)
        await eventually(lambda: "stays in force" in caplog.text)  # not yet the key of this certificate
        assert await shown_by(url) == der(pair)
        shutil.copy(other_pair.key, key)
        await eventually(lambda: "read again" in caplog.text)
        assert await shown_by(url) == der(other_pair)
        assert (await client.get("/health")).status_code == 200  # on the connection that it has


# Mistakes, before anything is opened.


def test_a_file_that_is_wrong_is_named_before_the_start(pair, other_pair, tmp_path) -> None:
    (tmp_path / "empty").touch()
    wrong = [
        (TlsFiles(cert="/absent", key=None, client_ca=None), "/absent: no such file"),
        (TlsFiles(cert=str(pair.cert), key=None, client_ca=None), "belong together"),
        (TlsFiles(cert=str(pair.cert), key=str(other_pair.key), client_ca=None), "belong together"),
        (files(encrypted(pair)), "not encrypted"),
        (files(pair, client_ca=tmp_path / "empty"), "no certificates in PEM"),
        (files(pair, client_ca=pair.key), "no certificates in PEM"),
    ]
    for tls_files, words in wrong:
        with pytest.raises(OptionError, match=words):
            tls_files.load()


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_private_key_for_all_eyes_is_warned_of(tmp_path, caplog, mode) -> None:
    pair = self_signed(tmp_path, "seen")
    pair.key.chmod(mode)
    Credentials([], replace(EDGE, tls=files(pair)))
    assert (f"chmod o-r {pair.key}" in caplog.text) == (mode == 0o644)


def test_certificate_and_key_may_stand_in_one_file(pair, tmp_path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(pair.cert.read_text() + pair.key.read_text())
    TlsFiles(cert=str(both), key=None, client_ca=None).load()
