"""Tokenizers of the three kinds that matter, trained here in milliseconds."""

import functools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.text.tokenizer import Tokenizer, decoder_rule

SAMPLE = [
    "hello world, hello there: naïve café über Straße",
    "the quick brown fox jumps over the lazy dog, again and again",
    "日本語のテキスト と 中文 текст на русском",
    "def f(x):\n    return x + 1\n\n# stop\n",
    "👩‍👩‍👧 family 🏳️‍🌈 flags 😀😃😄",
]


def _wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    import orjson

    rule = decoder_rule(orjson.loads(backend.to_str())["decoder"])
    return Tokenizer(backend, rule=rule, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def byte_level_backend(vocab_size: int = 420) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(SAMPLE, trainer)
    backend.add_tokens(["é x", "<tool>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def sentencepiece_backend(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """Tokenizer as Llama 2 has it: a mark for the space, <0xNN> for what is not in the vocabulary."""
    words = sorted({word for line in SAMPLE[:2] for word in line.split()})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({char for word in words for char in word}) + [f"▁{word}" for word in words]
    vocab = [(piece, -float(place)) for place, piece in enumerate(dict.fromkeys(pieces))]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def byte_fallback_bpe_backend() -> tokenizers.Tokenizer:
    """Tokenizer of Llama 2 and Mistral in fact: BPE with merges, a mark for the space, bytes for the rest."""
    plain = sorted({char for line in SAMPLE[:2] for char in line.replace(" ", "▁")})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *plain]
    merges = []
    for word in ("▁the", "▁hello", "▁over", "fox", "▁la", "zy"):
        for end in range(1, len(word)):
            if word[: end + 1] not in tokens:
                tokens.append(word[: end + 1])
                merges.append((word[:end], word[end]))
    vocab = {token: place for place, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return backend


def word_piece_backend() -> tokenizers.Tokenizer:
    words = sorted({word for line in SAMPLE for word in line.split()})
    pieces = ["[UNK]", "<s>", "</s>", *words, *(f"##{word}" for word in words), ".", "##s", "'", "n't"]
    vocab = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@functools.cache
def byte_level() -> Tokenizer:
    return _wrap(byte_level_backend())


@functools.cache
def sentencepiece() -> Tokenizer:
    return _wrap(sentencepiece_backend())


@functools.cache
def sentencepiece_without_strip() -> Tokenizer:
    """Tokenizer as Gemma has it."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _wrap(sentencepiece_backend(decoders.Sequence(steps)))


@functools.cache
def metaspace() -> Tokenizer:
    """Not understood token by token: goes through windows."""
    steps = [decoders.ByteFallback(), decoders.Metaspace()]
    return _wrap(sentencepiece_backend(decoders.Sequence(steps)))


@functools.cache
def word_piece() -> Tokenizer:
    return _wrap(word_piece_backend())


def _with_added_tokens(backend: tokenizers.Tokenizer) -> Tokenizer:
    """Special ones, which may be left out of a text, and others, which may not; with and without spaces."""
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>", "[MASK]"])
    backend.add_tokens(["<tool>", "new word", " spaced ", "é x"])
    return _wrap(backend)


@functools.cache
def byte_fallback_bpe() -> Tokenizer:
    return _with_added_tokens(byte_fallback_bpe_backend())


@functools.cache
def sentencepiece_with_added_tokens() -> Tokenizer:
    return _with_added_tokens(sentencepiece_backend())


@functools.cache
def byte_level_with_added_tokens() -> Tokenizer:
    return _with_added_tokens(byte_level_backend())


@functools.cache
def word_piece_with_added_tokens() -> Tokenizer:
    return _with_added_tokens(word_piece_backend())
