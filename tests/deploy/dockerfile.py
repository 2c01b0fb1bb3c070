"""A Dockerfile as data, as far as our tests ask: stages of instructions, without a Docker engine.

Owns: continuation lines, comments, and the split of each instruction into its word and the rest.
Never: expands variables or runs anything.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    word: str
    """In capitals: FROM, RUN, HEALTHCHECK."""
    text: str
    """Arguments of an instruction, on one line."""


def read_stages(path: Path) -> list[list[Instruction]]:
    """One list for each FROM, which it starts with; ARGs before the first FROM belong to none."""
    stages: list[list[Instruction]] = []
    for instruction in read_instructions(path):
        if instruction.word == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(instruction)
    return stages


def read_instructions(path: Path) -> list[Instruction]:
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")
    ]
    found = []
    for logical in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, text = logical.strip().partition(" ")
        if word:
            found.append(Instruction(word.upper(), " ".join(text.split()) if word != "RUN" else text.strip()))
    return found


def texts(stage: list[Instruction], word: str) -> list[str]:
    return [instruction.text for instruction in stage if instruction.word == word]
