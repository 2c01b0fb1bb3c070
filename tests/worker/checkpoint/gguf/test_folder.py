"""GGUF files become checkpoint folders, or are refused in one line that names what is wrong."""

import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.options.engine_config import resolve
from engine.options.options import OptionError, Options
from tests.gguf_checkpoints import add_shape, add_tokenizer, gguf, write_gguf
from worker.checkpoint.checkpoint_files import find_weights
from worker.checkpoint.gguf.config import config_of
from worker.checkpoint.gguf.file import WEIGHTS, read_gguf
from worker.checkpoint.gguf.folder import folder_of
from worker.quantized.gguf_blocks import read_tensor
from worker.worker_errors import StartupError

SHAPE = {
    "num_hidden_layers": 1,
    "max_position_embeddings": 131072,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500000.0},
    "model_type": "llama",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gguf("llama", {"": "Q4_0"}, tmp_path_factory.mktemp("gguf"), is_tied=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, change: Callable[[Any], None], architecture: str = "llama") -> Path:
    """Write a file with a shape, a tokenizer, an embedding, and what `change` adds."""
    from tests.checkpoints import write_tokenizer

    folder = path.parent / "tokenizer"
    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    writer = gguf.GGUFWriter(path, architecture)
    add_shape(writer, SHAPE)
    add_tokenizer(writer, folder)
    writer.add_tensor("token_embd.weight", np.zeros((vocab_size, 64), np.float32))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as refused:
        folder_of(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_folder_says_what_the_file_says_and_is_written_once(written, cache):
    path, plain = written
    folder = folder_of(path)
    found, expected = (json.loads((each / "config.json").read_text()) for each in (folder, plain))
    for key in ("model_type", "vocab_size", "hidden_size", "num_key_value_heads", "tie_word_embeddings"):
        assert found[key] == expected[key], key
    assert expected["eos_token_id"] in found["eos_token_id"]
    assert found["rms_norm_eps"] == pytest.approx(expected["rms_norm_eps"])
    assert (folder / WEIGHTS).resolve() == path.resolve()
    before = (folder / "config.json").stat()
    assert folder_of(path) == folder
    assert (folder / "config.json").stat() == before
    path.touch()
    assert folder_of(path) != folder


def test_a_file_that_is_cut_anywhere_is_refused(written, tmp_path):
    whole = written[0].read_bytes()
    cut = tmp_path / "cut.gguf"
    header = len(whole) - sum(each.num_bytes for each in read_gguf(written[0]).tensors.values())
    for length in (0, 3, 4, 20, 30, 100, header // 2, header - 200):
        cut.write_bytes(whole[:length])
        assert "cannot be read" in refusal(cut)
    cut.write_bytes(whole[:-1])
    message = refusal(cut)
    assert ".weight ends 1 bytes behind its end" in message
    assert "download it again" in message


def header(*tensors: tuple[tuple[int, ...], int], values: bytes = struct.pack("<Q", 0)) -> bytes:
    """A file of tensors of F32, each with its shape and its place, and 256 bytes for all."""
    found = b"GGUF" + struct.pack("<IQ", 3, len(tensors)) + values
    for number, (shape, start) in enumerate(tensors):
        found += struct.pack(f"<Q1sI{len(shape)}QIQ", 1, b"%d" % number, len(shape), *shape, 0, start)
    return found + bytes(-len(found) % 32 + 256)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (header(((32,), 0), ((32,), 64)), "1 begins before the end of 0"),
        (header(((32,), 64), ((32,), 0)), "0 begins before the end of 1"),
        (header(((4,), 0), ((4,), 0)), "1 begins before the end of 0"),
        (header(((32,), 0), ((4, 0, 1 << 24), 128)), r"1 is \[16777216, 0, 4\], which holds no number"),
        (
            header(values=struct.pack("<QQ1sIIQ", 1, 1, b"k", 9, 0, 5_000_000)) + bytes(5_000_000),
            "a list of 5000000 entries",
        ),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 0), "1099511627776 tensors"),
    ],
    ids=["overlap", "overlap in another order", "the same place", "no number", "list", "tensors"],
)
def test_a_header_whose_tensors_or_lists_cannot_be_is_refused(tmp_path, content, named):
    path = tmp_path / "odd.gguf"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=named):
        read_gguf(path)


