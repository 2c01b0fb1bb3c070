"""Tiny checkpoints that pool: encoders, cross-encoders, and decoders with sentence-transformers files.

Owns: their configurations, the tokenizer's special tokens around a text or a pair, the pooling files.
Never: the network, or a random number that differs between two runs.
"""

import json
from pathlib import Path
from typing import Any

from tests.checkpoints import SPECIAL_TOKENS, write_tokenizer

_BERT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}

_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "roberta": ("roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "distilbert": (
        "distilbert",
        {
            **{"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4},
            **{"sinusoidal_pos_embds": False},
        },
    ),
    "mpnet": ("mpnet", {"pad_token_id": 1}),
    "modernbert": (
        "modernbert",
        {
            **{"local_attention": 16, "global_attn_every_n_layers": 3, "pad_token_id": 0},
            **{"bos_token_id": None, "eos_token_id": None, "cls_token_id": 1, "sep_token_id": 2},
        },
    ),
    "gemma3_both_ways": (
        "gemma3_text",
        {
            **{"use_bidirectional_attention": True, "sliding_window": 12, "num_key_value_heads": 2},
            **{"head_dim": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        },
    ),
}
ENCODERS = tuple(_ENCODERS)
"""Families whose tokens see later ones."""

_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama": ("llama", {"num_key_value_heads": 2}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": 12}),
}


def make_embedder(family: str, folder: Path, **overrides: Any) -> Path:
    """A model without a head, as sentence-transformers saves it, but without its files."""
    from transformers import AutoModel

    return _make(family, folder, AutoModel, overrides)


def make_scorer(family: str, folder: Path, **overrides: Any) -> Path:
    """A classification head with one output."""
    from transformers import AutoModelForSequenceClassification

    return _make(family, folder, AutoModelForSequenceClassification, {"num_labels": 1, **overrides})


def write_pooling_files(
    folder: Path, mode: str, *, normalizes: bool = True, dense_sizes: tuple[int, ...] = (), **keys: Any
) -> None:
    """modules.json and the folders it names; `keys` join sentence_bert_config.json."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modes = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    flags = {f"pooling_mode_{key}": name == mode for name, key in modes.items()}
    _write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 64, **flags})
    for number, (size_in, size_out) in enumerate(zip((64, *dense_sizes), dense_sizes, strict=False), start=2):
        _write_dense(folder / f"{number}_Dense", size_in, size_out)
        modules.append((f"{number}_Dense", "Dense"))
    if normalizes:
        modules.append((f"{len(modules)}_Normalize", "Normalize"))
    entries = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": None, "do_lower_case": False, **keys}
    )


def _make(family: str, folder: Path, auto_class: Any, overrides: dict[str, Any]) -> Path:
    # Here, because importing these takes seconds and many tests only read a checkpoint's tokenizer.
    import torch
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_pair_tokenizer(folder)
    model_type, differences = (_ENCODERS | _DECODERS)[family]
    config = CONFIG_MAPPING[model_type](**{**_BERT, "vocab_size": vocab_size, **differences, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20260102)
        model = auto_class.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # a constant would hide that a path ignores it
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def write_pair_tokenizer(folder: Path) -> int:
    """Tokenizer like BERT's: [CLS] text [SEP], [CLS] one [SEP] other [SEP] (types 0, 1); returns its size."""
    vocab_size = write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    first_id = vocab_size - len(SPECIAL_TOKENS)
    names = {"cls": SPECIAL_TOKENS[1], "sep": SPECIAL_TOKENS[2]}

    def special(name: str, type_id: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[name], "type_id": type_id}}

    def text(name: str, type_id: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": type_id}}

    one = [special("cls", 0), text("A", 0), special("sep", 0)]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": one,
        "pair": [*one, text("B", 1), special("sep", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [first_id + SPECIAL_TOKENS.index(name)], "tokens": [name]}
            for name in names.values()
        },
    }
    _write_json(path, tokenizer)
    return vocab_size


def _write_dense(folder: Path, size_in: int, size_out: int) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(size_out)
    weights = {
        "linear.weight": torch.randn((size_out, size_in), generator=generator) / size_in**0.5,
        "linear.bias": torch.randn(size_out, generator=generator) * 0.1,
    }
    activation = "torch.nn.modules.activation.Tanh"
    _write_json(
        folder / "config.json",
        {"in_features": size_in, "out_features": size_out, "bias": True, "activation_function": activation},
    )
    save_file(weights, folder / "model.safetensors")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
