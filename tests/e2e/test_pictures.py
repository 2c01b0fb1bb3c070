"""Pictures on the real server: a tiny Qwen3-VL with random weights, asked by the clients that people use."""

import base64
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

pytest.importorskip("PIL")

import openai

from engine.media.messages import SHARED_MEMORY
from tests.e2e.seeing_model import write_seeing_model
from tests.e2e.serving import NGRAM, RunningServer, running_server, wait_for
from tests.e2e.test_batches import answers, ended, upload
from tests.e2e.test_page_in_browser import CHROMIUM, FLAGS, PATIENCE_MS
from tests.engine.media.made_pictures import hostile_files, picture

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    model = write_seeing_model(tmp_path_factory.mktemp("seeing"))
    words = (
        *("--served-model-name", "eyes", "--served-model-name", "sight", "--block-size", "8"),
        *("--state-folder", str(tmp_path_factory.mktemp("state")), "--scheduling-policy", "priority"),
        *("--speculative-config", NGRAM, "--swap-space", "64MiB"),
    )
    with running_server(tmp_path_factory.mktemp("server"), str(model), *words) as server:
        yield server
        prefix = prefix_of(server)
    assert not [*SHARED_MEMORY.glob(f"{prefix}*")]


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        yield client


def data(seed: int = 0, width: int = 64, height: int = 48) -> str:
    return base64.b64encode(picture(width, height, seed=seed)).decode()


def parts(*seeds: int) -> list[dict]:
    urls = [f"data:image/png;base64,{data(seed)}" for seed in seeds]
    return [
        {"type": "text", "text": "What is this?"},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
    ]


def tokens_of(client: openai.OpenAI, *seeds: int) -> tuple[list[str], openai.types.CompletionUsage]:
    reply = client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": parts(*seeds)}],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    return [each.token for each in reply.choices[0].logprobs.content], reply.usage


class Sight(pydantic.BaseModel):
    """A thing that is seen."""

    thing: str = pydantic.Field(max_length=10)
    is_large: bool


SEEN = {"name": "Sight", "arguments": '{"thing": "cat", "is_large": false}'}
NOT_ONE = {"image_url": {"url": "data:image/png;base64,AAAA"}}


def prefix_of(server: RunningServer) -> str:
    """Beginning of the names in shared memory that are this server's, by the lock that it holds."""
    opened = set()
    for each in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a connection may end between the list and the look
            opened.add(os.readlink(each))
    (lock,) = [path for path in opened if path.startswith(f"{SHARED_MEMORY}/tokenyard-pictures-")]
    return Path(lock).name.removesuffix("-lock")


def segments(server: RunningServer) -> list[str]:
    return [each.name for each in SHARED_MEMORY.glob(f"{prefix_of(server)}-[0-9]*")]


def test_the_answer_differs_with_the_picture_and_a_second_turn_finds_it(server, client) -> None:
    first, usage = tokens_of(client, 1)
    again, found = tokens_of(client, 1)
    other, _ = tokens_of(client, 2)
    several, more = tokens_of(client, 1, 2, 1)
    assert first == again
    assert len({tuple(each) for each in (first, other, several)}) == 3
    assert more.prompt_tokens - usage.prompt_tokens == 2 * (12 + 2)
    assert found.prompt_tokens_details.cached_tokens >= 0.5 * found.prompt_tokens
    wait_for(lambda: not segments(server))