def test_tensors_may_lie_in_any_order_and_side_by_side(tmp_path):
    path = tmp_path / "fine.gguf"
    path.write_bytes(header(((32,), 128), ((32,), 0)))
    assert {name: each.shape for name, each in read_gguf(path).tensors.items()} == {"0": (32,), "1": (32,)}


@pytest.mark.parametrize("place", range(8, 200, 5))
def test_a_header_of_nonsense_ends_in_a_refusal_if_it_does_harm(written, tmp_path, place):
    damaged = bytearray(written[0].read_bytes())
    damaged[place : place + 4] = b"\xff\xff\xff\xff"
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with suppress(StartupError):
        folder_of(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.add_uint32("split.count", 3), "part 0 of 3"),
        (lambda w: w.add_expert_shared_count(1), "llama.expert_shared_count 1"),
        (lambda w: w.add_expert_weights_scale(2.5), "llama.expert_weights_scale 2.5"),
        (lambda w: w.add_rope_dimension_count(16), "llama.rope.dimension_count 16"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "longrope"),
        (lambda w: w.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)), "blk.0.ssm_a is no tensor"),
        (lambda w: w.add_tensor("blk.7.attn_q.weight", np.zeros(4, np.float32)), "blk.7.attn_q.weight is no"),
        (
            lambda w: w.add_tensor(
                "output.weight", np.zeros((4, 110), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q3_K
            ),
            "output.weight is of GGUF type number 11; take a file whose tensors are F32, F16, Q4_0",
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", np.full(16, 3, np.float32)), "rope_freqs.weight"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path, change, named):
    assert named in refusal(write(tmp_path / "odd.gguf", change))


@pytest.mark.parametrize("shape", [(3, 96, 64), (96, 64), (8, 64)])
def test_a_stack_of_another_number_of_experts_is_refused(tmp_path, shape):
    def change(writer: Any) -> None:
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)
        writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros(shape, np.float32))

    assert "not a stack of 8 matrices" in refusal(write(tmp_path / "experts.gguf", change))


def test_experts_of_a_family_that_is_read_without_them_are_refused(tmp_path):
    path = write(tmp_path / "dense.gguf", lambda writer: writer.add_expert_count(8), architecture="qwen2")
    assert "qwen2.expert_count 8" in refusal(path)


def test_another_family_is_refused_with_those_that_are_read(tmp_path):
    message = refusal(write(tmp_path / "mamba.gguf", lambda _: None, architecture="mamba"))
    assert "of the family mamba; take a GGUF file of llama, qwen2, qwen3, qwen3moe, qwen35, " in message


