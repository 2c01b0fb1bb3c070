"""The page in a real browser: a key, a chat, a preemption that is seen, and nothing asked of anybody else.

Needs Chromium (`apt-get install chromium`, or its path in CHROMIUM) and the package playwright.
PAGE_IMAGES names a folder for the pictures of README.md and docs.
"""

import concurrent.futures
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from bench.simulate.requests.files import read_requests
from bench.trace.reading import read_trace
from tests.e2e.conftest import KEY
from tests.e2e.serving import RunningServer

api = pytest.importorskip("playwright.sync_api", reason="the page is not tried: playwright is not installed")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
IMAGES = os.environ.get("PAGE_IMAGES")
BEARER = {"authorization": f"Bearer {KEY}"}
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 60_000

pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(
        CHROMIUM is None, reason="the page is not tried: there is no Chromium here (apt-get install chromium)"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, page_server: RunningServer) -> Iterator[Any]:
    """The page with its key typed in. Afterwards: no complaint, no request to anybody else."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    page = context.new_page()
    complaints: list[str] = []
    foreign: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((page_server.url, "blob:")) else foreign.append(asked.url),
    )
    page.add_init_script(
        "addEventListener('securitypolicyviolation', (e) => console.error('policy: ' + e.violatedDirective))"
    )
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{page_server.url}/")
    page.get_by_text("A key opens the chat").wait_for()
    page.fill("#key", KEY)
    # Every request before the key is refused, and Chromium says so on its console.
    complaints[:] = [text for text in complaints if "401" not in text]
    page.click("#key-form button")
    page.wait_for_selector(".welcome button")
    complaints[:] = [text for text in complaints if "401" not in text]
    yield page
    context.close()
    assert complaints == []
    assert foreign == []


def picture(page: Any, name: str) -> None:
    if IMAGES:
        page.screenshot(path=str(Path(IMAGES) / name))


def film(page: Any) -> None:
    """Take the frames of the README's moving picture: scripts/moving_picture.py."""
    page.set_viewport_size({"width": 1060, "height": 700})
    for number in range(14):
        picture(page, f"frame-{number:02}.png")
        page.wait_for_timeout(250)
    page.set_viewport_size({"width": 1280, "height": 860})
    page.wait_for_timeout(500)


def ask(server: RunningServer, number: int) -> int:
    body = {
        "prompt": f"Once upon a time, in the land of the number {number},",
        "max_tokens": 330,
        "ignore_eos": True,
        "priority": number % 3,
    }
    headers = {**BEARER, "x-tokenyard-tenant": ("acme", "umbra")[number % 2]}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).status_code


def test_a_chat_is_answered_retried_edited_and_copied(page: Any) -> None:
    page.fill("#prompt", "Hello! Who are you?")
    page.press("#prompt", "Enter")
    page.wait_for_selector("article.assistant .meta")
    assert page.inner_text("article.assistant .body").strip()
    assert "first token" in page.inner_text("article.assistant .meta")
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector("article.assistant .meta")
    assert page.locator("article").count() == 2
    page.get_by_role("button", name="Edit").click()
    page.fill("article.user textarea", "Tell me a short story about a train.")
    page.get_by_role("button", name="Send again").click()
    page.wait_for_selector("article.assistant .meta")
    assert "train" in page.inner_text("article.user .body")
    picture(page, "page-chat.png")


def test_an_adapter_is_chosen_beside_the_model(page: Any) -> None:
    page.select_option("#model", "poet")
    page.get_by_text("Talk to poet").wait_for()
    with page.expect_response("**/v1/chat/completions") as answered:
        page.click(".welcome button")
    assert answered.value.status == 200
    assert answered.value.request.post_data_json["model"] == "poet"
    page.wait_for_selector(".meta")


