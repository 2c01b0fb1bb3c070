"""Bytes that nobody would send on purpose, at the socket: never a 5xx, never a hang, nothing left behind."""

import asyncio
import random
from urllib.parse import urlsplit

import httpx

from tests.server.conftest import eventually, impatient, serving

BODY = b'{"prompt": "abc", "max_tokens": 3, "stream": true}'
CHAT = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": true}'
SEEDS = [
    b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n",
    b"GET /v1/models/fake HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n%b" % (len(CHAT), CHAT),
    b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
    b"POST /tokenize HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\nContent-Length: 15\r\n\r\n"
    b'{"prompt": "x"}',
    b"OPTIONS * HTTP/1.1\r\nHost: t\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
MARKS = [b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"%00", b"..", b"\xff\xfe", b"0", b"-1", b"9" * 30]
MARKS += [
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b'{"',
    b"]" * 40,
    b"\xc3\x28",
    b"1e999",
]
NUM_ROUNDS = 50


def mutated(dice: random.Random) -> bytes:
    data = bytearray(dice.choice(SEEDS))
    for _ in range(dice.choice((0, 1, 1, 2, 3, 8))):
        place = dice.randrange(len(data) + 1)
        match dice.randrange(6):
            case 0:
                data[place:place] = dice.choice(MARKS)
            case 1:
                del data[place : place + dice.choice((1, 2, 10, 100))]
            case 2:
                data[place : place + 1] = dice.randbytes(1)
            case 3:
                data[place:place] = dice.randbytes(dice.choice((1, 4, 64)))
            case 4:
                data += dice.choice(SEEDS)  # pipelined
            case 5:
                start = dice.randrange(len(data) + 1)
                data[place:place] = data[start : start + 40]
    return bytes(data)


async def sent(url: str, data: bytes, dice: random.Random) -> bytes:
    """Bytes that come back until the server hangs up, which our end of file makes it do."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        half = dice.randrange(len(data) + 1) if dice.random() < 0.3 else len(data)
        writer.write(data[:half])
        if half < len(data):
            await asyncio.sleep(0.001)
            writer.write(data[half:])
        if dice.random() < 0.2:
            return b""  # without a farewell
        await asyncio.sleep(0.01 * dice.random())
        writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except OSError:  # the server hung up first
        return b""
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    """Statuses of all the replies; a text of ours in a body would not begin a line so."""
    lines = answer.split(b"\r\n")
    return [int(line.split()[1]) for line in lines if line.startswith(b"HTTP/1.1 ")]


async def test_mutated_requests_get_no_5xx_and_leave_a_healthy_server(engine, caplog):
    dice = random.Random(1)
    seen: dict[int, int] = {}
    async with serving(impatient(engine, head_timeout_s=0.5)) as url:
        await sent(url, SEEDS[0], random.Random(0))
        num_tasks = len(asyncio.all_tasks())
        for _ in range(NUM_ROUNDS):
            datas = [mutated(dice) for _ in range(16)]
            for data, answer in zip(
                datas, await asyncio.gather(*(sent(url, data, dice) for data in datas)), strict=True
            ):
                for status in statuses(answer):
                    assert status < 500, data
                    seen[status] = seen.get(status, 0) + 1
        await eventually(lambda: engine.num_running == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 2})
    assert reply.status_code == 200
    assert {200, 400, 404} <= seen.keys(), "the seeds do not get far enough"
    assert not [record for record in caplog.records if record.exc_info], caplog.text
