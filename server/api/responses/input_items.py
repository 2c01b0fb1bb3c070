"""Input items of a response, a page at a time.

Owns: the shape and the id of each item, the choice of items for a page, and references to items.
Source: OpenAI's reference of GET /v1/responses/{id}/input_items.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.errors import RequestRejected
from server.api.responses.protocol import InputItem, ItemPart
from server.api.responses.store import StoredResponse
from server.api.responses.tools import ID_PREFIXES
from server.edge.error_replies import ResponseNotFound
from server.edge.http.endpoint import page_body
from server.edge.refusals import required, whole_number

MAX_PAGE_ITEMS = 100
_PAGE_ITEMS = 20
_UNSHOWN = {"tools", "phase", "encrypted_content"}
_ITEM_ID = re.compile("[a-z]+_([0-9a-f]{48})")

FindResponse = Callable[[str], StoredResponse | None]


class Order(StrEnum):
    OLDEST_FIRST = "asc"
    NEWEST_FIRST = "desc"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    limit: int = _PAGE_ITEMS
    order: Order = Order.NEWEST_FIRST
    after: str | None = None
    """The id of the item before the first one, in this order; None: from the beginning."""


def page_request(query: Mapping[str, str]) -> PageRequest:
    """Read the query of the URL. Raises RequestRejected."""
    limit = whole_number(query, "limit", least=1, most=MAX_PAGE_ITEMS, default=_PAGE_ITEMS)
    order = query.get("order", Order.NEWEST_FIRST)
    if order not in tuple(Order):
        raise RequestRejected(f"order must be asc or desc, not {order!r}", param="order")
    return PageRequest(limit=limit, order=Order(order), after=query.get("after"))


def page_of(items: Sequence[InputItem], response_id: str, asked: PageRequest) -> dict[str, Any]:
    """Build a page, as OpenAI documents it. Raises RequestRejected if no item has the id of `after`."""
    named = list(zip(_ids(items, response_id), items, strict=True))
    if asked.order is Order.NEWEST_FIRST:
        named.reverse()
    start = 0
    if asked.after is not None:
        start = _place_of(asked.after, [item_id for item_id, _ in named]) + 1
    end = start + asked.limit
    return page_body([_body(*each) for each in named[start:end]], has_more=end < len(named))


def with_references(items: Sequence[InputItem], find: FindResponse) -> list[InputItem]:
    """Put stored items into the places of references to them. Raises RequestRejected, ResponseNotFound.

    An item is found once, so that a short request does not become a conversation without bounds.
    """
    known: dict[str, dict[str, InputItem]] = {}
    resolved = list(items)
    for place, item in enumerate(items):
        if item.type != "item_reference":
            continue
        item_id = required(item.id, f"input[{place}].id")
        found = _ITEM_ID.match(item_id)
        response_id = f"resp_{found[1]}" if found else ""
        if response_id not in known:
            stored = find(response_id)
            known[response_id] = {} if stored is None else _items_of(stored, response_id)
        try:
            resolved[place] = known[response_id].pop(item_id)
        except KeyError:
            raise ResponseNotFound(item_id, "Item") from None
    return resolved


def _items_of(stored: StoredResponse, response_id: str) -> dict[str, InputItem]:
    made = {item.id: item for item in stored.conversation if item.id is not None}
    return made | dict(zip(_ids(stored.input, response_id), stored.input, strict=True))


def _place_of(item_id: str, ids: Sequence[str]) -> int:
    if item_id not in ids:
        raise RequestRejected(f"after: this response has no input item {item_id[:128]!r}", param="after")
    return ids.index(item_id)


def _ids(items: Iterable[InputItem], response_id: str) -> list[str]:
    """Each id names one item, and the same one each time, so that pages join without a gap."""
    ids: dict[str, None] = {}
    for place, item in enumerate(items):
        made = f"{ID_PREFIXES.get(_kind(item), 'item')}_{response_id.partition('_')[2]}_in{place}"
        ids[item.id if item.id and item.id not in ids else made] = None
    return list(ids)


def _kind(item: InputItem) -> str:
    return item.type or "message"


def _body(item_id: str, item: InputItem) -> dict[str, Any]:
    said = item.model_dump(exclude_none=True, exclude=_UNSHOWN)
    match item.type:
        case "reasoning":
            said = {"summary": [], "content": [], **said}
        case "message" | None:
            said["content"] = [_message_part(item.role, part) for part in item.content or ()]
    if len(item.output or ()) == 1 and "text" in said["output"][0]:
        said["output"] = said["output"][0]["text"]
    return {"status": "completed", **said, "id": item_id, "type": _kind(item)}


def _message_part(role: str | None, part: ItemPart) -> dict[str, Any]:
    if part.type in ("refusal", "input_image"):
        return part.model_dump(exclude_none=True)
    if role == "assistant":
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}
