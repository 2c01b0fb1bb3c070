import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load

from engine.errors import EngineUnavailable, Overloaded, OverloadReason, RequestRejected
from engine.media.messages import SHARED_MEMORY, Detail
from engine.media.pictures import PicturePreparer
from engine.media.segments import Segments
from engine.options.declaration import OptionError
from engine.options.media_options import MediaConfig, MediaOptions, media_config
from tests.for_each import for_each

pytest.importorskip("PIL")

from PIL import Image

from engine.media.decoding import PictureRefused, decode
from tests.engine.media.made_pictures import (
    SEEN,
    file_of,
    further_hostile_files,
    hostile_files,
    noise,
    picture,
    pictures_of,
    png_of,
    strange_files,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory) -> AsyncIterator[PicturePreparer]:
    """One process for all tests: it starts in 2 s, and another takes its place once it has ended."""
    pictures = pictures_of(tmp_path_factory.mktemp("seeing"))
    yield pictures
    await pictures.close()


@pytest_asyncio.fixture(loop_scope="module")
async def alone(tmp_path: Path) -> AsyncIterator[PicturePreparer]:
    """Hold a process whose memory no other test fills."""
    pictures = pictures_of(tmp_path)
    yield pictures
    await pictures.close()


on_one_loop = pytest.mark.asyncio(loop_scope="module")


async def prepared(pictures: PicturePreparer, file: bytes, lease, *, detail: Detail = Detail.AUTO):
    return await pictures.prepare(file, detail, SEEN, lease, param="field")


def pixels_of(stored) -> np.ndarray:
    return load((SHARED_MEMORY / stored.payload.segment).read_bytes())["pixel_values"]


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def left_of(pictures: PicturePreparer) -> list[str]:
    prefix = pictures.new_lease()._segments.prefix
    return [each.name for each in SHARED_MEMORY.glob(f"{prefix}-[0-9]*")]


