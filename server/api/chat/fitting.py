"""Turns of protocols whose limit of tokens says "at most": Anthropic's and Ollama's clients ask for many.

Owns: the cut of the limit to the room that the context window leaves.
Never: how a turn is prepared (turn.py).
"""

from engine.errors import ContextLengthExceeded
from server.api.chat.protocol import ChatCompletionRequest
from server.api.chat.turn import ChatTurn, prepare_turn
from server.edge.http.edge import Edge
from server.reply.generate.calls import Origin


async def prepare_fitting(edge: Edge, chat: ChatCompletionRequest, origin: Origin) -> ChatTurn:
    """Prepare the turn. Raises RequestRejected if there is no room at all, Overloaded."""
    try:
        return await prepare_turn(edge, chat, origin)
    except ContextLengthExceeded as error:
        if error.param != "max_completion_tokens":
            raise
    return await prepare_turn(edge, chat.model_copy(update={"max_completion_tokens": None}), origin)
