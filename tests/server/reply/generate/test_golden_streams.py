"""Streams to the letter: a client that works today works tomorrow."""

import pytest

from tests.server.golden_streams import FOLDER, GOLDEN, stream_of


@pytest.mark.parametrize("name", GOLDEN)
async def test_a_stream_is_what_it_was(name):
    assert await stream_of(GOLDEN[name]) == (FOLDER / f"chat_{name}.sse").read_text(encoding="utf-8")


def test_every_golden_file_has_its_request():
    assert {path.stem for path in FOLDER.glob("chat_*.sse")} == {f"chat_{name}" for name in GOLDEN}