@on_one_loop
async def test_shared_memory_has_what_the_image_processor_made_of_a_picture(shared) -> None:
    from transformers import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, size={"shortest_edge": 1024, "longest_edge": 1048576}
    )
    expected = theirs(images=[noise(180, 120)], return_tensors="np")
    lease = shared.new_lease()
    stored = await prepared(shared, file_of(noise(180, 120)), lease)
    found = load((SHARED_MEMORY / stored.payload.segment).read_bytes())
    assert found.keys() == {"pixel_values", "image_grid_thw"}
    assert found["pixel_values"].dtype == np.float32
    np.testing.assert_array_equal(found["pixel_values"], expected["pixel_values"])
    assert stored.payload.grid == tuple(expected["image_grid_thw"][0]) == (1, 16, 22)
    assert stored.pieces == (16 * 22 // 4,)
    assert stored.payload.num_bytes == (SHARED_MEMORY / stored.payload.segment).stat().st_size
    lease.release()


@on_one_loop
async def test_a_picture_is_there_once_until_its_last_request_has_ended(shared) -> None:
    first, second = shared.new_lease(), shared.new_lease()
    one = await prepared(shared, picture(), first)
    again = await prepared(shared, picture(), first)
    other, _ = await asyncio.gather(prepared(shared, picture(), second), prepared(shared, picture(), first))
    assert one == again == other
    path = SHARED_MEMORY / one.payload.segment
    first.release()
    first.release()
    assert path.exists()
    second.release()
    assert not path.exists()
    third = shared.new_lease()
    last = await prepared(shared, picture(seed=1), third)
    del third
    assert not (SHARED_MEMORY / last.payload.segment).exists()


@on_one_loop
async def test_what_the_process_does_is_counted(shared, monkeypatch) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(shared, "count", lambda _name, word, num=1: counts.update({word: num}))
    lease = shared.new_lease()
    for file in (picture(seed=7), picture(seed=7), b"GIF89a"):
        with suppress(RequestRejected):
            await prepared(shared, file, lease)
    assert (counts["prepared"], counts["found"], counts["refused"]) == (1, 1, 1)
    assert 0 < counts["process"] < 60
    assert 0 <= counts["wait"] < 1
    lease.release()


@on_one_loop
async def test_names_differ_with_the_picture_and_its_detail(shared) -> None:
    lease = shared.new_lease()
    large = file_of(noise(1200, 1200))
    whole = await prepared(shared, large, lease)
    low = await prepared(shared, large, lease, detail=Detail.LOW)
    other = await prepared(shared, picture(), lease)
    assert len({each.payload.content for each in (whole, low, other)}) == 3
    assert low.pieces == (32 * 32,)
    assert whole.pieces == (64 * 64,)
    lease.release()


@on_one_loop
async def test_any_mode_becomes_upright_rgb_on_white(shared) -> None:
    grey = Image.new("RGB", (32, 32), (51, 51, 51))
    clear = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    deep = Image.fromarray(np.full((32, 32), 51 * 257, dtype=np.uint16))
    turned = Image.new("RGB", (64, 32), "white")
    exif = turned.getexif()
    exif[0x0112] = 6
    lease = shared.new_lease()

    async def level(file: bytes) -> float:
        return float(pixels_of(await prepared(shared, file, lease))[:, 0].mean())

    plain = await level(file_of(grey))
    for mode in ("L", "P", "LA", "RGBA"):
        assert await level(file_of(grey.convert(mode))) == pytest.approx(plain, abs=1e-3), mode
    assert await level(file_of(grey.convert("CMYK"), "JPEG")) == pytest.approx(plain, abs=0.1)
    assert await level(file_of(deep)) == pytest.approx(plain, abs=0.02)
    assert await level(file_of(clear)) == await level(file_of(Image.new("RGB", (32, 32), "white")))
    sideways = await prepared(shared, file_of(turned, "JPEG", exif=exif), lease)
    assert sideways.payload.grid[1] > sideways.payload.grid[2]
    lease.release()


@on_one_loop
async def test_sixty_hostile_files_are_refused_by_name_and_leave_nothing(shared) -> None:
    files = {**hostile_files(), **further_hostile_files()}
    assert len(files) >= 60
    lease = shared.new_lease()
    await prepared(shared, picture(), lease)
    pid = shared._child.pid
    before = resident_bytes(pid)
    for name, file in files.items():
        with pytest.raises(RequestRejected, match=r"^field: the picture is not taken: it"):
            pytest.fail(f"{name} was taken: {await prepared(shared, file, lease)}")
    assert shared._child.pid == pid
    assert resident_bytes(pid) < before + 64 * 2**20
    lease.release()
    assert not left_of(shared)


@on_one_loop
async def test_strange_files_whose_pixels_can_be_read_are_taken(shared) -> None:
    for name, file in strange_files().items():
        lease = shared.new_lease()
        stored = await prepared(shared, file, lease)
        assert stored.payload.grid == (1, 6, 8), name
        lease.release()


def test_metadata_that_cannot_be_written_again_turn_a_picture_all_the_same() -> None:
    unit, turn, text = 0x128, 0x112, 2
    fields = [(unit, text, 4, 0x636261), (turn, 3, 1, 6)]
    written = b"".join(struct.pack("<HHII", *field) for field in fields)
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, len(fields)) + written + bytes(4)
    file = file_of(noise(64, 48), "JPEG", exif=exif)
    assert decode(file, "JPEG", max_pixels=64 * 48, least_side=8).size == (48, 64)


def test_a_full_memory_is_no_fault_of_the_metadata(monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "getexif", fail)
    with pytest.raises(MemoryError):
        decode(file_of(noise(64, 48), "PNG"), "PNG", max_pixels=64 * 48, least_side=8)


@on_one_loop
async def test_a_killed_decoder_is_one_requests_refusal(alone) -> None:
    lease = alone.new_lease()
    await prepared(alone, picture(), lease)
    pid = alone._child.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = asyncio.create_task(prepared(alone, picture(seed=1), lease))
    await asyncio.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RequestRejected, match="too much time or memory"):
        await waiting
    assert len(left_of(alone)) == 1
    await prepared(alone, picture(seed=2), lease)
    assert alone._child.pid != pid


@on_one_loop
async def test_a_client_that_leaves_keeps_nothing(alone) -> None:
    lease = alone.new_lease()
    await prepared(alone, picture(), lease)
    os.kill(alone._child.pid, signal.SIGSTOP)
    leaving = asyncio.create_task(prepared(alone, picture(seed=1), lease))
    await asyncio.sleep(0.1)
    leaving.cancel()
    os.kill(alone._child.pid, signal.SIGCONT)
    next_lease = alone.new_lease()
    await prepared(alone, picture(seed=2), next_lease)
    assert len(left_of(alone)) == 2