def test_the_frequencies_of_llama_3_become_their_parameters(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    shape = {key: SHAPE[key] for key in ("hidden_size", "num_attention_heads", "head_dim")}
    config = LlamaConfig(**shape, max_position_embeddings=131072, rope_parameters=rope)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 500000.0 ** -(np.arange(0, 32, 2) / 32)
    divisors = (plain / scaled).astype(np.float32)
    path = write(tmp_path / "llama3.gguf", lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    assert config_of(read_gguf(path))["rope_parameters"] == rope


@pytest.mark.parametrize(
    ("metadata", "kind"),
    [
        ({"rope.scaling.factor": 4.0}, "linear"),
        ({"rope.scale_linear": 4.0}, "linear"),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "default"),
        ({"rope.scaling.factor": 1.0}, "default"),
    ],
)
def test_a_factor_without_a_type_scales_rotary_embeddings_linearly(tmp_path, metadata, kind):
    def change(writer: Any) -> None:
        for name, value in metadata.items():
            add = writer.add_string if isinstance(value, str) else writer.add_float32
            add(f"llama.{name}", value)

    rope = config_of(read_gguf(write(tmp_path / "rope.gguf", change)))["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == (kind, 4.0 if kind == "linear" else None)


def test_the_model_option_takes_a_file_and_names_the_model_after_it(written):
    engine, server = resolve(Options(model=str(written[0])))
    assert engine.served_names == (written[0].stem,)
    assert (Path(engine.model_path) / WEIGHTS).exists()
    assert server.port


def test_a_blob_is_known_by_its_first_bytes(written, tmp_path):
    blob = tmp_path / "sha256-0123"
    blob.symlink_to(written[0])
    engine, _ = resolve(Options(model=str(blob)))
    assert Path(engine.model_path) == folder_of(written[0])
    (tmp_path / "notes").write_text("GGU")
    with pytest.raises(OptionError, match="this is a file"):
        resolve(Options(model=str(tmp_path / "notes")))


def in_parts(whole: Path, folder: Path, num_parts: int = 3) -> list[Path]:
    """Divide a file as llama-gguf-split does: the first part has the metadata, each some of the tensors."""
    reader = gguf.GGUFReader(whole)
    paths = [folder / f"m-{number:05}-of-{num_parts:05}.gguf" for number in range(1, num_parts + 1)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                value_type, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), value_type, inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::num_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def test_a_model_in_parts_is_the_whole(written, tmp_path):
    paths = in_parts(written[0], tmp_path)
    folder, whole = folder_of(paths[0]), folder_of(written[0])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        one, other = (json.loads((each / name).read_text()) for each in (folder, whole))
        assert one == other, name
    files, [expected] = find_weights(folder), find_weights(whole)
    found = {name: tensor for file in files for name, tensor in file.tensors.items()}
    assert found.keys() == expected.tensors.keys()
    for name, tensor in found.items():
        one = read_tensor(tensor.gguf.tensors[0])
        assert torch.equal(one, read_tensor(expected.tensors[name].gguf.tensors[0])), name


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda paths: paths[1].unlink(), "m-00002-of-00003.gguf, a part of"),
        (lambda paths: paths[1].write_bytes(paths[2].read_bytes()), "part 2 of 3, and not 1 of 3"),
        (lambda paths: paths[1].write_bytes(paths[1].read_bytes()[:-1]), "download it again"),
    ],
)
def test_parts_that_are_not_all_of_a_model_are_refused(written, tmp_path, change, named):
    paths = in_parts(written[0], tmp_path)
    assert "name the first one, m-00001-of-00003.gguf" in refusal(paths[1])
    change(paths)
    assert named in refusal(paths[0])


def test_the_model_option_refuses_with_the_files_own_reason(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(OptionError, match="the header is cut off"):
        resolve(Options(model=str(path)))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda folder: (folder / "tokenizer.json").write_bytes(b""),
    "shorter": lambda folder: os.truncate(folder / "config.json", 20),
    "missing": lambda folder: (folder / "config.json").unlink(),
    "without its link": lambda folder: (folder / WEIGHTS).unlink(),
    "without sizes": lambda folder: (folder / ".manifest").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_folder_that_was_damaged_is_made_again(written, cache, damage):
    folder = folder_of(written[0])
    expected = {each.name: each.read_bytes() for each in folder.glob("*.json")}
    damage(folder)
    assert folder_of(written[0]) == folder
    assert {each.name: each.read_bytes() for each in folder.glob("*.json")} == expected
    assert (folder / WEIGHTS).resolve() == written[0].resolve()
    assert list((cache / "tokenyard" / "gguf").iterdir()) == [folder]
    made = folder.stat().st_ino
    assert folder_of(written[0]).stat().st_ino == made


def test_a_user_without_a_home_is_told_to_name_a_folder(written, monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert "set XDG_CACHE_HOME to a folder of your own" in refusal(written[0])


def test_a_cache_that_others_may_write_to_is_not_used(written, cache):
    (cache / "tokenyard" / "gguf").mkdir(parents=True)
    (cache / "tokenyard" / "gguf").chmod(0o777)
    assert "others may write there" in refusal(written[0])


def test_a_file_of_a_tower_is_called_that_and_not_one_without_a_tokenizer(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_tensor("v.blk.0.attn_q.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "mmproj.gguf holds no language model (mmproj)" in refusal(tmp_path / "mmproj.gguf")
