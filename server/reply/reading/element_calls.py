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
from server.reply.reading.tagged_calls import merged
from server.reply.reading.whole_calls import WrittenCalls

NAMESPACE = "]<]minimax[>["
"""Mark before each tag."""
_TAG = re.compile(re.escape(NAMESPACE) + r"<(?P<end>/?)(?P<name>[^<>\s]{1,300})>")
_ITEM = "item"
_TEXT = "$text"
"""Key of the text between elements, as the publisher's own reader has it."""
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
        if depth < 1 or not (self.inner or is_empty):
            return as_json(text, known, depth=depth)
        within = types.within(key)
        is_list = "array" in nested if len(nested) == 1 else all(each.name == _ITEM for each in self.inner)
        if text.strip():
            self.inner.append(_Element(self._free_name(), [text]))
        if is_list:
            return "[" + ", ".join(each.as_json(within, _ITEM, depth - 1) for each in self.inner) + "]"
        return self.object(within, depth)

    def object(self, types: ArgumentTypes, depth: int) -> str:
        """Return the elements within it as an object. Those of one name are a list."""
        found: dict[str, list[_Element]] = {}
        for each in self.inner:
            found.setdefault(each.name, []).append(each)
        pairs = []
        for name, elements in found.items():
            left = depth - 1 if len(elements) == 1 else depth - 2
            values = [each.as_json(types, name, left) for each in elements[0 if left >= 0 else -1 :]]
            pairs.append(f"{json.dumps(name, ensure_ascii=False)}: {merged(values)}")
        return "{" + ", ".join(pairs) + "}"

    def _free_name(self) -> str:
        """The key of its text, which none of its elements has."""
        name = _TEXT
        while any(each.name == name for each in self.inner):
            name = f"${name}"
        return name


def read_elements(text: str, schemas: ToolSchemas) -> WrittenCalls:
    """Read the arguments of the one tool in `schemas`, and the text between them, which is content.

    An end closes all that is open within its element.
    """
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
    arguments, words = root.object(ArgumentTypes(schema), MAX_DEPTH), "".join(root.pieces)
    return [("", arguments), (None, words)] if words.strip() else [("", arguments)]