def test_a_screenshot_in_anthropics_words_is_shown_as_a_tools_result(server) -> None:
    def answer(seed: int) -> str:
        source = {"type": "base64", "media_type": "image/png", "data": data(seed)}
        shot = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}
        messages = [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "shot", "input": {}}]},
            {"role": "user", "content": [shot]},
        ]
        body = {"max_tokens": 8, "messages": messages, "ignore_eos": True, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()["content"][0]["text"]

    assert answer(1) != answer(2)


def test_hostile_files_are_refused_and_the_server_goes_on(server, client) -> None:
    for name, file in hostile_files().items():
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400, (name, reply.text)
    assert len(tokens_of(client, 1)[0]) == 8
    wait_for(lambda: not segments(server))


CALL = openai.pydantic_function_tool(Sight)


def test_what_else_a_request_asks_for_changes_no_token_behind_a_picture(server, client) -> None:

    def reply(*seeds: int, **fields: Any) -> Any:
        extra = {"ignore_eos": True, **fields.pop("extra", {})}
        asked = {"model": "eyes", "max_tokens": 8, "temperature": 0, **fields}
        messages = [{"role": "user", "content": parts(*(seeds or (3,)))}]
        return client.chat.completions.create(messages=messages, extra_body=extra, **asked)

    def text(found: Any) -> str:
        return found.choices[0].message.content

    alone = text(reply())
    assert {each.message.content for each in reply(n=3).choices} == {alone}
    streamed = reply(stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in streamed if each.choices) == alone
    assert text(reply(model="sight")) == alone
    assert text(reply(prediction={"type": "content", "content": alone})) == alone
    assert text(reply(extra={"priority": -5, "prompt_logprobs": 1})) == alone
    assert text(reply(logprobs=True, top_logprobs=5)) == alone
    stop = alone[len(alone) // 2]
    cut = reply(stop=stop)
    assert (text(cut), cut.choices[0].finish_reason) == (alone[: alone.index(stop)], "stop")
    wild = [text(reply(temperature=1.5, seed=7, max_tokens=12)) for _ in range(2)]
    assert wild[0] == wild[1] != alone
    salted = [reply(extra={"cache_salt": salt}) for salt in ("one", "one", "two")]
    assert {text(each) for each in salted} == {alone}
    found = [each.usage.prompt_tokens_details for each in salted]
    num_found = [each.cached_tokens if each is not None else 0 for each in found]
    assert num_found[1] > num_found[0] == num_found[2]
    cut_off = reply(extra={"truncate_prompt_tokens": 16})
    assert cut_off.usage.prompt_tokens <= 16


def test_grammars_and_tools_hold_behind_pictures(client) -> None:
    messages = [{"role": "user", "content": parts(3, 4)}]
    wild = {"model": "eyes", "messages": messages, "temperature": 1.5, "seed": 1, "max_tokens": 200}
    for seed in (1, 2):
        found = client.chat.completions.parse(**{**wild, "seed": seed}, response_format=Sight, n=2)
        for choice in found.choices:
            assert isinstance(choice.message.parsed, Sight)
    called = client.chat.completions.parse(
        **{**wild, "max_tokens": 100}, tools=[CALL], tool_choice="required"
    )
    (call,) = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Sight)
    shown = [
        *messages,
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [{"id": "a", "type": "function", "function": SEEN}],
        },
        {"role": "tool", "tool_call_id": "a", "content": parts(5)},
    ]
    again = client.chat.completions.create(**{**wild, "messages": shown, "max_tokens": 4})
    assert again.usage.prompt_tokens > found.usage.prompt_tokens


