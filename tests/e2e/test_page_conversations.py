"""Conversations of the page in a real browser: kept, found, saved, read, continued, with files and models."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e import test_page_in_browser
from tests.e2e.serving import running_server
from tests.e2e.test_page_in_browser import PATIENCE_MS, picture

pytestmark = [pytest.mark.night, *test_page_in_browser.pytestmark[1:]]
browser, page = test_page_in_browser.browser, test_page_in_browser.page  # of page_server


def say(page: Any, text: str) -> None:
    """Send a message and wait for the end of its reply."""
    num_ended = page.locator("article.assistant .meta").count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.locator("article.assistant .meta").nth(num_ended).wait_for()


def test_conversations_are_kept_found_exported_and_imported(page: Any, tmp_path: Path) -> None:
    say(page, "Tell me about a train.")
    page.click("#begin")
    page.select_option("#model", "poet")
    say(page, "Hello! Who are you?")
    replied = page.inner_text("article.assistant .body")
    picture(page, "page-conversations.png")
    page.reload()
    page.locator("article.user", has_text="Who are you?").wait_for()
    assert page.inner_text("article.assistant .body") == replied
    page.wait_for_function("() => document.getElementById('model').value === 'poet'")
    page.fill("#find", "TRAIN about")
    page.wait_for_function("() => document.querySelectorAll('#kept li').length === 1")
    assert "1 of 2" in page.inner_text("#kept-count")
    page.focus("#kept .open")
    page.keyboard.press("Enter")
    page.locator("article.user", has_text="about a train").wait_for()
    assert page.input_value("#model") != "poet", "each conversation has its own"
    with page.expect_download() as download:
        page.click("#export-all")
    saved = tmp_path / "saved.json"
    download.value.save_as(saved)
    page.fill("#find", "")
    page.click("#delete-all")
    assert page.locator("#kept li").count() == 2, "the first press only asks"
    page.click("#delete-all")
    page.wait_for_function("() => !document.querySelector('#kept li')")
    assert page.locator("article").count() == 0
    page.set_input_files("#import-file", saved)
    page.wait_for_function("() => document.querySelectorAll('#kept li').length === 2")
    page.locator("article.assistant .meta").wait_for()
    assert "stopped" not in page.inner_text("article.assistant .meta")
    say(page, "Go on.")
    page.get_by_role("button", name="Delete Hello! Who are you?").click()
    page.get_by_role("button", name="Really delete Hello! Who are you?").click()
    page.wait_for_function("() => document.querySelectorAll('#kept li').length === 1")


def test_files_that_are_no_conversations_are_refused_with_the_reason(page: Any, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    say(page, "Go on.")
    talks = [{"turns": [{"role": "user", "content": "x"}]}] * 200
    broken = {
        "there is room for 199": orjson.dumps({"conversations": talks}).decode(),
        "it is not JSON": "{",
        "it has no turns": "[]",
        "turn 1: its role is none": '{"turns": [{"role": "system", "content": "x"}]}',
        "turn 1: a picture that is no": '{"turns": [{"role": "user", "pictures": ["http://a.example/"]}]}',
    }
    for why, text in broken.items():
        saved.write_text(text)
        page.set_input_files("#import-file", saved)
        page.locator("#storage-note", has_text=why).wait_for()
    assert page.locator("#kept li").count() == 1
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for width in (1280, 360):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("() => document.documentElement.scrollWidth") <= width
            picture(page, f"conversations-{scheme}-{width}.png")


def test_a_reply_that_was_cut_is_continued_to_what_it_would_have_been(page: Any) -> None:
    page.click("#settings-button")
    page.fill("#temperature", "0")
    say(page, "Tell me a short story about a train.")
    whole = page.inner_text("article.assistant .body")
    assert page.get_by_role("button", name="Continue").count() == 0, "it came to its end"
    page.fill("#max_tokens", "9")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("cut at the token limit").wait_for()
    begun = page.inner_text("article.assistant .body")
    assert whole.startswith(begun)
    assert begun != whole
    page.fill("#max_tokens", "")
    page.reload()
    page.get_by_role("button", name="Continue").wait_for()
    page.wait_for_selector("#settings-button")
    page.click("#settings-button")
    page.fill("#temperature", "0")
    with page.expect_response("**/v1/chat/completions") as answered:
        page.get_by_role("button", name="Continue").click()
    asked = answered.value.request.post_data_json
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)
    page.get_by_text("continued").wait_for()
    assert page.inner_text("article.assistant .body") == whole
    assert page.locator("article").count() == 2


def test_text_files_are_shown_sent_and_kept_and_others_refused(page: Any) -> None:
    drop = """([name, text]) => {
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([text], name, { type: "text/plain" }));
      const event = new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true });
      document.getElementById("prompt").dispatchEvent(event);
    }"""
    page.evaluate(drop, ["notes.md", "A fence:\n```\nGrüße\n```"])
    page.locator("#attached .chip", has_text="notes.md").wait_for()
    page.set_input_files("#attach-files", [{"name": "a.csv", "mimeType": "text/csv", "buffer": b"1,2\n"}])
    page.locator("#attached .chip", has_text="a.csv").wait_for()
    refused = {
        "latin.txt is no text in UTF-8": ("latin.txt", "Grüße".encode("latin-1")),
        "zero.bin is no text in UTF-8": ("zero.bin", b"a\0b"),
        "empty.txt is empty": ("empty.txt", b""),
        "long.txt is longer than 256 KiB": ("long.txt", b"x" * (256 * 1024 + 1)),
        "this model sees no pictures": ("shot.png", b"x"),
    }
    for why, (name, content) in refused.items():
        kind = "image/png" if name.endswith("png") else "text/plain"
        page.set_input_files("#attach-files", [{"name": name, "mimeType": kind, "buffer": content}])
        page.locator("#attach-note", has_text=why).wait_for()
    for scheme, width in (("light", 1280), ("dark", 360)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        assert page.evaluate("() => document.getElementById('send').getBoundingClientRect().bottom") <= 800
        picture(page, f"files-{scheme}-{width}.png")
    page.fill("#prompt", "What is in them?")
    page.locator("#attached .chip", has_text="a.csv").click()
    with page.expect_request("**/v1/chat/completions") as asked:
        page.press("#prompt", "Enter")
    (message,) = asked.value.post_data_json["messages"]
    assert message["content"] == ("notes.md:\n````\nA fence:\n```\nGrüße\n```\n````\n\nWhat is in them?")
    page.wait_for_selector("article.assistant .meta")
    page.reload()
    page.locator("article.user details", has_text="notes.md").locator("summary").click()
    assert "Grüße" in page.inner_text("article.user details pre")
    assert page.locator("#attached .chip").count() == 0
    picture(page, "files-sent.png")
    page.click("#begin")
    page.evaluate(drop, ["é" * 200 + ".txt", "x" * (256 * 1024)])
    page.locator("#attached .chip").wait_for()
    for number in range(8):
        page.evaluate(drop, [f"{number}.txt", "x"])
    page.locator("#attach-note", has_text="A message takes 8 files").wait_for()
    assert page.locator("#attached .chip").count() == 8
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360


def test_the_model_is_chosen_where_several_are_served(browser: Any, tmp_path: Path) -> None:
    models = tmp_path / "models.yaml"
    models.write_text(
        """
        defaults: {num_threads: 1, num_gpu_blocks_override: 48}
        models:
          - {served_model_name: [first, alias]}
          - {served_model_name: second, load: demand}
        """
    )
    with running_server(tmp_path, "--models", str(models)) as server:
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{server.url}/")
        page.wait_for_selector(".welcome button")
        offered = page.locator("#model option").all_inner_texts()
        assert offered == ["first", "second (loaded when asked)"], "a second name is no other model"
        page.focus("#model")
        page.keyboard.press("ArrowDown")
        page.get_by_text("Talk to second").wait_for()
        with page.expect_request("**/v1/chat/completions") as asked:
            say(page, "Hello! Who are you?")
        assert asked.value.post_data_json["model"] == "second"
        assert page.locator(".failure").count() == 0
        page.wait_for_function("() => document.getElementById('model').textContent === 'firstsecond'")
        assert page.input_value("#model") == "second"
        page.reload()
        page.wait_for_function("() => document.getElementById('model').value === 'second'")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
        page.close()


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (
            "for (const name of ['indexedDB', 'localStorage'])"
            " Object.defineProperty(window, name,"
            " { get() { throw new DOMException('no', 'SecurityError'); } });"
            "Storage.prototype.setItem = () => { throw new DOMException('no', 'SecurityError'); }",
            "keep nothing",
        ),
        (
            "IDBObjectStore.prototype.put = function () {"
            " throw new DOMException('no', 'QuotaExceededError'); }",
            "storage is full",
        ),
    ],
)
def test_a_chat_goes_on_where_the_browser_keeps_nothing(page: Any, trouble: str, told: str) -> None:
    page.add_init_script(trouble)
    page.reload()
    page.wait_for_selector(".welcome button")
    say(page, "Hello! Who are you?")
    page.locator("#storage-note", has_text=told).wait_for()
    say(page, "And then?")
    assert page.locator("article").count() == 4
    page.click("#theme")
