"""Ranks of two nodes leave texts for each other by torch.distributed's calls, and find their interface."""

from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from torch.distributed import PrefixStore

from engine.nodes import link_address, shelf
from engine.nodes.link_address import interface_to
from engine.nodes.links import Links
from engine.nodes.shelf import Put, Shelf
from tests.engine.nodes.test_switchboard import HELLO, First, answer_to, first, four, until
from worker.worker_errors import StartupError

__all__ = ["first", "four"]


def test_a_rank_finds_what_one_of_another_node_leaves(first: First, four: list[Links]) -> None:
    """Calls come from below prefixes and by several threads, as the libraries make them."""
    stores = [PrefixStore("group", PrefixStore("7", links.store())) for links in four]
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(each.get, "address") for each in stores[1:]]
        waiting.append(threads.submit(stores[2].wait, ["address", "later"]))
        assert not stores[3].check(["address"])
        stores[0].set("address", b"\x00\xff")
        assert [each.result() for each in waiting[:-1]] == [b"\x00\xff"] * 3
        stores[1].set("later", "text")
        waiting[-1].result()
        sums = sorted(threads.map(lambda i: stores[i % 4].add("count", 2), range(12)))
    assert sums == list(range(2, 25, 2))
    assert stores[0].check(["address", "later", "count"])
    assert first.losses == []


def test_a_call_that_is_none_ends_the_engine(first: First, four: list[Links]) -> None:
    with first.node() as leader:
        answer_to(leader, HELLO)
        first.board.begin()
        four[3].store()._socket.send(b"\xc1")
        until(lambda: first.losses)
    assert first.losses[0].startswith("70: the links between nodes failed: ")


def test_what_ranks_leave_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "_MAX_VALUE_BYTES", 10)
    monkeypatch.setattr(shelf, "_MAX_KEYS", 2)
    texts = Shelf()

    def put(key: str, value: bytes) -> bytes:
        return texts.answer(msgspec.msgpack.encode(Put(key, value)))

    with pytest.raises(ValueError, match="11 bytes, key a"):
        put("a", b"." * 11)
    assert msgspec.msgpack.decode(put("a", b"." * 10)) == b"." * 10
    put("b", b"")
    with pytest.raises(ValueError, match="key c"):
        put("c", b"")
    assert msgspec.msgpack.decode(put("a", b"again")) == b"again"


def test_the_interface_is_the_one_that_leads_to_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_to("127.0.0.2") == "lo"
    monkeypatch.setattr(link_address.socket, "if_nameindex", lambda: [(9, "none0")])
    with pytest.raises(StartupError, match=r"no network interface has 127\.0\.0\.1"):
        interface_to("127.0.0.1")