def test_responses_and_batches_show_the_same_pictures(server, client) -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data(6)}", "detail": "auto"}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "What is this?"}, image]}]
    fields = {"model": "eyes", "max_output_tokens": 8, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = client.responses.create(input=asked, **fields)
    behind = client.responses.create(input=asked, background=True, **fields)
    wait_for(lambda: client.responses.retrieve(behind.id).status not in ("queued", "in_progress"))
    assert client.responses.retrieve(behind.id).output_text == whole.output_text != ""
    before = server.metric("tokenyard:encoder_inputs_total")
    following = client.responses.create(input="And now?", previous_response_id=behind.id, **fields)
    assert following.usage.input_tokens_details.cached_tokens >= 8
    assert server.metric("tokenyard:encoder_inputs_total") == before
    expected = {number: text_of(client, 30 + number) for number in range(3)}
    bodies = [
        {
            "model": "eyes",
            "messages": [{"role": "user", "content": parts(30 + number)}],
            **{"max_tokens": 8, "temperature": 0, "ignore_eos": True},
        }
        for number in expected
    ]
    bodies.append({**bodies[0], "messages": [{"role": "user", "content": [{**parts(0)[1], **NOT_ONE}]}]})
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    batch = client.batches.create(
        input_file_id=upload(client, *lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    done = ended(client, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (3, 1)
    for one in answers(client, done.output_file_id):
        said = one["response"]["body"]["choices"][0]["message"]["content"]
        assert said == expected[int(one["custom_id"])]
    (failed,) = answers(client, done.error_file_id)
    assert "the picture is not taken" in failed["response"]["body"]["error"]["message"]
    wait_for(lambda: not segments(server))


def text_of(client: openai.OpenAI, *seeds: int, max_tokens: int = 8) -> str:
    reply = client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": parts(*seeds)}],
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    return reply.choices[0].message.content


def test_requests_with_pictures_go_on_in_the_next_engine_process(server, client) -> None:
    expected = [text_of(client, 40 + number, 50, max_tokens=300) for number in range(3)]
    replayed = server.metric("tokenyard:requests_replayed_total")
    with ThreadPoolExecutor(3) as threads:
        # One is stopped before it has taken the request, the other within the replies.
        for is_stopped in (True, False):
            if is_stopped:
                os.kill(server.engine_pid, signal.SIGSTOP)
            first = server.metric("tokenyard:time_to_first_token_seconds_count")
            asked = [threads.submit(text_of, client, 40 + n, 50, max_tokens=300) for n in range(3)]
            if is_stopped:
                wait_for(lambda: len(segments(server)) == 4)
            else:
                wait_for(
                    lambda first=first: (
                        server.metric("tokenyard:time_to_first_token_seconds_count") == first + 3
                    )
                )
                assert not any(each.done() for each in asked), "they end too soon"
            os.kill(server.engine_pid, signal.SIGKILL)
            assert [each.result() for each in asked] == expected
    assert server.metric("tokenyard:requests_replayed_total") >= replayed + 3
    wait_for(lambda: not segments(server))
    server.wait_until_idle()


_DROP = """([name, coded]) => {
  const bytes = Uint8Array.from(atob(coded), (letter) => letter.charCodeAt(0));
  const moved = new DataTransfer();
  moved.items.add(new File([bytes], "shot.png", { type: "image/png" }));
  const given = name === "paste" ? { clipboardData: moved } : { dataTransfer: moved };
  const Kind = name === "paste" ? ClipboardEvent : DragEvent;
  const event = new Kind(name, { ...given, bubbles: true, cancelable: true });
  document.getElementById("prompt").dispatchEvent(event);
}"""


@pytest.mark.skipif(CHROMIUM is None, reason="the page is not tried: there is no Chromium here")
def test_the_page_sends_pictures_that_are_dropped_and_pasted(server) -> None:
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page()
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        sent: list[dict] = []
        page.on(
            "request",
            lambda asked: sent.append(asked.post_data_json) if asked.url.endswith("/completions") else None,
        )
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{server.url}/")
        page.wait_for_selector(".welcome button")
        page.click("#settings-button")
        page.fill("#max_tokens", "4")
        for number, name in enumerate(("drop", "paste", "drop"), 1):
            page.evaluate(_DROP, [name, data(number)])
            page.locator("#attached img").nth(number - 1).wait_for()
        page.locator("#attached button").nth(2).click()
        assert page.locator("#attached img").count() == 2
        page.fill("#prompt", "What are these?")
        page.press("#prompt", "Enter")
        page.get_by_text("first token").wait_for()
        assert page.locator(".message.user img").count() == 2
        assert page.locator("#attached img").count() == 0
        browser.close()
    (body,) = sent
    *pictures, said = body["messages"][-1]["content"]
    assert said == {"type": "text", "text": "What are these?"}
    urls = [f"data:image/png;base64,{data(number)}" for number in (1, 2)]
    assert pictures == [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert not complaints
