"""Contents of the store: for how long, and how much."""

import tracemalloc

from server.api.responses.protocol import InputItem
from server.api.responses.store import ResponseStore, StoredResponse, weigh


def stored(*, owner: str = "", num_bytes: int = 10) -> StoredResponse:
    body = b"x" * num_bytes
    return StoredResponse(owner=owner, body=body, input=(), conversation=(), num_conversation_bytes=0)


def test_the_one_unused_for_longest_goes_first():
    store = ResponseStore(max_responses=2, max_bytes=1000, ttl_s=60.0)
    store.add("a", stored(), now_s=0.0)
    store.add("b", stored(), now_s=1.0)
    assert store.find("a", owner="", now_s=2.0)
    store.add("c", stored(), now_s=3.0)
    assert [bool(store.find(name, owner="", now_s=4.0)) for name in "abc"] == [True, False, True]


def test_bytes_are_bounded_too_and_what_is_too_large_is_not_kept():
    store = ResponseStore(max_responses=9, max_bytes=25, ttl_s=60.0)
    for place, name in enumerate("abc"):
        store.add(name, stored(), now_s=float(place))
    assert (len(store._entries), store.num_bytes) == (2, 20)
    store.add("large", stored(num_bytes=26), now_s=4.0)
    assert store.find("large", owner="", now_s=4.0) is None
    assert len(store._entries) == 2


def test_what_nobody_used_for_the_time_to_live_is_gone():
    store = ResponseStore(max_responses=9, max_bytes=1000, ttl_s=10.0)
    store.add("a", stored(), now_s=0.0)
    store.add("b", stored(), now_s=0.0)
    assert store.find("a", owner="", now_s=9.0)
    assert store.find("b", owner="", now_s=10.0) is None
    assert store.find("a", owner="", now_s=18.0)
    assert store.find("a", owner="", now_s=28.0) is None
    assert store.num_bytes == 0


def test_another_owner_can_neither_find_nor_delete_nor_keep_alive():
    store = ResponseStore(max_responses=9, max_bytes=1000, ttl_s=10.0)
    store.add("a", stored(owner="key-1"), now_s=0.0)
    assert store.find("a", owner="key-2", now_s=9.0) is None
    assert not store.delete("a", owner="key-2", now_s=9.0)
    assert store.find("a", owner="key-1", now_s=11.0) is None


def test_the_weight_of_a_conversation_is_at_least_its_memory():
    def items() -> list[InputItem]:
        parts = [{"type": "input_text", "text": f"{place} \U0001f600"} for place in range(64)]
        wordy = {"type": "function_call", "call_id": "c" * 100, "name": "f" * 60, "arguments": "{}" * 500}
        bodies = ({"role": "user", "content": "x"}, {"role": "user", "content": parts}, wordy)
        return [InputItem.model_validate(body) for body in bodies for _ in range(200)]

    items()
    tracemalloc.start()
    try:
        kept = items()
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes <= weigh(kept) < 4 * num_bytes


def test_each_field_that_may_be_long_has_its_weight():
    text = "x" * 100_000
    tool = {"type": "function", "name": "f", "parameters": {"description": text}}
    for field, value in (
        ("arguments", text),
        ("input", text),
        ("encrypted_content", text),
        ("action", {"command": [text]}),
        ("tools", [tool]),
    ):
        item = InputItem.model_validate({"type": "custom_tool_call", field: value})
        assert weigh([item]) >= len(text), field


def test_a_picture_weighs_as_much_as_its_url():
    url = f"data:image/png;base64,{'A' * 100_000}"
    for name in ("content", "output"):
        item = InputItem.model_validate({"role": "user", name: [{"type": "input_image", "image_url": url}]})
        assert len(url) < weigh([item]) < len(url) + 10_000
