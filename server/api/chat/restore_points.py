"""Positions of a prompt behind which later prompts go on, where the layers of a model cannot go on anywhere.

Owns: the ends of the blocks that a client marked, as tokens of the prompt.
Never: whether a state is kept there (scheduler/blocks/restore_points.py).
Source: `cache_control` of Anthropic's Messages API.
"""

from dataclasses import replace
from itertools import takewhile

from engine.errors import RequestRejected
from engine.media.pictures import TokenIds
from server.api.chat.plan import ReadingPlan
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.template_input import template_input
from server.edge.http.edge import Engine

_MOST_MARKS = 4
"""As in Anthropic's API."""


def check_marks(body: ChatCompletionRequest) -> bool:
    """Tell whether any block is marked. Raises RequestRejected if too many are."""
    num_marks = len(_marked(body))
    if num_marks > _MOST_MARKS:
        raise RequestRejected(
            f"{num_marks} blocks have cache_control; at most {_MOST_MARKS} may", param="messages"
        )
    return num_marks > 0


async def restore_points(
    engine: Engine, plan: ReadingPlan, prompt_ids: TokenIds, num_suffix_tokens: int
) -> tuple[int, ...]:
    """Tokens before the answer begins, and before the end of each marked block.

    For several choices, also those before the token that each computes: the last of the prompt, whose suffix
    the template has not written. None where a model can go on anywhere.
    """
    if not engine.info.has_points:
        return ()
    found = set()
    if num_answer_tokens := await engine.num_answer_tokens(plan.options):
        found.add(max(len(prompt_ids) - num_suffix_tokens - num_answer_tokens, 0))
    if found and (plan.body.n or 1) > 1:
        found.add(len(prompt_ids) - 1)
    last = (len(plan.body.messages) - 1, len(plan.body.messages[-1].content or ()) - 1)
    for index, place in _marked(plan.body):
        if not found or (index, place) != last:  # whose end is the first that was found
            found.add(await _end_of_block(engine, plan, prompt_ids, index, place))
    return tuple(sorted(found - {0}))


def _marked(body: ChatCompletionRequest) -> list[tuple[int, int]]:
    """Messages and their parts that are marked."""
    return [
        (index, place)
        for index, message in enumerate(body.messages)
        for place, part in enumerate(message.content or ())
        if part.cache_control is not None
    ]


async def _end_of_block(
    engine: Engine, plan: ReadingPlan, prompt_ids: TokenIds, index: int, place: int
) -> int:
    """Count the tokens that the prompt has in common with that of a conversation that ends here."""
    messages = plan.body.messages[: index + 1]
    messages[-1] = messages[-1].model_copy(update={"content": (messages[-1].content or [])[: place + 1]})
    body = plan.body.model_copy(update={"messages": messages})
    try:
        told, options = template_input(body, plan.model.info, plan.tools)
        options = replace(options, add_generation_prompt=False, continue_final_message=False)
        pairs = zip(await engine.encode_chat(told, options), prompt_ids, strict=False)
    except RequestRejected:  # templates may refuse an end other than a user's message
        return 0
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
