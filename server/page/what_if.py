"""POST /admin/what_if: the simulator, on the requests that the page has seen and with other settings.

Owns: the files of a run and its bounds: one at a time, its time and its memory.
Never: simulates: that is a process of its own, which runs `tokenyard simulate`.

With keys it takes one that may administer; app.py says where it is served without keys.
"""

import asyncio
import os
import re
import resource
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import Overloaded, RequestRejected, without_folders
from engine.processes.child_environment import child_environment
from engine.processes.child_process import INTERPRETER
from engine.processes.runtime_directory import RuntimeDirectory
from server.edge.http.disconnect import while_connected
from server.edge.http.endpoint import Endpoint, ReplyModel, documentation, json_reply
from server.edge.http.json_body import read_request
from server.edge.wire_model import WireModel

_WITHIN_S = 60
_MAX_BYTES = 2 << 30
_MAX_FILE_BYTES = 8 << 20
_NICENESS = 10
_SETTINGS = re.compile(
    r"(?!.*(?:cells|(?:[0-9]_?){8}|replicas=(?:[0-9]_?){3}))(?!(?:[^,]*,){8})[a-z_0-9.=+:,]{1,400}"
)
"""Words of settings that start no processes and ask for no memory beyond measure."""
Count = Annotated[int, Field(ge=1, le=10_000_000)]


class WhatIfRequest(WireModel):
    """The body of POST /admin/what_if."""

    steps: str
    """Lines of a trace of steps, to which the time of a step is fitted."""
    requests: str
    """Lines of requests, as `tokenyard simulate --requests` reads them."""
    num_blocks: Count
    block_size: Count
    max_num_seqs: Count
    scheduling_policy: Literal["fcfs", "priority"]
    compare: str
    """Settings to try, divided by commas, such as `base,num_blocks=4000+load=1.5`."""


class WhatIfRuns(ReplyModel):
    runs: list[dict[str, Any]]
    """One for each setting, in the numbers of `tokenyard simulate --json`."""
    pictures: dict[str, str]
    """SVG: `ttft`, time to first token, and `queue`, requests that wait."""


router = APIRouter()
ENDPOINT = Endpoint(router=router, requests={WhatIfRequest: ()})
_running = asyncio.Lock()


@router.post("/admin/what_if", **documentation(WhatIfRuns, request=WhatIfRequest))
async def run_what_if(request: Request) -> Response:
    """Simulate the requests under each setting."""
    body = await read_request(request, WhatIfRequest, {}, from_headers={})
    if not _SETTINGS.fullmatch(body.compare):
        raise RequestRejected(
            "compare: at most 8 settings, no cells, at most 99 replicas, no longer numbers", param="compare"
        )
    if _running.locked():
        raise Overloaded("a simulation is under way; try again later", retry_after_s=5.0)
    async with _running:
        directory = RuntimeDirectory.make()
        try:
            await while_connected(request.receive, _simulate(body, directory.path))
            return await asyncio.to_thread(_found_in, directory.path)
        finally:
            directory.remove()


async def _simulate(body: WhatIfRequest, folder: Path) -> None:
    """Run the simulator. Raises RequestRejected with what it says."""
    steps, requests, report = (folder / each for each in ("steps.jsonl", "requests.jsonl", "report.json"))
    await asyncio.to_thread(steps.write_text, body.steps)
    await asyncio.to_thread(requests.write_text, body.requests)
    given = body.model_dump(exclude={"steps", "requests"})
    files = {"fit": steps, "requests": requests, "json": report, "plots": folder}
    words = [f"--{key.replace('_', '-')}={value}" for key, value in {**given, **files}.items()]
    child = await asyncio.create_subprocess_exec(
        *(*INTERPRETER, "-m", "bench.simulate.command", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(OPENBLAS_NUM_THREADS="1"),  # each of many threads would reserve memory
    )
    try:
        os.setpriority(os.PRIO_PROCESS, child.pid, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        most_s = int(_WITHIN_S) + 1  # so that it ends if this process is killed
        limits = {resource.RLIMIT_AS: _MAX_BYTES, resource.RLIMIT_FSIZE: _MAX_FILE_BYTES}
        for limit, most in {**limits, resource.RLIMIT_CPU: most_s}.items():
            resource.prlimit(child.pid, limit, (most, most))
        _, said = await asyncio.wait_for(child.communicate(), _WITHIN_S)
    except TimeoutError:
        raise RequestRejected(f"the simulation took more than {_WITHIN_S} s", param="compare") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        last = said.decode(errors="replace").strip().rpartition("\n")[2] or "the simulation failed"
        raise RequestRejected(without_folders(last), param="compare")


def _found_in(folder: Path) -> Response:
    """Return the reply with what the simulator has written."""
    pictures = {each: (folder / f"{each}.svg").read_text() for each in ("ttft", "queue")}
    report = orjson.loads((folder / "report.json").read_bytes())
    return json_reply({"runs": report["runs"], "pictures": pictures})
