"""Members of objects, counted before a body is parsed: very many are refused, doubled keys missed later."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRejected
from server.edge.http import json_body
from server.edge.http.json_body import parse_object
from tests.server.reply.generate.test_bad_requests import JSON


@pytest.mark.parametrize("member", ['"k%d":0', '"a%d":{"b":[]}'])
def test_a_body_of_very_many_members_is_refused_before_any_is_built(member: str, monkeypatch) -> None:
    monkeypatch.setattr(json_body.orjson, "loads", None)
    entries = ",".join(member % number for number in range(json_body.MAX_MEMBERS))
    with pytest.raises(RequestRejected, match=f"more than {json_body.MAX_MEMBERS} members"):
        parse_object(f'{{"a":{{{entries}}}}}'.encode())


def test_colons_in_texts_are_no_members() -> None:
    assert parse_object(('{"prompt":"' + ":" * 200_000 + '"}').encode())["prompt"]


def test_one_key_twice_among_very_many_is_found_in_time():
    """To look for each key among all others would take minutes."""
    entries = ",".join(f'"k{number}":0' for number in range(60_000))
    began_s = time.process_time()
    with pytest.raises(RequestRejected, match="a key appears twice"):
        parse_object(f'{{"a":{{{entries},"k_":0,"k_":0}}}}'.encode())
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("num_entries", [1, json_body.MAX_MEMBERS - 1])
def test_a_body_without_a_doubled_key_is_parsed_once(num_entries: int, monkeypatch) -> None:
    """The second parser holds the interpreter's lock for longer than the first."""
    monkeypatch.setattr(json_body, "_refuse_duplicates", None)
    entries = ",".join(f'"{number}":1' for number in range(num_entries))
    assert len(parse_object(f'{{"a":{{{entries}}}}}'.encode())["a"]) == num_entries


def num_members(value: object) -> int:
    if isinstance(value, list):
        return sum(map(num_members, value))
    return len(value) + sum(map(num_members, value.values())) if isinstance(value, dict) else 0


@settings(max_examples=60, deadline=None)
@given(value=JSON, piece_bytes=st.integers(1, 9))
def test_members_are_counted_wherever_a_text_begins_or_ends(value: object, piece_bytes: int) -> None:
    raw = json.dumps([value, {'\\"': "\\\\", "\\": ':"'}], ensure_ascii=False).encode(errors="replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_INLINE_BYTES", piece_bytes)
        assert json_body.check_num_items(raw) == num_members(value) + 2
