"""One conversation while it is written: its turns and what they must agree on.

Owns: Turn, and Talk, the facts a later turn may ask back.
Never: the wording of any skill.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from world import MODEL_NAME


class Style(Enum):
    """How the system message asks for answers."""

    FULL = "full"
    BRIEF = "brief"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user typed and the right answer; `brief` where a short one exists."""

    user: str
    assistant: str
    brief: str = ""


@dataclass(slots=True, kw_only=True)
class Talk:
    """What has been said so far that later answers depend on."""

    style: Style = Style.FULL
    model_name: str = MODEL_NAME
    user_name: str = ""
    told: dict[str, str] = field(default_factory=dict)
    """Topic such as "favourite colour" -> what the user said it is."""
    last_skill: str = ""
    """Which kind of thing "another one" asks for."""
    turns: list[Turn] = field(default_factory=list)


Skill = Callable[[Random, Talk], Turn]
"""Writes one turn and notes in the Talk what later turns must remember."""
