"""The page's files: public, small, and unable to reach anything but this server."""

import gzip
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engine.options.edge_config import PageParts
from server.app import build_admin_app, build_app
from server.page import page
from server.page.page import FILES
from tests.server.conftest import EDGE, Settings, connect
from tests.server.fake_engine import FakeEngine

_MAX_ZIPPED_BYTES = 100_000
VENDORED = {
    "katex.min.js": "e8d885505949f3a5f4abdd5dd0d53696bd1371ad26ffbf4f310dcd77c8cdae89",  # npm, 0.16.22
    "highlight.min.js": "7865839949f0764d9e0a21e311a4e2c42633eeaee8ca5ec127b86438565731fe",  # npm, 11.11.1
}
"""Files of other projects, by their SHA-256."""
OWN = [name for name in FILES if name not in VENDORED]


def paths() -> list[str]:
    return ["/", "/docs", *(f"/page/{name}" for name in FILES if name not in ("index.html", "docs.html"))]


async def test_the_page_and_its_files_need_no_key_and_keep_to_this_origin(engine):
    async with connect(build_app(engine, Settings(api_keys=("k",)))) as client:
        for path in paths():
            for method in ("GET", "HEAD"):
                reply = await client.request(method, path)
                assert reply.status_code == 200, path
                policy = reply.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "http" not in policy
                assert reply.headers["x-content-type-options"] == "nosniff"
                assert bool(reply.content) == (method == "GET")


def test_the_page_is_small():
    assert sum(len(gzip.compress(FILES[name].plain)) for name in OWN) < _MAX_ZIPPED_BYTES


def test_files_of_others_are_as_they_published_them_with_their_licence_and_come_only_when_needed():
    folder = Path(page.__file__).parent / "web" / "vendor"
    assert {each.name for each in folder.glob("*.js")} == set(VENDORED)
    for name, digest in VENDORED.items():
        assert hashlib.sha256(FILES[name].plain).hexdigest() == digest, name
        licence = (folder / f"{name.split('.')[0]}.LICENSE").read_text()
        assert "Copyright (c)" in licence
        for each in ("eval(", "new Function", "document.write"):
            assert each.encode() not in FILES[name].plain
    assert not [name for name in OWN if name != "decorate.js" and b".min.js" in FILES[name].plain]


@pytest.mark.parametrize("name", OWN)
def test_a_file_names_no_other_server_and_makes_no_markup_of_text(name):
    text = FILES[name].plain.decode()
    addresses = set(re.findall(r"https?://[^\s'\"`)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https?:\\/\\/[^\\s"}, "an address in a file"
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
    assert " style=" not in text
    assert not re.search(r"\son[a-z]+=", text), "an inline handler, which the policy refuses"


async def test_a_file_that_is_known_is_not_sent_again(client):
    first = await client.get("/page/main.js")
    assert first.headers["content-encoding"] == "gzip"
    again = await client.get("/page/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = await client.get("/page/main.js", headers={"accept-encoding": "identity"})
    assert plain.content == first.content


async def test_there_is_no_other_file(client):
    for name in ("index.html", "docs.html", "nothing.js", "..%2Fpage.py", "page.py"):
        assert (await client.get(f"/page/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("page", "enable_admin", "expected"),
    [
        (
            PageParts.OFF,
            False,
            {"/docs": 404, "/": 405, "/admin/events": 404, "/admin/server": 404, "/admin/requests": 404},
        ),
        (PageParts.OFF, True, {"/": 405, "/admin/events": 200, "/admin/server": 200, "/admin/requests": 200}),
        (PageParts.CHAT, False, {"/docs": 200, "/": 200, "/admin/events": 404, "/admin/server": 404}),
        (PageParts.CHAT, True, {"/": 200, "/admin/events": 200, "/admin/server": 200}),
        (
            PageParts.YARD,
            False,
            {"/": 200, "/admin/events": 200, "/admin/server": 200, "/admin/requests": 404},
        ),
    ],
)
async def test_the_option_says_what_is_served(page, enable_admin, expected):
    settings = Settings(edge=replace(EDGE, page=page), enable_admin=enable_admin)
    async with connect(build_app(FakeEngine(), settings)) as client:
        assert {path: (await client.get(path)).status_code for path in expected} == expected


async def test_a_port_for_administration_has_the_page_with_the_yard(engine):
    settings = Settings(edge=replace(EDGE, page=PageParts.CHAT, admin_port=0), enable_admin=False)
    app = build_app(engine, settings)
    async with connect(app) as client, connect(build_admin_app(app, settings)) as admin:
        assert (await client.get("/admin/events")).status_code == 404
        assert (await admin.get("/admin/events")).status_code == 200
        assert (await admin.get("/")).status_code == 200
        assert (await admin.get("/models")).json()["data"][0]["id"] == "fake"
        refused = await admin.post("/models/load", json={"model": "fake"})
        assert "always loaded" in refused.json()["error"]["message"]
        assert (await admin.get("/v1/models")).status_code == 404, (
            "by which the page knows that no chat is here"
        )
