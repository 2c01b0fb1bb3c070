"""An OpenAI-compatible server of a hundred lines, whose misbehaviour is ordered by the prompt.

Owns: what the load client may meet on the wire, the ugly cases included.
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from server.edge.http.http_client import Target


class FakeOpenAI:
    """Streams `max_tokens` tokens, two a chunk. A prompt that starts with a key of `_TROUBLES` gets that."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.headers: list[str] = []
        self.num_open = self.most_open = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            length = next(
                (int(x.split(":")[1]) for x in head.split("\r\n") if x.startswith("Content-Length")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._answer(head.split(" ")[1], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()

    async def _answer(self, path: str, body: dict, writer: asyncio.StreamWriter) -> None:
        if path.endswith("/v1/models"):
            await reply(writer, 200, {"data": [{"id": "fake"}, {"id": "other"}]})
            return
        self.requests.append(body)
        prompt = body.get("prompt") or body["messages"][0]["content"]
        trouble = _TROUBLES.get(prompt.split(" ")[0])
        if trouble:
            await trouble(writer)
        else:
            await stream_tokens(writer, body, len(prompt.split(" ")))


async def reply(writer: asyncio.StreamWriter, status: int, body: dict) -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


def start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def send_event(writer: asyncio.StreamWriter, payload: dict | str) -> None:
    text = payload if isinstance(payload, str) else json.dumps(payload)
    data = f"data: {text}\n\n".encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def stream_tokens(writer: asyncio.StreamWriter, body: dict, num_words: int) -> None:
    """Two tokens a chunk; a prompt of w words has 3 w + 5 tokens."""
    start_stream(writer)
    is_chat = "messages" in body
    continuous = body["stream_options"].get("continuous_usage_stats")
    if is_chat:
        send_event(writer, {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]})
    writer.write(b"c\r\n: a comment\n\r\n1\r\n\n\r\n")  # a keep-alive, cut in two
    done, total = 0, body["max_tokens"]
    while done < total:
        done = min(done + 2, total)
        choice = {"index": 0, "finish_reason": "length" if done == total else None}
        choice |= {"delta": {"content": "ab"}} if is_chat else {"text": "ab"}
        chunk = {"choices": [choice], "usage": usage(num_words, done) if continuous else None}
        send_event(writer, chunk)
        await writer.drain()
        await asyncio.sleep(0.002)
    send_event(writer, {"choices": [], "usage": usage(num_words, total)})
    send_event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def usage(num_words: int, num_tokens: int) -> dict:
    return {
        "prompt_tokens": 3 * num_words + 5,
        "completion_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def _overloaded(writer: asyncio.StreamWriter) -> None:
    await reply(writer, 429, {"error": {"message": "try later", "code": "rate_limit_exceeded"}})


async def _html(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n<html>proxy</html>")
    await writer.drain()


async def _reset(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": [{"text": "a", "finish_reason": None}]})
    await writer.drain()
    await asyncio.sleep(0.01)
    # Without lingering, closing a socket is a reset instead of an orderly end.
    no_linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": [{"text": "a", "finish_reason": None}]})
    await writer.drain()


async def _error_event(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": [{"text": "a", "finish_reason": None}]})
    send_event(writer, {"error": {"message": "the engine died", "code": "engine_died"}})
    send_event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _unfinished(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": [{"text": "a", "finish_reason": None}]})
    send_event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def _nonsense(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": "none"})
    await writer.drain()
    await asyncio.sleep(5)


async def _no_http(writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
    await writer.drain()


async def _stall(writer: asyncio.StreamWriter) -> None:
    start_stream(writer)
    send_event(writer, {"choices": [{"text": "a", "finish_reason": None}]})
    await writer.drain()
    await asyncio.sleep(30)


async def _unmarked(writer: asyncio.StreamWriter) -> None:
    """All is there but [DONE], as `transformers serve` ends its streams."""
    start_stream(writer)
    send_event(writer, {"choices": [{"index": 0, "text": "ab", "finish_reason": None}]})
    send_event(
        writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage(1, 1)}
    )
    writer.write(b"0\r\n\r\n")
    await writer.drain()


_TROUBLES = {
    "overloaded": _overloaded,
    "html": _html,
    "reset": _reset,
    "close": _close,
    "error": _error_event,
    "unfinished": _unfinished,
    "unmarked": _unmarked,
    "nonsense": _nonsense,
    "nohttp": _no_http,
    "stall": _stall,
}


@asynccontextmanager
async def fake_openai() -> AsyncIterator[tuple[FakeOpenAI, Target]]:
    """A server on a free port of this machine, and the target that leads to it."""
    fake = FakeOpenAI()
    tasks: set[asyncio.Task] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        tasks.add(task)
        try:
            await fake.serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake, Target.parse(f"http://127.0.0.1:{fake.port}")
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