def test_priority_time_limit_settings_and_the_copied_request_agree(page: Any) -> None:
    page.click("#settings-button")
    page.fill("#system", "You are brief.")
    page.fill("#max_tokens", "5")
    page.fill("#schema", "{")
    page.locator("#priority").fill("2")
    page.locator("#limit").fill("4")
    page.fill("#prompt", "Hello!")
    page.click("#send")
    assert "not valid JSON" in page.inner_text(".failure")
    page.fill("#schema", "")
    page.get_by_role("button", name="Retry").click()
    page.wait_for_selector("article.assistant .meta")
    assert "priority 2" in page.inner_text("article.assistant .meta")
    curl, python = page.evaluate(
        """async () => {
          const { snippet } = await import("/page/snippets.js");
          const body = { model: "m", messages: [{ role: "user", content: "it's" }], priority: 2, timeout: 5, stream: true };
          return ["curl", "python"].map((each) => snippet(each, body, { needsKey: true }));
        }"""  # noqa: E501
    )
    assert "it'\\''s" in curl
    assert KEY not in curl + python, "the variable, not the key"
    compile(python, "snippet", "exec")
    assert '"timeout": 5' in python


def test_the_priority_sleeps_where_requests_are_served_in_order_of_arrival(page: Any) -> None:
    assert page.inner_text("label:has(#priority)").split()[:3] == ["Priority", "urgent", "later"]
    assert page.is_enabled("#priority")
    page.locator("#priority").fill("-3")

    def in_order(route: Any) -> None:
        """The engine's views as a server under fcfs sends them."""
        stats = dict.fromkeys(
            ("num_running", "num_waiting", "num_swapped", "num_blocks", "num_used_blocks"), 0
        )
        view = {"time_s": 1.0, "policy": "fcfs", "stats": stats, "running": [], "waiting": [], "steps": []}
        route.fulfill(body=f"data: {orjson.dumps(view).decode()}\n\n", content_type="text/event-stream")

    page.route("**/admin/events", in_order)
    page.reload()
    page.get_by_text("off: fcfs").wait_for()
    assert page.is_disabled("#priority")
    page.wait_for_selector(".welcome button")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.click(".welcome button")
    assert "priority" not in asked.value.post_data_json
    page.wait_for_selector(".meta")
    for scheme, width in (("light", 1280), ("dark", 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        picture(page, f"priority-{scheme}-{width}.png")


def test_recent_errors_are_told_in_single_rows_with_field_and_message(
    page: Any, page_server: RunningServer
) -> None:
    for number in range(40):
        body = {"prompt": "x", "max_tokens": -number - 1}
        assert httpx.post(f"{page_server.url}/v1/completions", json=body, headers=BEARER).status_code == 400
    page.click("#tab-server")
    page.locator("#errors td", has_text="max_tokens").first.wait_for()
    heights = page.locator("#errors tr").evaluate_all("rows => rows.map((row) => row.offsetHeight)")
    assert len(heights) > 40
    assert max(heights) < 30, "one line each"
    assert page.evaluate("() => document.getElementById('errors').offsetHeight") <= 340
    page.set_viewport_size({"width": 360, "height": 800})
    assert page.evaluate("() => document.getElementById('server').scrollWidth") <= 360
    picture(page, "errors-360.png")
    page.set_viewport_size({"width": 1280, "height": 800})
    picture(page, "errors-1280.png")


def test_a_reply_can_be_stopped(page: Any, page_server: RunningServer) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as crowd:
        others = [crowd.submit(ask, page_server, number * 3) for number in range(8)]
        page.locator("#priority").fill("5")  # it waits behind all of them
        page.fill("#prompt", "Hello!")
        # Within the page: on a busy machine the reply was over before a click from outside came.
        page.evaluate(
            """async () => {
              document.querySelector("#send").click();
              const stop = document.querySelector("#stop");
              while (!stop.checkVisibility()) await new Promise(requestAnimationFrame);
              stop.click();
            }"""
        )
        page.wait_for_selector("article.assistant .meta")
        assert page.is_visible("#send")
        assert [each.result() for each in others] == [200] * 8


def test_a_preemption_is_seen_told_and_exported(
    page: Any, page_server: RunningServer, tmp_path: Path
) -> None:
    page.click("#tab-yard")
    page.wait_for_selector("#gauges dd")
    with concurrent.futures.ThreadPoolExecutor(14) as crowd:
        others = [crowd.submit(ask, page_server, number) for number in range(14)]
        page.wait_for_selector("#running [data-id]")
        page.wait_for_selector("#waiting [data-id] .why")
        page.wait_for_selector("#events li:not(.empty)")
        if IMAGES:  # pictures with more steps in them
            film(page)
        page.click("#pause")
        picture(page, "page-yard.png")
        page.locator("#running [data-id]").first.click()
        assert "prompt tokens" in page.inner_text("#life")
        assert [each.result() for each in others] == [200] * 14
    assert "gave" in page.inner_text("#events li:not(.empty) >> nth=0")
    shown = page.inner_text("#scrub-value")
    page.focus("#scrub")
    page.press("#scrub", "ArrowLeft")
    assert "ago" in page.inner_text("#scrub-value") != shown
    page.click("#pause")
    assert page.inner_text("#scrub-value") == "live"
    page.click("#export")
    files = {}
    for name in ("steps", "requests", "perfetto"):
        with page.expect_download() as download:
            page.click(f"#export-{name}")
        files[name] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[name])
    assert "tokenyard simulate --fit yard-steps.jsonl" in page.text_content("#what-if")
    page.click("#run-what-if")
    page.locator("#what-if-runs th", has_text="num_blocks=96").wait_for()
    assert "preemptions" in page.inner_text("#what-if-runs")
    assert page.get_attribute("#what-if-queue", "src").startswith("data:image/svg+xml,")
    assert any(step["preemptions"] for step in map(orjson.loads, files["steps"].read_bytes().splitlines()))
    assert list(read_trace(files["steps"]))
    assert len(list(read_requests(files["requests"]))) >= 14
    phases = {event["ph"] for event in orjson.loads(files["perfetto"].read_bytes())["traceEvents"]}
    assert {"X", "C", "s", "f"} <= phases


def test_the_server_tab_names_options_with_their_origin(page: Any) -> None:
    page.click("#tab-server")
    page.wait_for_selector("#options tr.set")
    rows = page.inner_text("#options")
    assert "--num-gpu-blocks-override" in rows
    assert "environment" in rows
    assert KEY not in page.content()


def test_the_api_is_read_and_tried_without_another_server(page: Any, page_server: RunningServer) -> None:
    page.goto(f"{page_server.url}/docs")
    page.get_by_text("Anthropic's API").wait_for()
    page.fill("#filter", "logprob_token_ids")
    paths = ("/v1/chat/completions", "/v1/completions")
    having = {f"post{path}{step}" for path in paths for step in ("", "/render")}
    visible = page.locator(".operation:visible").evaluate_all("shown => shown.map(one => one.id)")
    assert set(visible) == having, "those that have the field"
    chat = page.locator("[id='post/v1/chat/completions']")
    chat.locator("summary").click()
    chat.get_by_text("The newer name of max_tokens").wait_for()
    chat.get_by_role("button", name="Send").click()
    page.wait_for_function(
        "() => document.querySelector('.operation[open] pre').textContent.includes('usage')"
    )
    assert "Paris" in chat.locator("pre").inner_text()
    for scheme, width in (("light", 1280), ("dark", 1280), ("light", 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 860})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        picture(page, f"docs-{scheme}-{width}.png")


def test_the_text_of_a_model_stays_text(page: Any) -> None:
    made = page.evaluate(
        """async () => {
          const { render } = await import("/page/markdown.js");
          const box = document.createElement("div");
          render(box, "# T <img src=x onerror=alert(1)>\\n\\n**b** `c` [no](javascript:alert(1)) [yes](https://a.example/)\\n\\n" +
            "- one\\n  - two\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |\\n\\n```html\\n<script>alert(1)</script>\\n");
          return { tags: [...box.querySelectorAll("*")].map((each) => each.tagName.toLowerCase()),
                   links: [...box.querySelectorAll("a")].map((each) => each.href), text: box.textContent };
        }"""  # noqa: E501
    )
    assert {"h2", "strong", "code", "ul", "li", "table", "td", "pre"} <= set(made["tags"])
    assert not {"img", "script"} & set(made["tags"])
    assert made["links"] == ["https://a.example/"]
    assert "<script>alert(1)</script>" in made["text"]


def test_formulas_lose_no_text_and_cannot_hang_the_page(page: Any) -> None:
    growing = r"$$\def\a{" + "x" * 500 + "}" + r"\a" * 490 + "$$"
    expected: dict[str, list[str]] = {
        f"{growing}\n\n$y$": [growing, "F"],  # they wait for the library
        growing: [growing],
        f"${'x' * 2001}$": [f"${'x' * 2001}$"],
        r"$$a$$ and $$b$$ are **equal**": ["F and F are +equal+"],
        r"\[x\] or \[y\] or z": ["F or F or z"],
        "$$\na\n$$ b": ["F b"],
        "$$ is a mark\nof **two**\n```js\nlet x;\n```\nend": ["$$ is a markof +two+", "#let x;Copy", "end"],
        r"$$\nothing$$ \(\nothing\)": [r"$$\nothing$$ \(\nothing\)"],
        "\\[\n\\[\n": [r"\[", r"\["],
        "```js\nlet x;": ["let x;Copy"],  # it is not whole, and has no colours
    }
    made = page.evaluate(
        """async (texts) => {
          const { render } = await import("/page/markdown.js");
          const made = [];
          for (const text of texts) {
            const box = document.createElement("div");
            document.body.append(box);
            render(box, text);
            while (!window.katex || !window.katex.isSeen) await new Promise((resolve) => setTimeout(resolve, 50, window.katex && (window.katex.isSeen = true)));
            for (const each of box.querySelectorAll("math")) each.replaceWith("F");
            for (const each of box.querySelectorAll("strong")) each.replaceWith(`+${each.textContent}+`);
            for (const each of box.querySelectorAll("code[data-language]")) each.prepend("#");
            made.push([...box.children].map((each) => each.textContent));
            box.remove();
          }
          return made;
        }""",  # noqa: E501
        list(expected),
    )
    assert dict(zip(expected, made, strict=True)) == expected


def test_the_models_are_asked_for_again_after_a_failure(page: Any, page_server: RunningServer) -> None:
    replies = ['{"data": [{"id": "a", "root": "a"}, {"id": "b", "root": "b"}]}', "no JSON"]
    page.route(
        f"{page_server.url}/models",
        lambda route: route.fulfill(body=replies.pop() if len(replies) > 1 else replies[0]),
    )
    page.evaluate("() => document.dispatchEvent(new Event('key'))")
    page.wait_for_selector("#yard-model option[value=b]", state="attached")


def test_nothing_is_wider_than_a_phone(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for tab in ("chat", "yard", "server"):
            page.click(f"#tab-{tab}")
            assert page.evaluate("(tab) => document.getElementById(tab).scrollWidth", tab) <= 360, tab
            picture(page, f"phone-{tab}-{scheme}.png")


def test_a_phone_has_room_for_one_panel_and_the_composer(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.reload()
    page.wait_for_selector(".welcome button")
    assert page.is_hidden("#conversations")
    for opened, other in (("list", "settings"), ("settings", "list"), ("list", "settings")):
        page.click(f"#{opened}-button")
        assert page.get_attribute(f"#{opened}-button", "aria-expanded") == "true"
        assert page.get_attribute(f"#{other}-button", "aria-expanded") == "false"
        on_top = page.evaluate(
            """() => {
              const { x, y, width, height } = document.getElementById("send").getBoundingClientRect();
              return document.elementFromPoint(x + width / 2, y + height / 2)?.id;
            }"""
        )
        assert on_top == "send"
        picture(page, f"phone-{opened}.png")
    page.click("#list-button")
    assert page.is_hidden("#conversations")
    assert page.get_by_role("heading", name="Tokenyard", exact=True).count() == 1
    page.click("#tab-yard")
    page.wait_for_selector("#gauges dd")
    names = page.locator("#gauges dt").evaluate_all(
        "all => all.map((one) => one.scrollWidth - one.clientWidth)"
    )
    assert len(names) == 8
    assert max(names) <= 0, "a name of a gauge is cut"