@on_one_loop
async def test_a_picture_whose_client_has_left_is_gone_once_it_is_prepared(alone) -> None:
    lease = alone.new_lease()
    await prepared(alone, picture(), lease)
    os.kill(alone._child.pid, signal.SIGSTOP)
    leaving = asyncio.create_task(prepared(alone, picture(seed=1), lease))
    while not alone._turns.under_way:
        await asyncio.sleep(0.01)
    [order] = alone._turns.under_way
    leaving.cancel()
    os.kill(alone._child.pid, signal.SIGCONT)
    await asyncio.wait([order])
    del order
    await asyncio.sleep(0)
    assert len(left_of(alone)) == 1


@on_one_loop
async def test_pictures_of_one_request_that_fill_the_memory_are_its_fault(alone, monkeypatch) -> None:
    lease = alone.new_lease()
    monkeypatch.setattr(alone._segments, "num_bytes_at_most", 150_000)
    await prepared(alone, picture(64, 64), lease)
    with pytest.raises(RequestRejected, match="with those before it"):
        await prepared(alone, picture(64, 64, seed=1), lease)
    await prepared(alone, picture(32, 32), lease)


def test_the_first_image_of_a_phones_file_is_taken() -> None:
    first, second = noise(64, 48), noise(64, 48, seed=1)
    file = file_of(first, "MPO", save_all=True, append_images=[second], quality=95)
    found = decode(file, "JPEG", max_pixels=64 * 48, least_side=8)
    plain = decode(file_of(first, "JPEG", quality=95), "JPEG", max_pixels=64 * 48, least_side=8)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))


def test_a_jpeg_of_thousands_of_scans_is_refused() -> None:
    file = file_of(noise(64, 48), "JPEG", progressive=True)
    last = file.rindex(b"\xff\xda")
    long = file[:last] + file[last:-2] * 3000 + file[-2:]
    decode(file, "JPEG", max_pixels=64 * 48, least_side=8)
    decode(file + b"\xff\xda" * 50, "JPEG", max_pixels=64 * 48, least_side=8)
    with pytest.raises(PictureRefused, match="scans"):
        decode(long, "JPEG", max_pixels=64 * 48, least_side=8)


