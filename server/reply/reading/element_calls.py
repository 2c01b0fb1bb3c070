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


@dataclass(slots=True)
class _Element:
    name: str
    text: str = ""
    inner: list["_Element"] = field(default_factory=list)

    def as_json(self, types: ArgumentTypes) -> str:
        """Return it as JSON. A text gets the type that the schema of the element around it gives its name."""
        if not self.inner:
            return as_json(self.text, types.of(self.name))
        within = types.within(self.name)
        if all(each.name == _ITEM for each in self.inner):
            return "[" + ", ".join(each.as_json(within) for each in self.inner) + "]"
        return self.object(within)

    def object(self, types: ArgumentTypes) -> str:
        """Return the elements within it as an object. Of a key that stands twice, the first counts."""
        found = {each.name: each for each in reversed(self.inner)}
        pairs = (
            f"{json.dumps(each.name, ensure_ascii=False)}: {each.as_json(types)}"
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
        open_elements[-1].text += text[at : tag.start()]
        at = tag.end()
        names = [each.name for each in open_elements]
        if tag["end"]:
            del open_elements[max(names.index(tag["name"]) if tag["name"] in names else len(names), 1) :]
        elif len(open_elements) < MAX_DEPTH:
            element = _Element(tag["name"])
            open_elements[-1].inner.append(element)
            open_elements.append(element)
    open_elements[-1].text += text[at:]
    return [("", root.object(ArgumentTypes(schema)))]
