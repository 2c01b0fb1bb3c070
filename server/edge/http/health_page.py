"""The answer to a probe, the same on every port.

Owns: the answer to each question, and the page.
Never: a judgement of health: the engine's own (engine/frontend/health.py).
"""

from collections.abc import Sequence
from enum import Enum

import orjson

from engine.types import Health


class Question(Enum):
    """The question of a probe."""

    READY = "are requests welcome?"
    LIVE = "does it move, or is a restart the cure?"


def health_page(health: Health, question: Question, degraded: Sequence[str]) -> tuple[bool, bytes]:
    """The answer, and the JSON that explains it. What is `degraded` changes no answer."""
    is_yes = health.is_ready if question is Question.READY else health.is_live
    body = {
        "status": "ok" if is_yes else "unavailable",
        "state": health.state.value,
        "detail": health.detail,
        "progress": round(health.progress, 4),
        "num_steps": health.num_steps,
        "degraded": degraded,
    }
    return is_yes, orjson.dumps(body)
