"""Arguments as elements that are named after their keys, with others within them.

    minimax_m3    ]<]minimax[>[<cities>]<]minimax[>[<item>Bonn]<]minimax[>[</item>]<]minimax[>[</cities>

Owns: the nesting of elements, and what of it is an object, a list or a text.
Never: pieces: the arguments are read when they are complete.
"""

import json
import re
from dataclasses import dataclass, field

from server.reply.reading.argument_values import MAX_DEPTH, ArgumentTypes, as_json
from server.reply.reading.row import ToolSchemas

NAMESPACE = "]<]minimax[>["
"""Mark before each tag."""
_TAG = re.compile(re.escape(NAMESPACE) + r"<(?P<end>/?)(?P<name>[^<>\s]{1,300})>")
_ITEM = "item"
_NESTED = frozenset({"array", "object"})


@dataclass(slots=True)
class _Element:
    name: str
    pieces: list[str] = field(default_factory=list)
    """Its text, between the elements within it."""
    inner: list["_Element"] = field(default_factory=list)

    def as_json(self, types: ArgumentTypes, key: str, depth: int) -> str:
        """Return it as JSON, of the type that the schema of the element around it gives this key.

        Where none says whether it is a list or an object, it is a list if all within it are items.
        `depth`: brackets that it may have within each other.
        """
        known, text = types.of(key), "".join(self.pieces)
        nested = known & _NESTED
        is_empty = not text.strip() and bool(nested) and known <= {*_NESTED, "null"}
        if not self.inner and not is_empty:
            return as_json(text, known, depth=depth)
        within = types.within(key)
        is_list = "array" in nested if len(nested) == 1 else all(each.name == _ITEM for each in self.inner)
        if is_list:
            return "[" + ", ".join(each.as_json(within, _ITEM, depth - 1) for each in self.inner) + "]"
        return self.object(within, depth)

    def object(self, types: ArgumentTypes, depth: int) -> str:
        """Return the elements within it as an object. Of a key that stands twice, the first counts."""
        found = {each.name: each for each in reversed(self.inner)}
        pairs = (
            f"{json.dumps(each.name, ensure_ascii=False)}: {each.as_json(types, each.name, depth - 1)}"
            for each in self.inner
            if found[each.name] is each
        )
        return "{" + ", ".join(pairs) + "}"


def read_elements(text: str, schemas: ToolSchemas) -> list[tuple[str, str]]:
    """Read the arguments of the one tool in `schemas`. An end closes all that is open within its element."""
    ((_, schema),) = schemas.items()
    root = _Element("")
    open_elements, at = [root], 0
    for tag in _TAG.finditer(text):
        open_elements[-1].pieces.append(text[at : tag.start()])
        at = tag.end()
        if tag["end"]:
            places = [place for place, each in enumerate(open_elements) if place and each.name == tag["name"]]
            del open_elements[places[-1] if places else len(open_elements) :]
        elif len(open_elements) < MAX_DEPTH:
            element = _Element(tag["name"])
            open_elements[-1].inner.append(element)
            open_elements.append(element)
    open_elements[-1].pieces.append(text[at:])
    return [("", root.object(ArgumentTypes(schema), MAX_DEPTH))]
