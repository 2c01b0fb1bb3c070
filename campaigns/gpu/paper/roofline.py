"""The bound of a kernel on an H100, by its counts: estimates, of which none was measured.

Owns: the rates of an H100, and the arithmetic.
Never: compiles.
Source: H100 datasheet and whitepaper; "Arithmetic Instructions", CUDA C++ Programming Guide, for 9.0.
Bandwidth and clock are what is plausible under load, not the datasheet's.

All clocks are of one multiprocessor with the programs that fall to it, as if what bounds it were always at
work: what hinders that, such as barriers and loads that wait for one another, comes on top.
"""

from dataclasses import dataclass

from campaigns.gpu.paper.compiling import Launch
from campaigns.gpu.paper.machine_code import WARP, Kind, Part

NUM_PROCESSORS = 132
CLOCK_HZ = 1.7e9
BYTES_PER_S = 3.0e12
BYTES_PER_CLOCK = BYTES_PER_S / CLOCK_HZ / NUM_PROCESSORS
MOST_BYTES_PER_CLOCK = 64
"""Bytes a cycle that one multiprocessor takes from the second-level cache."""
LATENCY_CLOCKS = 700
"""Latency of a load from memory."""
ISSUED_PER_CLOCK = 4
PRODUCTS_PER_CLOCK = 2048
"""bfloat16, by instructions of a warp group; those before them have half of it."""
LANES = {
    Kind.SPECIAL: 16,
    Kind.FLOAT: 128,
    Kind.DOUBLE: 64,
    Kind.INTEGER: 64,
    Kind.CONVERSION: 64,
    Kind.SHUFFLE: 32,
    Kind.SHARED: 32,
}
"""Threads served in a clock. Integers: half of them run beside floats at full rate, so this is the lower."""
_REGISTERS = 65_536
_REGISTER_UNIT = 256
_WARPS = 64
_PROGRAMS = 32
_SHARED_BYTES = 228 * 1024
_SHARED_BYTES_RESERVED = 1024


@dataclass(frozen=True, slots=True)
class Clocks:
    """Rates of one multiprocessor, for each thing that may bound it."""

    issue: float
    tensor: float
    special: float
    lanes: float
    """The busiest of the others in LANES."""

    def __add__(self, other: "Clocks") -> "Clocks":
        return Clocks(
            self.issue + other.issue,
            self.tensor + other.tensor,
            self.special + other.special,
            self.lanes + other.lanes,
        )

    def __mul__(self, times: float) -> "Clocks":
        return Clocks(self.issue * times, self.tensor * times, self.special * times, self.lanes * times)

    @property
    def most(self) -> float:
        return max(self.issue, self.tensor, self.special, self.lanes)


def clocks_of(part: Part, num_warps: int) -> Clocks:
    """Time of one program, once through."""
    products_per_clock = PRODUCTS_PER_CLOCK if part.has_warp_group_products else PRODUCTS_PER_CLOCK / 2
    by_kind = part.by_kind
    lanes = {kind: by_kind[kind] * WARP * num_warps / each for kind, each in LANES.items()}
    return Clocks(
        issue=len(part.instructions) * num_warps / ISSUED_PER_CLOCK,
        tensor=part.products * num_warps / products_per_clock,
        special=lanes.pop(Kind.SPECIAL),
        lanes=max(lanes.values()),
    )


def resident_programs(launch: Launch) -> int:
    """Number of programs that a multiprocessor has room for."""
    registers, _ = launch.resources
    of_warp = -(-registers * WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // of_warp // launch.num_warps
    by_shared = _SHARED_BYTES // (launch.shared_bytes + _SHARED_BYTES_RESERVED)
    return min(by_registers, by_shared, _WARPS // launch.num_warps, _PROGRAMS)


def bytes_in_flight(launch: Launch) -> int:
    """On their way to one multiprocessor while it computes.

    Copies to shared memory that are asked for before the main loop; where there are none, what a program
    loads into registers at a time.
    """
    code, loop = launch.code, launch.code.main_loop
    copied = code.body.copied_bytes
    if not copied:
        copied = code.body.loaded_bytes if loop is None or not loop.loaded_bytes else loop.loaded_bytes
    programs = min(resident_programs(launch), -(-launch.num_programs // NUM_PROCESSORS))
    return copied * launch.num_warps * programs


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time of a whole launch, without what every launch costs."""

    clocks: Clocks
    """Time of the processor that has the most programs."""
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.clocks.most / CLOCK_HZ)

    @property
    def bound(self) -> str:
        if self.memory_s >= self.clocks.most / CLOCK_HZ:
            return "memory"
        return max(Clocks.__slots__, key=lambda name: getattr(self.clocks, name))


def estimate(launch: Launch, *, num_working: int, trips: float, moved_bytes: float) -> Estimate:
    """`num_working` programs do not return at once, and go through the main loop `trips` times each."""
    loop = launch.code.main_loop
    clocks = clocks_of(launch.code.body, launch.num_warps)
    if loop is not None:
        clocks += clocks_of(loop, launch.num_warps) * trips
    per_processor = -(-num_working // NUM_PROCESSORS)
    return Estimate(clocks * per_processor, _memory_s(launch, num_working, moved_bytes))


def _memory_s(launch: Launch, num_working: int, moved_bytes: float) -> float:
    """Time by the bandwidth of all, or by what the processors at work can have on its way."""
    bytes_per_clock = min(MOST_BYTES_PER_CLOCK, bytes_in_flight(launch) / LATENCY_CLOCKS)
    at_work = min(num_working, NUM_PROCESSORS)
    return max(moved_bytes / BYTES_PER_S, moved_bytes / at_work / bytes_per_clock / CLOCK_HZ)
