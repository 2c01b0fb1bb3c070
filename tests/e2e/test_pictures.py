"""Pictures on the real server: a tiny Qwen3-VL with random weights, asked by the clients that people use."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("PIL")

import openai

from engine.media.messages import SHARED_MEMORY
from tests.e2e.seeing_model import write_seeing_model
from tests.e2e.serving import RunningServer, running_server, wait_for
from tests.e2e.test_page_in_browser import CHROMIUM, FLAGS, PATIENCE_MS
from tests.engine.media.made_pictures import hostile_files, picture

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    model = write_seeing_model(tmp_path_factory.mktemp("seeing"))
    with running_server(
        tmp_path_factory.mktemp("server"), str(model), "--served-model-name", "eyes", "--block-size", "8"
    ) as server:
        yield server
        prefix = prefix_of(server)
    assert not [*SHARED_MEMORY.glob(f"{prefix}*")]


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


def prefix_of(server: RunningServer) -> str:
    """Beginning of the names in shared memory that are this server's, by the lock that it holds."""
    opened = [os.readlink(each) for each in Path(f"/proc/{server.process.pid}/fd").iterdir()]
    (lock,) = [path for path in opened if path.startswith(f"{SHARED_MEMORY}/tokenyard-pictures-")]
    return Path(lock).name.removesuffix("-lock")


def segments(server: RunningServer) -> list[str]:
    return [each.name for each in SHARED_MEMORY.glob(f"{prefix_of(server)}-[0-9]*")]


def test_the_answer_differs_with_the_picture_and_a_second_turn_finds_it(server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
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


def test_hostile_files_are_refused_and_the_server_goes_on(server) -> None:
    for name, file in hostile_files().items():
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400, (name, reply.text)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x")
    assert len(tokens_of(client, 1)[0]) == 8
    wait_for(lambda: not segments(server))


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
