"""Pictures on a CPU: what another stream feels while one is read, and how late the first token behind one is.

    python -m campaigns.picture_pauses --folder FOLDER [--part stream,first] [--rounds 3]

`stream`: the time between tokens of a text stream alone, while a picture of a megapixel is read, and while a
text of as many tokens is. `first`: the first token behind a picture of 512 x 512, against transformers' tower
alone and the first token of a text of as many tokens. FOLDER gets a checkpoint of the shape of Qwen3-VL-2B
with random weights, 4.3 GB, unless it has one.

Owns: the checkpoint, the pictures, the load and the figures. Never: the server's start
(servers/own_server.py).
"""

import argparse
import asyncio
import base64
import io
import json
import time
from pathlib import Path
from typing import Any

from campaigns.checkpoints.make_shapes import write_full_tokenizer
from campaigns.servers.own_server import OwnServer, own_server, total
from server.edge.http.http_client import open_stream

_VOCABULARY, _SEED = 151_936, 20261121
_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_SILENCE_S = 600.0
_ALONE_S = 20.0
_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_TEXT = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": True,
}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
}
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def write_checkpoint(folder: Path) -> None:
    """Write the checkpoint; one that is whole already stays as it is."""
    if (folder / "model.safetensors").exists():
        return
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder.mkdir(parents=True, exist_ok=True)
    eos_token_id = write_full_tokenizer(folder, _VOCABULARY - len(_MARKS))
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(_MARKS))
    backend.save(str(folder / "tokenizer.json"))
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: backend.token_to_id(mark) for name, mark in zip(names, _MARKS, strict=True)}
    text = {**_TEXT, "model_type": "qwen3_vl_text", "eos_token_id": eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(
        "qwen3_vl", text_config=text, vision_config=_TOWER, tie_word_embeddings=True, **ids
    )
    torch.manual_seed(_SEED)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _picture(side: int, seed: int) -> str:
    """Make a data URL of clouds, as large a file as a photograph."""
    import numpy as np
    from PIL import Image

    small = np.random.default_rng(seed).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(small).resize((side, side)).save(written, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(written.getvalue()).decode()}"


def _seeing(side: int, seed: int) -> dict[str, Any]:
    url = {"type": "image_url", "image_url": {"url": _picture(side, seed)}}
    return {"messages": [{"role": "user", "content": [url, {"type": "text", "text": " one two"}]}]}


def _reading(num_tokens: int, seed: int) -> dict[str, Any]:
    words = f" {seed:x} one two three" + " one" * (num_tokens - 5)
    return {"messages": [{"role": "user", "content": words}]}


async def _times(server: OwnServer, body: dict[str, Any], max_tokens: int) -> list[float]:
    """Return the time of the request's begin, and of each token."""
    asked = {**body, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    content = json.dumps(asked).encode()
    path = "/v1/chat/completions"
    async with open_stream(server.target, "POST", path, content, silence_s=_SILENCE_S) as reply:
        async for event in reply.events():
            if b'"content":"' in event:
                times.append(time.perf_counter())
    return times


class _Stream:
    """A text stream that goes on until it is left."""

    def __init__(self, server: OwnServer) -> None:
        self._server = server
        self.times: list[float] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        asked = {
            **_reading(32, 1),
            **{"max_tokens": 6000, "ignore_eos": True, "stream": True, "temperature": 0},
        }
        content, path = json.dumps(asked).encode(), "/v1/chat/completions"
        async with open_stream(self._server.target, "POST", path, content, silence_s=_SILENCE_S) as reply:
            async for _ in reply.events():
                self.times.append(time.perf_counter())

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Return the pauses that lie in a time, sorted."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return sorted(later - earlier for earlier, later in pairs if start_s <= later and earlier <= end_s)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def _at(ordered: list[float], part: float) -> float:
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]


_ALONE, _TEXT_TOO, _PICTURE = "alone", "with a text", "with a picture"
_ENCODED = "with a picture, until its prompt is computed"


async def _stream(server: OwnServer, num_rounds: int, side: int) -> None:
    num_tokens = (side // 32) ** 2
    stream = _Stream(server)
    while len(stream.times) < 40:
        await asyncio.sleep(0.1)
    found: dict[str, list[float]] = {kind: [] for kind in (_ALONE, _TEXT_TOO, _ENCODED, _PICTURE)}
    for number in range(num_rounds):
        began_s = time.perf_counter()
        await asyncio.sleep(_ALONE_S)
        found[_ALONE] += stream.gaps(began_s, time.perf_counter())
        times = await _times(server, _reading(num_tokens, number), 1)
        found[_TEXT_TOO] += stream.gaps(times[0], times[-1])
        prefill_s = times[1] - times[0]
        before = await server.metrics()
        times = await _times(server, _seeing(side, number), 1)
        found[_PICTURE] += stream.gaps(times[0], times[-1])
        found[_ENCODED] += stream.gaps(times[0], times[1] - prefill_s)
        name = "tokenyard:encoder_seconds_total"
        encoded_s = total(await server.metrics(), name) - total(before, name)
        print(
            f"stream: first token behind a text {prefill_s:.2f} s, behind a picture"
            f" {times[1] - times[0]:.2f} s, of which {encoded_s:.2f} s for encoding"
        )
    await stream.end()
    alone = sorted(found[_ALONE])
    for kind, gaps in found.items():
        ordered = sorted(gaps)
        parts = [f"p{part * 100:g} {_at(ordered, part) * 1e3:.1f}" for part in (0.5, 0.9, 0.99, 1.0)]
        ratio = _at(ordered, 0.99) / _at(alone, 0.99)
        print(f"stream: {kind}: {len(ordered)} gaps, {', '.join(parts)} ms; p99 {ratio:.2f} of alone")


def _tower_s(folder: Path, side: int, num_threads: int) -> float:
    """Time transformers' own tower, the fastest of three."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(num_threads)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    patches = side // 16
    pixels = torch.randn(patches * patches, 3 * 2 * 16 * 16).bfloat16()
    times = []
    with torch.inference_mode():
        for _ in range(3):
            began_s = time.perf_counter()
            model.get_image_features(pixels, torch.tensor([[1, patches, patches]]))
            times.append(time.perf_counter() - began_s)
    return min(times)


async def _first(server: OwnServer, num_rounds: int, side: int, tower_s: float) -> None:
    num_tokens = (side // 32) ** 2
    seeing, reading = [], []
    before = await server.metrics()
    for number in range(num_rounds + 1):
        times = await _times(server, _reading(num_tokens + 6, number), 1)
        reading.append(times[1] - times[0])
        times = await _times(server, _seeing(side, 100 + number), 1)
        seeing.append(times[1] - times[0])
        print(f"first: text {reading[-1]:.3f} s, picture {seeing[-1]:.3f} s")
    after = await server.metrics()
    for name in ("tokenyard:encoder_seconds_total", "tokenyard:picture_seconds_total"):
        print(f"first: {name} {(total(after, name) - total(before, name)) / len(seeing):.3f} s a picture")
    text_s, picture_s = sorted(reading[1:])[num_rounds // 2], sorted(seeing[1:])[num_rounds // 2]
    print(
        f"first: tower of transformers {tower_s:.3f} s, prefill {text_s:.3f} s, picture {picture_s:.3f} s:"
        f" {picture_s / (tower_s + text_s):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--part", default="stream,first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--side", type=int, help="of the pictures; default 1024 for `stream`, 512 for `first`"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("words", nargs="*", help="further options of the server, behind --")
    options = parser.parse_args()
    write_checkpoint(options.folder)
    parts = options.part.split(",")
    tower_s = _tower_s(options.folder, options.side or 512, options.threads) if "first" in parts else 0.0
    words = [str(options.folder), "--max-model-len", "6144", "--dtype", "bfloat16", *options.words]
    with own_server(words) as server:
        if "stream" in parts:
            asyncio.run(_stream(server, options.rounds, options.side or 1024))
        if "first" in parts:
            asyncio.run(_first(server, options.rounds, options.side or 512, tower_s))


if __name__ == "__main__":
    main()
