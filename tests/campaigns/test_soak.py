"""Promises that a soak checks, by lives of processes in which a breach is planted."""

import pytest

from campaigns.servers.processes import Held
from campaigns.soak.run import Life, Sample

MIB = 2**20
NOTHING = Held(memory_bytes=1, num_files=1, num_threads=1)


def life(*, hours: float, growth_mib: float = 0.0, num_files: int = 29, num_threads: int = 8) -> Life:
    before = Held(memory_bytes=60 * MIB, num_files=29, num_threads=8)
    samples = [
        Sample(
            at_s=place * hours * 36,
            pid=1,
            held=Held(memory_bytes=round((60 + growth_mib * place / 100) * MIB), num_files=80, num_threads=9),
        )
        for place in range(101)
    ]
    after = Held(memory_bytes=61 * MIB, num_files=num_files, num_threads=num_threads)
    return Life("process", samples, before, after)


@pytest.mark.parametrize(
    "kept",
    [
        life(hours=1),
        life(hours=1, growth_mib=5),
        life(hours=0.02, growth_mib=20),
        life(hours=1, num_files=31, num_threads=9),
        Life("idle", [], NOTHING, NOTHING),
    ],
)
def test_this_is_nothing(kept: Life) -> None:
    assert kept.faults() == []


@pytest.mark.parametrize(
    ("kept", "fault"),
    [
        (life(hours=1, growth_mib=20), "has grown by 10.2 MiB"),
        (life(hours=0.02, growth_mib=40), "has grown by 20.4 MiB"),
        (life(hours=1, num_files=60), "has 60 files open, not 29"),
        (life(hours=1, num_threads=20), "has 20 threads, not 8"),
    ],
)
def test_this_was_kept(kept: Life, fault: str) -> None:
    (found,) = kept.faults()
    assert fault in found
