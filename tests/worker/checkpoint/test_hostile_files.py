"""Files that lie: whatever they make their readers raise is one refusal of one line, in bounded time."""

import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import thread_time
from typing import Any

import pytest
import torch

from tests.gguf_checkpoints import write_gguf
from tests.hostile_values import HOSTILE, assert_one_line, hostile_texts
from tests.quantized_checkpoints import FORMATS, Random
from tests.tiers import by_day
from tests.worker.checkpoint.gguf.test_tokenizer import sentencepiece
from tests.worker.conftest import MakeCheckpoint, load_worker
from worker.adapters.settings import read_settings
from worker.checkpoint.checkpoint_files import find_weights, read_json
from worker.checkpoint.generation_config import default_sampling, eos_token_ids
from worker.checkpoint.gguf import folder as gguf_folder
from worker.checkpoint.gguf.file import read_gguf
from worker.checkpoint.gguf.tokenizer import tokenizer_of
from worker.checkpoint.plausible_sizes import check_sizes
from worker.load.model_kind import find_kind
from worker.quantized.formats import read_rules
from worker.quantized.scheme import ModuleTensors, find_reader, read_weight
from worker.worker_config import WorkerConfig
from worker.worker_errors import AdapterRefused, StartupError, refused_as

_MAX_S = 2.0
"""Processor time for one file; it takes some milliseconds."""


@contextmanager
def ending_well(name: str, refusal: type[Exception]) -> Iterator[None]:
    """Let it end by itself or in the one refusal of one line, soon."""
    began_s = time.process_time()
    try:
        yield
    except refusal as error:
        assert_one_line(error)
    except BaseException as error:
        raise AssertionError(f"{name}: {type(error).__name__} {str(error)[:200]}") from error
    assert time.process_time() - began_s < _MAX_S, name


