"""Names of the parsers of replies, and the sentences of their options.

Owns: the words of --tool-call-parser and --reasoning-parser; the server has a row for each of them.
"""

from engine.options.option_values import Choice

TOOL_CALL_PARSERS = Choice(
    words=(
        *("auto", "hermes", "llama3_json", "llama4_json", "mistral", "granite", "phi4", "json"),
        *("deepseek", "kimi_k2", "harmony", "qwen3_coder", "glm45", "minimax_m2", "pythonic", "lfm2"),
        *("olmo3", "gemma4", "functiongemma", "generic", "none"),
    )
)
TOOL_CALL_HELP = (
    "How the model writes tool calls, for requests that leave the choice to it. auto looks at the chat "
    "template; generic shows the tools in the prompt and lets a grammar keep to their schemas, for models "
    "that were not trained to call, at the cost of a mask for each token; none refuses."
)
REASONING_PARSERS = Choice(words=("auto", "think", "mistral", "seed_oss", "gemma4", "harmony", "none"))
REASONING_HELP = (
    "How the model marks its reasoning, which a reply shows apart from the answer: think is <think> and "
    "</think>, mistral [THINK], harmony the channels of gpt-oss. auto looks for the marks in the chat "
    "template and the tokenizer."
)
