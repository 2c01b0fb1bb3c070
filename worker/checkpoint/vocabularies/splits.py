r"""Rules by which byte-level tokenizers cut a text before they merge pairs, by their names in GGUF files.

Owns: expressions, each of which cuts the pieces that the one before it has left.
Source: the tokenizer.json of the models, which llama.cpp has these names for; expressions are Oniguruma's.
"""

from typing import Any, NamedTuple


def _any_case(end: str) -> str:
    """Words by the case of their letters, each with what may end it."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{_UPPER}*{_LOWER}+{end}|{first}{_UPPER}+{_LOWER}*{end}"


class Split(NamedTuple):
    """Rules of one name."""

    patterns: tuple[str, ...]
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    """A word that is a token becomes it, whatever its pairs."""
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MIXED_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LATIN_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}"
)
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
# Letters with a case, of scripts that were known when these models were made.
_OLD_CASED = (
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}]]+"
)
_NOT_HAN = ("[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]", "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}&&[^\\p{Han}]]")
KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SIGNS}{_SPACES}"
)
_BY_WORD = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{_SIGNS}{_SPACES}"
BY_THREE_DIGITS = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}{_SIGNS}{_SPACES}"
_O200K = rf"{_any_case(f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}{_MIXED_SIGNS}{_SPACES}"

_PLAIN = Split((_GPT2,))
_DIGITS_APART = Split((r"\p{N}", _GPT2))
_LLAMA3 = Split((BY_THREE_DIGITS,), ignores_merges=True, adds_bos=True)
_QWEN2 = Split((_BY_WORD,), normalizer={"type": "NFC"})
_DEEPSEEK3 = Split((r"\p{N}{1,3}", r"[\x{3040}-\x{30FF}\x{4E00}-\x{9FA5}]+", _LATIN_WORDS))
_OPEN_AI = Split((_O200K,))
_FALCON_SIGNS = r"[\p{P}\$\+<=>\^~\|`]+"

SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "gigachat"), _PLAIN),
    **dict.fromkeys(("a.x-4.0", "mellum", "modern-bert", "granite-docling"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS_APART),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS_APART),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
    **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), Split((BY_THREE_DIGITS,))),
    **dict.fromkeys(("glm4", "glm5"), Split((BY_THREE_DIGITS,), ignores_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), Split((_BY_WORD,))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _OPEN_AI),
    "qwen35": Split(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}",
        )
    ),
    "tekken": Split(
        (rf"{_any_case('')}|\p{{N}}{_MIXED_SIGNS}{_SPACES}",), ignores_merges=True, adds_bos=True
    ),
    "deepseek-llm": Split(
        (
            *(r"[\r\n]", _OLD_CASED),
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            *(r"\s+$", _CJK, r"\p{N}+"),
        )
    ),
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "falcon": Split((_FALCON_SIGNS, _GPT2, r"[0-9][0-9][0-9]")),
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "kimi-k2": Split((KIMI,), ignores_merges=True),
    "seed-coder": Split(
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",),
    ),
    "minicpm5": Split(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+{_SIGNS}{_SPACES}"), ignores_merges=True
    ),
}