@pytest.fixture
def folder(checkpoints: MakeCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint whose texts may be changed."""
    for path in checkpoints("llama").iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def rewrite(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def test_any_value_of_config_json_is_read_or_refused(folder: Path) -> None:
    path = folder / "config.json"
    files = find_weights(folder)
    for name, text in hostile_texts(json.loads(path.read_text())):
        rewrite(path, text)
        with ending_well(name, StartupError), refused_as(lambda what: StartupError(what, fix=""), folder):
            check_sizes(find_kind(WorkerConfig(model_path=str(folder))).checkpoint_config, files)


@pytest.mark.parametrize(
    ("part", "is_refused"),
    [
        ({"rope_theta": float("nan")}, True),
        ({"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}}, True),
        ({"text_config": {"rope_parameters": {"rope_theta": float("inf")}}}, True),
        ({"final_logit_softcapping": float("inf")}, True),
        ({"swiglu_limit": float("nan")}, True),
        ({"rope_theta": 1e6, "time_step_max": float("inf"), "final_logit_softcapping": None}, False),
    ],
)
def test_numbers_with_which_nothing_is_computed_end_the_start(part: dict[str, Any], is_refused: bool) -> None:
    with pytest.raises(StartupError) if is_refused else nullcontext():
        check_sizes(part, [])


def test_any_value_of_generation_config_json_is_read_or_refused(folder: Path) -> None:
    path = folder / "generation_config.json"
    settings = {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
    settings |= {"repetition_penalty": 1.1, "eos_token_id": [1, 2]}
    for name, text in hostile_texts(settings):
        rewrite(path, text)
        with ending_well(name, StartupError):
            default_sampling(folder)
            eos_token_ids(folder, (), vocab_size=300)


def test_any_value_of_an_adapters_settings_is_read_or_refused() -> None:
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": False,
        "target_modules": ["q_proj", "k_proj"],
        "exclude_modules": "x.*",
        "bias": "none",
        "rank_pattern": {"q_proj": 4, "k.*": 4},
        "alpha_pattern": {"q_proj": 4.5},
        "layers_to_transform": [0, 1],
        "layers_pattern": ["layers"],
        "init_lora_weights": True,
        "target_parameters": ["a.weight"],
    }
    for name, text in hostile_texts(settings):
        with ending_well(name, AdapterRefused):
            try:
                config = json.loads(text)
            except RecursionError:
                continue
            found = read_settings(config)
            found.scale_of("model.layers.0.q_proj")
            found.include("model.layers.0.q_proj")


def test_patterns_of_an_adapter_that_take_long_to_compile_are_refused_soon() -> None:
    patterns = {rf"\w{{90}}{index}": 4 for index in range(1500)}
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    with ending_well("patterns", AdapterRefused), pytest.raises(AdapterRefused, match="too long"):
        read_settings({**settings, "rank_pattern": patterns})


def test_patterns_of_an_adapter_that_take_long_to_match_are_refused_soon() -> None:
    """Each takes a moment, and all are asked for each layer."""
    patterns = {rf"(?:.{{0,30}}){{{times}}}x": 4 for times in range(2, 12)}
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    found = read_settings({**settings, "rank_pattern": patterns})
    layers = (f"model.layers.{number}.self_attn.q_proj" for number in range(100_000))
    with ending_well("patterns", AdapterRefused), pytest.raises(AdapterRefused, match="too long"):
        list(map(found.scale_of, layers))


@pytest.mark.parametrize(
    ("method", "key", "before"), [("gptq", "dynamic", "+:"), ("auto-round", "extra_config", "")]
)
def test_patterns_of_a_quantized_checkpoint_take_linear_time(method: str, key: str, before: str) -> None:
    rules = read_rules({"quant_method": method, key: {f"{before}(?:\\w+[.]?)+!": {"bits": 8}}})
    with ending_well("pattern", StartupError):
        assert (
            rules.reader_of("model.layers.0.self_attn.q_proj") == read_rules({"quant_method": method}).reader
        )
    with pytest.raises(StartupError, match="needs look-around or is no regular expression; list the names"):
        read_rules({"quant_method": method, key: {f"{before}(?=x).*": {"bits": 8}}})


def test_very_many_names_of_an_adapter_are_compared_with_very_many_layers_soon() -> None:
    names = [f"name{number}" for number in range(4096)]
    settings = read_settings(
        {
            **{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "exclude_modules": names},
            **{"target_modules": [*names[1:], "q_proj"], "target_parameters": names},
            **{"rank_pattern": dict.fromkeys(names, 4), "alpha_pattern": dict.fromkeys(names, 4)},
        }
    )
    began_s = thread_time()
    for number in range(500):
        name = f"model.layers.{number}.self_attn.q_proj"
        assert settings.include(name)
        assert settings.name_of(name) == name
        assert settings.scale_of(name) == 2
    assert thread_time() - began_s < 0.5


def test_the_first_of_a_pattern_and_a_name_gives_the_rank() -> None:
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    for pattern, rank in (({"q.*": 2, "q_proj": 4}, 2), ({"q_proj": 4, "q.*": 2}, 4), ({"k": 2}, 8)):
        assert read_settings({**settings, "rank_pattern": pattern}).rank_of("model.layers.0.q_proj") == rank


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def set_header(path: Path, text: str, rest: bytes) -> None:
    path.unlink()
    path.write_bytes(struct.pack("<Q", len(text.encode())) + text.encode() + rest)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda first, _: first.update(data_offsets=[-8, 0]), "no counts"),
        (lambda first, _: first["data_offsets"].reverse(), "are not those of"),
        (
            lambda first, second: first.update(data_offsets=second["data_offsets"]),
            "are not those of|begins at",
        ),
        (lambda first, _: first.update(shape=[2**40]), "are not those of"),
        (lambda first, _: first.update(dtype="F64"), "are not those of"),
        (lambda first, _: first.update(dtype="X9"), "unknown dtype"),
        (lambda first, _: first.update(dtype=[]), "unhashable"),
        (lambda first, _: first.update(shape=[True]), "no counts"),
        (lambda first, _: first.update(data_offsets=[0, 1e400]), "no counts"),
        (lambda first, _: first.pop("shape"), "KeyError"),
    ],
)
def test_a_header_of_weights_that_lies_is_refused(
    folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], object], named: str
) -> None:
    path = folder / "model.safetensors"
    header, rest = header_of(path)
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    change(entries[0], entries[1])
    set_header(path, json.dumps(header), rest)
    with pytest.raises(StartupError, match=named):
        find_weights(folder)


def test_deep_headers_and_texts_are_refused(folder: Path) -> None:
    _, rest = header_of(folder / "model.safetensors")
    set_header(folder / "model.safetensors", HOSTILE["deep"], rest)
    rewrite(folder / "config.json", HOSTILE["deep"])
    for read in (lambda: find_weights(folder), lambda: read_json(folder / "config.json")):
        with pytest.raises(StartupError, match="RecursionError"):
            read()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers 10000000"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 2**40}, "kv_lora_rank"),
        ({"hidden_act": "x"}, "KeyError 'x'"),
        ({"num_attention_heads": 0}, "cannot|ZeroDivisionError"),
        ({"num_attention_heads": "x"}, "config.json|cannot"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "cannot"),
    ],
)
def test_a_model_that_cannot_be_built_or_tried_is_a_refusal(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    content = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", json.dumps(content | changes))
    with pytest.raises(StartupError, match=named):
        load_worker(folder)


NAME = "model.layers.0.self_attn.q_proj"
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda found: found.reshape(-1)[:0],
    "one more row": lambda found: torch.cat((found, found[-1:])) if found.dim() else found.reshape(1, 1, 1),
    "flat": lambda found: found.reshape(-1),
    "double": lambda found: found.double(),
    "not finite": lambda found: torch.full(found.shape, float("nan")).to(found.dtype),
    "highest": lambda found: torch.full_like(found.view(-1).view(torch.uint8), 255).view(found.dtype),
}


def read_module(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    reader = find_reader(read_rules(config), NAME, frozenset(tensors))
    if reader is not None:
        read_weight(reader, ModuleTensors(NAME, tensors), (64, 128)).dequantized()


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"mxfp4"}))
def test_any_config_and_tensor_of_a_quantized_module_is_read_or_refused(name: str) -> None:
    chosen, random = FORMATS[name], Random()
    tensors = {key: each.contiguous() for key, each in chosen.write(random, 64, 128).tensors.items()}
    read_module(chosen.config, tensors)
    for where, text in hostile_texts({key: chosen.config[key] for key in chosen.config if key != "ignore"}):
        with ending_well(where, StartupError), refused_as(partial(StartupError, fix=""), where):
            read_module(json.loads(text), tensors)
    for key, found in tensors.items():
        for change, apply in CHANGES.items():
            with ending_well(f"{key}: {change}", StartupError):
                read_module(chosen.config, tensors | {key: apply(found)})


def test_any_state_of_bitsandbytes_is_read_or_refused() -> None:
    config, tensors = FORMATS["nf4"].config, FORMATS["nf4"].write(Random(), 64, 128).tensors
    key = "weight.quant_state.bitsandbytes__nf4"
    for where, text in hostile_texts(json.loads(bytes(tensors[key].tolist()))):
        state = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with ending_well(where, StartupError):
            read_module(config, tensors | {key: state})


def test_a_panic_of_a_library_is_a_refusal_and_an_interrupt_is_none() -> None:
    class Panic(BaseException):
        pass

    def refusal(what: str) -> StartupError:
        return StartupError(what, fix="take another")

    said = r"a\.json cannot be read: Panic of a library"
    with pytest.raises(StartupError, match=said), refused_as(refusal, "a.json"):
        raise Panic("of a\nlibrary")
    with pytest.raises(KeyboardInterrupt), refused_as(refusal, "a.json"):
        raise KeyboardInterrupt


GGUF_VALUES: tuple[Any, ...] = (
    *(10**400, float("inf"), float("nan"), -1, 0, 2**63, "", "x" * 100_000, True, {}),
    *([], [1] * 100_000, ["x"] * 1000, [float("nan")] * 300),
)


OWN_SETTINGS = (
    *(
        "deepseek_v3",
        "exaone4",
        "gemma3_text",
        "gemma4_experts",
        "glm4_moe",
        "gpt_oss",
        "granite",
        "lfm2_moe",
    ),
    *("llama4_scout", "ministral3", "mixtral", "phi3", "qwen3_5_moe_text", "qwen3_moe"),
)
"""A family for each reading of settings."""


@pytest.mark.parametrize("family", by_day(("llama", *OWN_SETTINGS), ("llama",)))
def test_any_value_of_gguf_metadata_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    file = read_gguf(write_gguf(family, {"": "Q8_0"}, tmp_path, is_tied=False)[0])
    # Keys of tokenizers are the same for all families.
    for key in [key for key in file.metadata if family == "llama" or not key.startswith("tokenizer.")]:
        for value in GGUF_VALUES:
            changed = replace(file, metadata=file.metadata | {key: value})
            monkeypatch.setattr(gguf_folder, "read_parts", lambda _paths, found=changed: (found, [found]))
            with ending_well(f"{key}: {str(value)[:20]}", StartupError):
                json.dumps(gguf_folder._texts_of([file.path]))


def test_a_token_of_many_letters_is_refused_and_not_cut_everywhere() -> None:
    whole = sentencepiece().metadata
    added = {"tokens": "a" * 60_000, "token_type": 1, "scores": -1.0}
    file = sentencepiece(**{key: [*whole[f"tokenizer.ggml.{key}"], value] for key, value in added.items()})
    with ending_well("letters", StartupError), pytest.raises(StartupError, match="60000 letters"):
        tokenizer_of(file)


def test_many_tokens_of_many_letters_are_refused_and_not_all_cut_everywhere() -> None:
    whole = sentencepiece().metadata
    long = [f"{number:03}" + "a" * 1000 for number in range(140)]
    added = {"tokens": long, "token_type": [1] * 140, "scores": [-1.0] * 140}
    file = sentencepiece(**{key: [*whole[f"tokenizer.ggml.{key}"], *more] for key, more in added.items()})
    with pytest.raises(StartupError, match="1003 letters, which are too many to be cut"):
        tokenizer_of(file)
