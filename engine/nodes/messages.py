"""The messages between the first node and the others, grouped by receiver."""

import msgspec

from engine.options.engine_config import EngineConfig
from engine.process_messages import Pulse, StartFailed

BEAT_S = 0.5
SILENCE_S = 5.0
"""Longest silence of a node; then the engine ends. A rank sees a cut link as soon."""
LEADER_SILENCE_S = 15.0
"""The same for the first node, whose thread for messages may wait while a model is loaded."""
MAX_MESSAGE_BYTES = 1 << 30
"""Largest message of the first node, which is known by its key: a plan may hold many long prompts."""
MAX_BYTES_FROM_NODES = 64 << 20
"""Largest message to the first node, unless results need more. Hidden states come in pieces of 16 MiB."""

# To the first node.


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A node is there, and computes nothing. Repeated until it is taken on."""

    node: int
    num_nodes: int
    software: str
    checkpoint: str
    num_gpus: int
    """GPUs that its ranks may use."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A beat, and its answer. `life` is the engine that the sender takes part in."""

    life: str


class RankSays(msgspec.Struct, frozen=True, tag=True):
    """Word of a rank for the API process."""

    message: Pulse | StartFailed


class RankEnded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A rank of the node ended, and the node has ended all others of its own."""

    rank: int
    exit_code: int


ToLeader = Hello | Alive | RankSays | RankEnded

# To the other nodes.


class Wait(msgspec.Struct, frozen=True, tag=True):
    """The engine does not begin yet, for a reason."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The node cannot take part, and trying again would fail again."""

    what: str
    fix: str


class Begin(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Load the node's stages, and take part until the link ends."""

    life: str
    config: EngineConfig
    """Configuration of the first node, without the shared secret."""


class WriteStacks(msgspec.Struct, frozen=True, tag=True):
    """Let all ranks write their stacks to the node's log."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The first node has ended by intent: end with the ranks, and wait for no other engine."""


ToNode = Wait | Refused | Begin | Alive | WriteStacks | Dismissed

encode = msgspec.msgpack.Encoder().encode
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode
