"""Adapters seen from outside: chosen, reloaded under load, shared with nobody, counted."""

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import openai
import pytest

from engine.options.found_model import DEMO_MODEL
from tests.adapters import write_adapter
from tests.e2e.serving import RunningServer, running_server, wait_for

pytestmark = pytest.mark.night

PROMPT = "one two three four one two three four one two three four one two"


def post(server: RunningServer, path: str, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def complete(server: RunningServer, model: str, **fields: object) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    reply = post(server, "/v1/completions", {**body, **fields})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


def ready_engines(server: RunningServer) -> float:
    found = server.metrics()
    return sum(found[name] for name in found if name.startswith("tokenyard:engine_ready{"))


def load(server: RunningServer, name: str, folder: str, **fields: object) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder, **fields})


def test_each_name_answers_otherwise_and_always_the_same(equipped_server: RunningServer) -> None:
    assert load(equipped_server, "sql", "sql").status_code == 200
    assert load(equipped_server, "law", "law").status_code == 200
    names = ("tokenyard-demo", "start", "sql", "law")
    texts = {name: complete(equipped_server, name) for name in names}
    assert len(set(texts.values())) == 4
    for name in (*names, *reversed(names)):  # of three adapters two are in memory
        assert complete(equipped_server, name) == texts[name]


def test_a_reload_under_load_changes_no_token_of_those_that_run_and_every_one_of_those_after(
    equipped_server: RunningServer, adapters: Path
) -> None:
    shutil.copytree(adapters / "sql", adapters / "tuned")
    assert load(equipped_server, "tuned", "tuned").status_code == 200
    old = complete(equipped_server, "tuned", max_tokens=300)

    async def run() -> tuple[str, str]:
        async with httpx.AsyncClient(base_url=equipped_server.url, timeout=60) as client:
            body = {"model": "tuned", "prompt": PROMPT, "max_tokens": 300, "temperature": 0, "stream": True}
            running = ""
            async with client.stream("POST", "/v1/completions", json={**body, "ignore_eos": True}) as reply:
                events = reply.aiter_lines()
                async for line in events:
                    if line.startswith("data: {"):
                        running += json.loads(line[6:])["choices"][0]["text"]
                        break
                shutil.copytree(adapters / "law", adapters / "tuned", dirs_exist_ok=True)
                again = {"lora_name": "tuned", "lora_path": "tuned", "load_inplace": True}
                assert (await client.post("/v1/load_lora_adapter", json=again)).status_code == 200
                body |= {"stream": False, "ignore_eos": True}
                after = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
                async for line in events:
                    if line.startswith("data: {"):
                        running += "".join(each["text"] for each in json.loads(line[6:])["choices"])
            return running, after

    running, after = asyncio.run(run())
    assert running == old
    assert after == complete(equipped_server, "law", max_tokens=300)
    assert after != old


def test_prefixes_never_cross(equipped_server: RunningServer) -> None:
    def cached(model: str) -> int:
        body = {"model": model, "prompt": PROMPT * 9, "max_tokens": 1}
        usage = post(equipped_server, "/v1/completions", body).json()["usage"]
        return (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]

    assert [cached("start"), cached("tokenyard-demo"), cached("sql")] == [0, 0, 0]
    assert min(cached("start"), cached("tokenyard-demo"), cached("sql")) > 0


def test_a_line_of_a_batch_chooses_by_model_too(equipped_server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{equipped_server.url}/v1", api_key="any", max_retries=0)
    lines = []
    for model in ("start", "tokenyard-demo"):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        line = {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line))
    data = ("lines.jsonl", "\n".join(lines).encode())
    file_id = client.files.create(file=data, purpose="batch").id
    batch_id = client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
    ).id
    wait_for(lambda: client.batches.retrieve(batch_id).status == "completed", within_s=60.0)
    output = client.files.content(client.batches.retrieve(batch_id).output_file_id).text
    for line in map(json.loads, output.splitlines()):
        found = line["response"]["body"]["choices"][0]["text"]
        assert found == complete(equipped_server, line["custom_id"])


def test_the_gauges_name_who_runs_and_who_is_in_memory(equipped_server: RunningServer) -> None:
    assert load(equipped_server, "seen", "law").status_code == 200
    complete(equipped_server, "seen")
    found = '{adapter="seen",rank="4"}'
    wait_for(lambda: equipped_server.metrics().get(f"tokenyard:adapter_in_memory{found}") == 1)
    idle = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""}'
    wait_for(lambda: idle in httpx.get(f"{equipped_server.url}/metrics").text)


def test_two_engines_of_two_ranks_have_the_same_adapters(
    adapters: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = (
        *("--lora-modules", f"start={adapters / 'start'}", "--lora-directory", str(adapters)),
        *("--state-folder", str(tmp_path_factory.mktemp("state"))),
        *("--data-parallel-size", "2", "--tensor-parallel-size", "2"),
    )
    with running_server(tmp_path, *options) as server:
        wait_for(lambda: ready_engines(server) == 2, within_s=60.0)
        assert load(server, "sql", "sql").status_code == 200
        names = ("tokenyard-demo", "start", "sql")

        async def ask() -> list[str]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                bodies = [
                    {"model": name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                    for name in names * 4
                ]
                replies = await asyncio.gather(
                    *(client.post("/v1/completions", json=each) for each in bodies)
                )
                return [reply.json()["choices"][0]["text"] for reply in replies]

        texts = asyncio.run(ask())
        assert texts == texts[:3] * 4, "whichever engine answers"
        assert len(set(texts)) == 3
        in_memory = 'tokenyard:adapter_in_memory{adapter="sql",rank="4"}'
        wait_for(lambda: server.metrics().get(in_memory) == 2)
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "sql"}).status_code == 200
        assert post(server, "/v1/completions", {"model": "sql", "prompt": "x"}).status_code == 404


def test_settings_that_no_reader_expects_are_refused_while_a_stream_goes_on(
    equipped_server: RunningServer, adapters: Path
) -> None:
    write_adapter(adapters / "huge", DEMO_MODEL)
    written = (adapters / "huge" / "adapter_config.json").read_text()
    hostile = [
        written.replace(": 16", ": " + "1" * 400),
        written.replace(": 8", ": " + "[" * 5000 + "]" * 5000),
    ]
    patterns = json.dumps({rf"\w{{90}}{index}": 8 for index in range(1500)})
    hostile.append(written.replace('"bias"', f'"rank_pattern": {patterns}, "bias"'))
    pid = equipped_server.engine_pid
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{equipped_server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: {")
        for text in hostile:
            (adapters / "huge" / "adapter_config.json").write_text(text)
            assert load(equipped_server, "huge", "huge").status_code == 400
        *_, last = [line for line in lines if line]
    assert last == "data: [DONE]"
    assert equipped_server.engine_pid == pid, "it was not replaced"


def test_what_is_refused_stays_out(equipped_server: RunningServer, adapters: Path) -> None:
    write_adapter(adapters / "dora", DEMO_MODEL, use_dora=True)
    reply = load(equipped_server, "dora", "dora")
    assert reply.status_code == 400
    assert "use_dora is set, which is not computed" in reply.json()["error"]["message"]
    assert load(equipped_server, "x", "../start").status_code == 400
    assert post(equipped_server, "/v1/completions", {"model": "dora", "prompt": "x"}).status_code == 404
    assert post(equipped_server, "/v1/unload_lora_adapter", {"lora_name": "law"}).status_code == 200
    assert post(equipped_server, "/v1/completions", {"model": "law", "prompt": "x"}).status_code == 404
