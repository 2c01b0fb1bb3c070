"""Tasks that a checkpoint is served for: text, vectors, or scores."""

from enum import StrEnum


class Task(StrEnum):
    """Task of a worker for its whole life."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
