"""A checkpoint that calls the tool it is offered, and says one sentence once it has the result.

Its next token follows from the present one alone, so that agents made by others go through a whole loop of
ask, call, result and answer in seconds. The last mark of its chat template says which text it recites.
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

import engine

DEMO = Path(engine.__file__).parent / "demo_model"
FILE = "note.txt"
ANSWER = "Parrot has read the note."
_SHOW = {"command": f"cat {FILE}", "description": "Show the note"}
CALLS: dict[str, dict[str, Any]] = {
    "bash": _SHOW,  # opencode's
    "exec_command": {"cmd": f"cat {FILE}"},  # Codex's, and its older names
    "shell_command": {"command": f"cat {FILE}"},
    "shell": {"command": ["cat", FILE]},
}
_WIDTH = 256
_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_TOWER = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": _WIDTH},
    **{"patch_size": 16, "spatial_merge_size": 2, "num_position_embeddings": 64},
    "deepstack_visual_indexes": [],
}
_PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2},
    "size": {"shortest_edge": 1024, "longest_edge": 1 << 16},
}
_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}\
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}\
{{- '<tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for part in message.content or [] %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- set told = namespace(mark='<|say|>') %}
{%- if messages[-1].role != 'tool' %}{%- for tool in tools or [] %}
{%- if tool.function.name in NAMES %}{%- set told.mark = '<|' + tool.function.name + '|>' %}{%- endif %}
{%- endfor %}{%- endif %}
{{- told.mark }}
{%- endif %}
"""


def make_seeing_parrot(folder: Path, picture: Path) -> Path:
    """Write one that reads pictures too, and calls Claude Code's tool for reading files for one of them."""
    _write_parrot(folder, {**CALLS, "Read": {"file_path": str(picture)}}, _MARKS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    image, video, start, end = (tokenizer.token_to_id(mark) for mark in _MARKS)
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3_vl_text"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=text,
        vision_config=_TOWER,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(1)
    state = AutoModelForImageTextToText.from_config(config).state_dict()
    tensors = {name: each.numpy() for name, each in state.items() if ".visual." in name}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.")] = tensor
    layer = "model.language_model.layers.0.self_attn"
    tensors |= {f"{layer}.{name}_norm.weight": np.ones(32, "f4") for name in "qk"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"dtype": "float32"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return folder


def _write_parrot(folder: Path, calls: dict[str, dict[str, Any]], marks: tuple[str, ...]) -> None:
    """Write the checkpoint into `folder`, and return the folder; `marks` are further special tokens."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    texts = {"say": ANSWER}
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    for name, arguments in calls.items():
        call = json.dumps({"name": name, "arguments": arguments})
        texts[name] = f"<tool_call>\n{call}\n</tool_call>"
    config = json.loads((DEMO / "config.json").read_text())
    chains = {name: [*_chain(tokenizer, name, text), config["eos_token_id"]] for name, text in texts.items()}
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    vectors = np.random.default_rng(1).standard_normal((size, _WIDTH)).astype("f4")
    vectors *= 16 / np.linalg.norm(vectors, axis=1, keepdims=True)  # so that the norm leaves them as they are
    head = np.zeros((size, _WIDTH), "f4")
    for chain in chains.values():
        for before, token in pairwise(chain):
            head[token] += vectors[before] * 0.2
    save_file(_weights(vectors, head), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("NAMES", str(list(calls))))
    (folder / "config.json").write_text(json.dumps(_config(config, size)))


def _chain(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    """A mark for the template, and the text in two tokens."""
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False)])
    pieces = (text[: len(text) // 2], text[len(text) // 2 :])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return [tokenizer.token_to_id(token) for token in (f"<|{name}|>", *pieces)]


def _weights(vectors: np.ndarray, head: np.ndarray) -> dict[str, np.ndarray]:
    """One layer that adds next to nothing."""
    rng = np.random.default_rng(2)
    attention = {
        "q_proj": (64, _WIDTH),
        "k_proj": (32, _WIDTH),
        "v_proj": (32, _WIDTH),
        "o_proj": (_WIDTH, 64),
    }
    mlp = {"gate_proj": (32, _WIDTH), "up_proj": (32, _WIDTH), "down_proj": (_WIDTH, 32)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    ones = np.ones(_WIDTH, "f4")
    layer = {
        f"{name}.weight": (rng.standard_normal(shape) * 1e-3).astype("f4") for name, shape in shapes.items()
    }
    layer |= {"input_layernorm.weight": ones, "post_attention_layernorm.weight": ones}
    placed = {f"model.layers.0.{name}": value for name, value in layer.items()}
    return {"model.embed_tokens.weight": vectors, "lm_head.weight": head, "model.norm.weight": ones, **placed}


def _config(demo: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    ids = {name: demo[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in demo}
    shape = {"hidden_size": _WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    rest = {"hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    return {**kind, **shape, **heads, **rest, **ids, "vocab_size": vocab_size}
