"""A server program that misbehaves on request: dies, stays mute, has a child that ignores the end."""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("Content-Length")]
    body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
    kind = "text/event-stream" if body else "application/json"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n".encode())
    for number in range(1, body.get("max_tokens", 0) + 1):
        await asyncio.sleep(pause_s)
        reason = "length" if number == body["max_tokens"] else None
        usage = {"prompt_tokens": 7, "completion_tokens": number}
        chunk = {"choices": [{"index": 0, "text": "x", "finish_reason": reason}], "usage": usage}
        writer.write(f"data: {json.dumps(chunk)}\n\n".encode())
    writer.write(b"data: [DONE]\n\n" if body else b'{"data": [{"id": "fake"}]}')
    await writer.drain()
    writer.close()


async def serve(port: int, pause_s: float) -> None:
    server = await asyncio.start_server(lambda r, w: answer(r, w, pause_s), "127.0.0.1", port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.close)
    await server.wait_closed()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die")
    parser.add_argument("--mute")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--stubborn-child", type=Path)
    options = parser.parse_args()
    if options.die:
        print(f"{options.die}\nand more words", flush=True)
        sys.exit(3)
    if options.mute:
        print(options.mute, flush=True)
        time.sleep(60)
    if options.stubborn_child:
        child = subprocess.Popen([sys.executable, "-c", _STUBBORN])
        options.stubborn_child.write_text(str(child.pid))
    asyncio.run(serve(options.port, 0.005 if options.slow else 0.0005))


if __name__ == "__main__":
    main()