def test_the_bound_on_pixels_is_the_operators_and_not_pillows(monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(picture(), "PNG", max_pixels=64 * 48, least_side=8).size == (64, 48)


@pytest.mark.night
@on_one_loop
async def test_an_error_of_the_machine_refuses_no_later_picture(tmp_path) -> None:
    pictures = pictures_of(tmp_path)
    lease = pictures.new_lease()
    config = (tmp_path / "config.json").rename(tmp_path / "elsewhere.json")
    (tmp_path / "config.json").mkdir()  # it cannot be read, though it is there
    with pytest.raises(EngineUnavailable):
        await prepared(pictures, picture(), lease)
    (tmp_path / "config.json").rmdir()
    config.rename(tmp_path / "config.json")
    await prepared(pictures, picture(), lease)
    await pictures.close()


@on_one_loop
async def test_a_request_that_finds_a_long_line_is_counted_as_refused(alone) -> None:
    seen: list[OverloadReason] = []

    @contextmanager
    def counting():
        try:
            yield
        except Overloaded as error:
            seen.append(error.reason)
            raise

    alone.counting_refusals = counting
    await alone._turns.acquire("")
    waiting = [
        asyncio.create_task(prepared(alone, picture(seed=seed), alone.new_lease())) for seed in range(64)
    ]
    while len(alone._turns._waiting) < 64:
        await asyncio.sleep(0.01)
    with pytest.raises(Overloaded):
        await prepared(alone, picture(seed=64), alone.new_lease())
    for each in waiting:
        each.cancel()
    assert seen == [OverloadReason.PICTURES]


@on_one_loop
async def test_a_full_memory_is_said_to_be_one(alone, monkeypatch) -> None:
    lease = alone.new_lease()
    monkeypatch.setattr(alone._segments, "num_bytes_at_most", 100_000)
    await prepared(alone, picture(32, 32), lease)
    with pytest.raises(Overloaded, match="fill the shared memory"):
        await prepared(alone, picture(64, 64), alone.new_lease())
    with pytest.raises(RequestRejected, match="larger than the shared memory"):
        await prepared(alone, picture(640, 480), lease)
    assert len(left_of(alone)) == 1


@on_one_loop
async def test_pixels_are_counted_before_they_are_decoded_and_values_are_the_operators(tmp_path) -> None:
    config = MediaConfig(max_pixels=640 * 480, processor_kwargs={"max_pixels": 16 * 16 * 8})
    fewer = pictures_of(tmp_path, config)
    lease = fewer.new_lease()
    stored = await prepared(fewer, picture(640, 480), lease)
    assert stored.pieces[0] <= 8
    with pytest.raises(RequestRejected, match=r"640 x 481 pixels; at most 307200"):
        await prepared(fewer, png_of(640, 481, b""), lease)
    await fewer.close()
    wrong = pictures_of(tmp_path, MediaConfig(processor_kwargs={"max_pixel": 1}))
    lease = wrong.new_lease()
    for _ in range(2):
        with pytest.raises(RequestRejected, match="no max_pixel"):
            await prepared(wrong, picture(), lease)
    await wrong.close()


@on_one_loop
async def test_without_pillow_pictures_are_refused_with_the_name_of_the_extra(alone, monkeypatch) -> None:
    monkeypatch.setattr("engine.media.pictures.is_installed", lambda: False)
    with pytest.raises(RequestRejected, match="extra `images`"):
        await prepared(alone, picture(), alone.new_lease())


@pytest.mark.night
@on_one_loop
async def test_a_server_that_was_killed_leaves_nothing_behind(tmp_path) -> None:
    source = f"""
import asyncio
from pathlib import Path
from engine.media.pictures import PicturePreparer
from engine.options.media_options import MediaConfig
from tests.engine.media.made_pictures import *
async def main():
    pictures = pictures_of(Path({str(tmp_path)!r}))
    lease = pictures.new_lease()
    from engine.media.messages import Detail
    await pictures.prepare(picture(), Detail.AUTO, SEEN, lease, param="x")
    print(pictures._child.pid, lease._segments.prefix, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    pid, prefix = server.stdout.readline().split()
    assert len([*SHARED_MEMORY.glob(f"{prefix}*")]) == 2
    os.kill(int(pid), signal.SIGKILL)  # what would have removed it
    server.kill()
    server.wait()
    server.stdout.close()
    assert len([*SHARED_MEMORY.glob(f"{prefix}*")]) == 2
    Segments().close()
    assert not [*SHARED_MEMORY.glob(f"{prefix}*")]


@on_one_loop
async def test_the_process_removes_what_its_parent_has_left(shared) -> None:
    """The last of these tests: the lock is gone too."""
    lease = shared.new_lease()
    await prepared(shared, picture(), lease)
    prefix = lease._segments.prefix
    shared._child._child.stdin.close()
    async with asyncio.timeout(60):
        await shared._child._child.wait()
    assert not [*SHARED_MEMORY.glob(f"{prefix}*")]


@for_each(
    [
        ({"limit_mm_per_prompt": "8"}, "no JSON object"),
        ({"limit_mm_per_prompt": '{"image": 65}'}, "from 0 to 64"),
        ({"limit_mm_per_prompt": '{"image": true}'}, "from 0 to 64"),
        ({"limit_mm_per_prompt": '{"video": 1}'}, "'video' is not served"),
        ({"mm_processor_kwargs": "{"}, "no JSON"),
        ({"allowed_media_domains": ("https://a.example/x",)}, "is no host"),
        ({"allowed_media_domains": ("*",)}, "is no host"),
    ]
)
def test_a_wrong_option_is_told_what_is_wrong_with_it(case) -> None:
    values, told = case
    with pytest.raises(OptionError, match=told):
        media_config(MediaOptions(**values))


def test_options_become_limits_and_hosts() -> None:
    found = media_config(
        MediaOptions(
            limit_mm_per_prompt='{"image": 0, "video": 0}',
            allowed_media_domains=("pictures.example", "http://b.example"),
        )
    )
    assert (found.max_pictures, found.domains) == (0, ("pictures.example", "b.example"))
    assert found.plain_domains == ("b.example",)
