"""Ranks of two nodes leave texts for each other by torch.distributed's calls, and find their interface."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch.distributed import DistStoreError, PrefixStore

from engine.nodes import link_address
from engine.nodes import links as links_module
from engine.nodes import outbox as shelf
from engine.nodes.link_address import interface_to
from engine.nodes.links import Links
from engine.nodes.outbox import Outbox, Put
from engine.processes.process_end import EXIT_WORKER_BROKEN
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
    monkeypatch.setattr(shelf, "_MAX_BYTES", 30)
    monkeypatch.setattr(shelf, "_BESIDE_BYTES", 4)
    texts = Outbox()

    def put(key: str, value: bytes) -> bytes:
        return texts.answer(msgspec.msgpack.encode(Put(key, value)))

    with pytest.raises(ValueError, match="31 bytes, key a"):
        put("a", b"." * 26)
    assert msgspec.msgpack.decode(put("a", b"." * 25)) == b"." * 25
    with pytest.raises(ValueError, match="35 bytes, key b"):
        put("b", b"")
    assert msgspec.msgpack.decode(put("a", b"again")) == b"again"
    put("b", b"." * 10)
    with pytest.raises(ValueError, match="31 bytes, key b"):
        put("b", b"." * 16)
    with pytest.raises(ValueError, match="key kkk"):
        put("k" * 30, b"")


def test_a_text_that_no_rank_leaves_is_waited_for_within_the_time_limit(four: list[Links]) -> None:
    """A RuntimeError, after which torch.distributed's own barrier goes on waiting."""
    store = PrefixStore("group", four[2].store())
    store.set("there", "text")
    with pytest.raises(RuntimeError, match=r"no rank has left group/address within 0\.001 s"):
        store.wait(["there", "address"], timedelta(milliseconds=1))
    store.set_timeout(timedelta(milliseconds=2))
    with pytest.raises(DistStoreError, match=r"no rank has left group/address within 0\.002 s"):
        store.get("address")


def test_a_cut_of_the_connection_to_the_store_ends_the_rank(
    four: list[Links], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is opened after the others, once the rank is watched."""
    ended: list[int] = []

    def leave(code: int) -> None:
        ended.append(code)
        four[3]._is_closing.set()

    monkeypatch.setattr(links_module, "leave", leave)
    before = set(Path("/proc/self/fd").iterdir())
    four[3].store()
    for each in set(Path("/proc/self/fd").iterdir()) - before:
        with suppress(OSError), closing(socket.socket(fileno=os.dup(int(each.name)))) as connection:
            connection.shutdown(socket.SHUT_RDWR)  # another may be closed meanwhile, or no socket
    until(lambda: ended)
    assert ended == [EXIT_WORKER_BROKEN]


def test_the_interface_is_the_one_that_leads_to_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_to("127.0.0.2") == "lo"
    monkeypatch.setattr(link_address.socket, "if_nameindex", lambda: [(9, "none0")])
    with pytest.raises(StartupError, match=r"no network interface has 127\.0\.0\.1"):
        interface_to("127.0.0.1")
    with pytest.raises(StartupError, match=r"no way leads to the first node, 255\.255\.255\.255: "):
        interface_to("255.255.255.255")  # without the right to call all at once
