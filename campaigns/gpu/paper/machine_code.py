"""A kernel's machine code, counted: what one warp issues, in its loops and outside of them.

Owns: the reading of nvdisasm's text, and the classes of instructions.
Never: times anything (roofline.py).
Source: CUDA Binary Utilities, "Instruction Set Reference", Hopper; what the classes leave out is OTHER.

A loop is what stands between a jump backwards and its target. Loops within loops are counted by themselves,
and not in the one around them; what stands in no loop is the body.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

WARP = 32


class Kind(Enum):
    """Part of a multiprocessor that an instruction is for."""

    TENSOR = "tensor core"
    SPECIAL = "special functions"
    FLOAT = "float"
    DOUBLE = "float64"
    INTEGER = "integer"
    CONVERSION = "conversion"
    GLOBAL = "global memory"
    SHARED = "shared memory"
    SHUFFLE = "shuffle"
    BARRIER = "barrier"
    OTHER = "other"


_KINDS = {
    Kind.TENSOR: ("HGMMA", "HMMA", "IMMA", "DMMA"),
    Kind.SPECIAL: ("MUFU",),
    Kind.CONVERSION: ("F2F", "F2I", "I2F", "FRND", "I2FP", "F2FP", "F2IP"),
    Kind.FLOAT: ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSET", "FSETP", "FCHK", "HADD2", "HMUL2", "HFMA2"),
    Kind.DOUBLE: ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"),
    Kind.GLOBAL: ("LDG", "STG", "LDGSTS", "ATOMG", "RED", "UTMALDG", "UTMASTG", "LD", "ST", "LDL", "STL"),
    Kind.SHARED: ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    Kind.SHUFFLE: ("SHFL", "REDUX", "VOTE", "VOTEU", "MATCH"),
    Kind.BARRIER: ("BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "WARPGROUP", "SYNCS", "MEMBAR", "FENCE"),
    Kind.INTEGER: (
        *("IMAD", "IADD3", "IADD", "LEA", "LOP3", "PLOP3", "SHF", "ISETP", "PRMT", "SEL", "VIADD", "IMNMX"),
        *("VIMNMX", "IABS", "POPC", "FLO", "BMSK", "SGXT", "MOV", "P2R", "R2P", "LOP", "IDP", "VIADDMNMX"),
        *("UIADD3", "UIMAD", "ULEA", "ULOP3", "USHF", "UISETP", "UMOV", "USEL", "UPRMT", "UPLOP3", "USGXT"),
        *("R2UR", "S2R", "S2UR", "CS2R", "ULDC", "LDC", "UBMSK", "UFLO", "UPOPC", "UP2UR", "UR2UP"),
    ),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_LINE = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z0-9_.]+[A-Za-z0-9_.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    """With all that stands behind its dots, as in LDG.E.128."""
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def kind(self) -> Kind:
        return _KIND_OF.get(self.name, Kind.OTHER)

    @property
    def bytes_per_thread(self) -> int:
        """Bytes that it moves to or from memory."""
        for part in reversed(self.opcode.split(".")):
            if part in ("U8", "S8"):
                return 1
            if part in ("U16", "S16"):
                return 2
            if part in ("64", "128"):
                return int(part) // 8
        return 4

    @property
    def products_per_warp(self) -> int:
        """Multiplications of a tensor core, for one of the four warps of a group where it takes four."""
        sizes = re.search(r"\.(\d+)x(\d+)x(\d+)", self.opcode)
        if self.name == "HGMMA" and sizes:
            return int(sizes[1]) * int(sizes[2]) * int(sizes[3]) // 4
        packed = re.search(r"\.(16)(8)(\d+)", self.opcode)
        return int(packed[1]) * int(packed[2]) * int(packed[3]) if packed and self.name == "HMMA" else 0


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions that are issued together: a loop's, or those of no loop. Counts are of one warp."""

    instructions: tuple[Instruction, ...]

    def count(self, *kinds: Kind) -> int:
        return sum(self.by_kind[kind] for kind in kinds)

    @property
    def by_kind(self) -> Counter[Kind]:
        return Counter(each.kind for each in self.instructions)

    @property
    def products(self) -> int:
        return sum(each.products_per_warp for each in self.instructions)

    @property
    def has_warp_group_products(self) -> bool:
        return any(each.name == "HGMMA" for each in self.instructions)

    @property
    def loaded_bytes(self) -> int:
        """From global memory, to registers or to shared memory, if every thread loads."""
        return self._moved_bytes("LDG", "LDGSTS")

    @property
    def copied_bytes(self) -> int:
        """Bytes of these that go to shared memory by themselves."""
        return self._moved_bytes("LDGSTS")

    def _moved_bytes(self, *names: str) -> int:
        return WARP * sum(each.bytes_per_thread for each in self.instructions if each.name in names)


@dataclass(frozen=True, slots=True)
class MachineCode:
    body: Part
    loops: tuple[Part, ...]
    """In their order. Divisions and other subroutines are part of the body."""

    @property
    def main_loop(self) -> Part | None:
        """The one with most work for tensor cores, or else memory; of equals the shorter, without masks."""
        return max(self.loops, key=_work, default=None)

    def widths(self, *names: str) -> Counter[int]:
        """Number of instructions of these names that move so many bytes a thread."""
        parts = (self.body, *self.loops)
        return Counter(
            each.bytes_per_thread for part in parts for each in part.instructions if each.name in names
        )


def _work(loop: Part) -> tuple[int, int, int]:
    return loop.products, loop.loaded_bytes, -len(loop.instructions)


def read_machine_code(text: str) -> MachineCode:
    """From what `nvdisasm -c` writes of one kernel."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif found := _LINE.search(line):
            instructions.append(Instruction(found[1], found[2]))
    spans = sorted(set(_loops(instructions, labels)), key=lambda span: span[1] - span[0])
    owner = [-1] * len(instructions)
    for number, (start, end) in enumerate(spans):  # inner ones come first
        for place in range(start, end + 1):
            if owner[place] < 0:
                owner[place] = number
    of_each: list[list[Instruction]] = [[] for _ in range(len(spans) + 1)]
    for instruction, number in zip(instructions, owner, strict=True):
        if instruction.name != "NOP":
            of_each[number].append(instruction)
    in_order = sorted(range(len(spans)), key=lambda number: spans[number])
    return MachineCode(Part(tuple(of_each[-1])), tuple(Part(tuple(of_each[number])) for number in in_order))


def _loops(instructions: list[Instruction], labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    for place, instruction in enumerate(instructions):
        target = _TARGET.search(instruction.operands)
        if instruction.name != "BRA" or target is None:
            continue
        start = labels.get(target[1], place + 1)
        if start < place:  # a jump to itself stands behind the last instruction, and is never reached
            yield start, place
