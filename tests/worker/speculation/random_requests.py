"""Random requests over all that changes how a token is sampled."""

import json
from random import Random

import tokenizers

from scheduler.messages import Grammar, GrammarKind, SamplingParams

_TEXTS = (
    "Write a short story about a train.",
    "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
    "one two three one two three one two three one",
    "x",
    "The yard is full of tokens, and the trains come and go.",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
_GRAMMARS = (
    Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_SCHEMA)),
    Grammar(kind=GrammarKind.REGEX, text="(ab|cd e)+f"),
    Grammar(kind=GrammarKind.LARK, text='start: "x" ("y" | " z")* "q"'),
)
TOOL_CALL = Grammar(
    kind=GrammarKind.LARK,
    text='start: "<tool_call>" call "</tool_call>"\ncall: %json '
    + json.dumps(
        {
            "type": "object",
            "properties": {"name": {"const": "find"}, "arguments": _SCHEMA},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
    ),
)
"""Grammar of a reply that must call a tool."""
_TINY_EOS = 334
TINY_REQUESTS = [
    ([5, 9, 5, 9, 5], SamplingParams(temperature=0.0, max_tokens=7, num_logprobs=2)),
    ([7, 3], SamplingParams(temperature=0.9, seed=7, top_p=0.9, max_tokens=7, frequency_penalty=0.5)),
    (
        [40, 9, 5],
        SamplingParams(
            temperature=0.0,
            max_tokens=8,
            stop_token_ids=(_TINY_EOS,),
            grammar=Grammar(kind=GrammarKind.REGEX, text="[a-m]{20}", begins_after=None),
        ),
    ),
    (
        [8, 2, 4, 1, 6],
        SamplingParams(
            seed=4,
            max_tokens=9,
            bad_words=((8,), (7, 9)),
            logit_bias=((8, 50.0), (9, 49.0), (10, 49.0), (11, 48.0)),
            frequency_penalty=1.7,
        ),
    ),
]
"""For the checkpoints of tests, which have 335 tokens: a report, penalties, a grammar, bad words."""


def random_request(
    random: Random, tokenizer: tokenizers.Tokenizer, eos_token_id: int
) -> tuple[list[int], SamplingParams]:
    """Make up one request; each feature is in some of them."""
    vocab_size = tokenizer.get_vocab_size()
    prompt = tokenizer.encode(random.choice(_TEXTS), add_special_tokens=False).ids
    fields: dict[str, object] = {
        "temperature": random.choice((0.0, 0.0, 0.7, 1.0, 1.6)),
        "seed": random.getrandbits(64),
        "max_tokens": random.randint(1, 24),
        "stop_token_ids": (eos_token_id,),
    }
    some: dict[str, object] = {
        "top_p": random.uniform(0.3, 1.0),
        "top_k": random.choice((1, 5, 40, 400)),
        "min_p": random.uniform(0.0, 0.2),
        "repetition_penalty": random.uniform(0.8, 1.4),
        "presence_penalty": random.uniform(-1.0, 1.0),
        "frequency_penalty": random.uniform(-0.5, 1.0),
        "logit_bias": tuple((random.randrange(vocab_size), random.uniform(-5, 5)) for _ in range(3)),
        "num_logprobs": random.choice((0, 1, 5)),
        "num_prompt_logprobs": 1,
        "bad_words": tuple(
            tuple(random.randrange(3, 400) for _ in range(random.randint(1, 2))) for _ in range(30)
        ),
        "min_tokens": random.randint(0, fields["max_tokens"]),  # type: ignore[call-overload]
        "stop_token_ids": (eos_token_id, *(random.randrange(vocab_size) for _ in range(40))),
    }
    for name, value in some.items():
        if random.random() < 0.25:
            fields[name] = value
    if random.random() < 0.3:
        begins_after = random.choice((None, None, random.randrange(60, 120)))
        grammar = random.choice(_GRAMMARS)
        fields["grammar"] = Grammar(kind=grammar.kind, text=grammar.text, begins_after=begins_after)
    elif random.random() < 0.1:
        fields["allowed_token_ids"] = tuple(random.sample(range(3, vocab_size), 60))
    return prompt, SamplingParams(**fields)  # type: ignore[arg-type]
