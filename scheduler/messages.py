"""Messages that scheduler, worker and engine share: plans of steps, and their results.

Owns: plain data, complete when built, standard library only, so that it can be printed, compared,
replayed and sent to another process.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple, NewType

from scheduler.draft_messages import DraftChoice, DraftPasses, PredictionUse
from scheduler.input_messages import AnswerStart, EncoderInput, Payload

SequenceId = NewType("SequenceId", int)
"""One stream of tokens; unique for the life of the engine. A request with n=3 has three."""

BlockId = NewType("BlockId", int)
"""One block of the KV cache. Block 0 is never handed out: the worker writes padding there."""


class FinishReason(StrEnum):
    """Terminal event of a sequence; each has exactly one. OpenAI's clients know the first two."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context window, or alone in a pool that is too small for more
    ABORTED = "abort"  # the client left
    REJECTED = "rejected"  # never admitted: it can never fit
    EXPIRED = "timeout"  # one of its time limits ran out
    FAILED = "error"  # the model or the worker failed on it
    UNFIT = "invalid_grammar"  # its grammar cannot be followed any further, or takes too much time


class GrammarKind(StrEnum):
    """Language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


GRAMMAR_TOO_DEAR = (
    "following it takes more processor time than a request may take from the others; make it simpler"
)
"""The failure of a grammar that is the grammar's alone, whatever the text and the sampling were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Pattern that the generated text must match.

    Only grammars that were compiled once reach the scheduler.
    """

    kind: GrammarKind
    text: str
    begins_after: int | None = None
    """Free until this token was generated (the end of a reasoning block); None: from the start."""
    cost_s: float = 0.0
    """Processor time that compiling it and its first mask took when it was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of the next token of a sequence, and conditions under which there is none.

    They apply in a fixed order: grammar, logit bias, bans (minimum length, bad words, all that is not
    allowed), penalties, temperature, min-p, top-k, top-p, random draw. The scheduler reads the last group.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """64 bits, unsigned. Always set: a request without one is given a random one on arrival."""
    num_logprobs: int | None = None
    """Number of alternatives to the chosen token to report; None reports no log-probability at all."""
    logprob_token_ids: tuple[int, ...] = ()
    """Distinct tokens that are reported in place of the likeliest ones, if any log-probability is."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on; the prefix cache is then not read."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences; the last token of one cannot be sampled right after the others."""
    allowed_token_ids: tuple[int, ...] = ()
    """Tokens that can be sampled; empty: all."""
    grammar: Grammar | None = None

    max_tokens: int = 16
    min_tokens: int = 0
    """Number of tokens before which no token of `stop_token_ids` can be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the sequence; holds the model's end-of-sequence tokens unless the caller ignores them."""
    answer: AnswerStart | None = None
    """Beginning of the answer, for all that is meant for it alone; None: the first token."""


class PoolingTask(StrEnum):
    """Result computed from a prompt that generates nothing."""

    EMBED = "embed"  # one vector, as the checkpoint says how to pool
    SCORE = "score"  # the classification head's outputs


class PromptComputation(StrEnum):
    """Part of a prompt that must be computed, and whether it may be divided."""

    REUSING = "reusing"  # tokens in the prefix cache are not computed again
    EVERY_POSITION = "every_position"  # all of it, in chunks: something is asked of each position
    AT_ONCE = "at_once"  # all of it in one step, its blocks not shared: each token attends to all others


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Reduction of the hidden states of a prompt to one vector."""

    task: PoolingTask
    num_dimensions: int | None = None
    """Dimensions to keep, from the first; the vector is normalized again. None keeps all."""
    prompt: PromptComputation = PromptComputation.EVERY_POSITION
    """Demand of the model's kind of pooling: REUSING if it reads the last position only."""
    second_text_start: int | None = None
    """Start of the second text of a pair, for models that distinguish the two; None: there is one text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInputs:
    """Inputs of a sequence other than its tokens; all of them empty for plain generation."""

    pooling: PoolingParams | None = None
    """If set, nothing is generated."""
    adapter: str = ""
    """Name of the adapter (LoRA, say) that the model is run with; empty: none."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    """Inputs in order of their positions, which do not overlap; the prompt's last token is behind them."""
    payloads: tuple[Payload, ...] = ()
    """Bytes of these inputs, each content once. They lie in shared memory until the sequence has ended."""
    prediction: tuple[int, ...] = ()
    """Text that the client expects to be generated, as tokens."""
    generated: tuple[int, ...] = ()
    """Tokens that were generated before, by a process that is gone: it goes on behind them."""
    num_reported_positions: int = 0
    """Positions of the prompt whose log-probabilities were reported before."""
    restore_at: tuple[int, ...] = ()
    """Numbers of prompt tokens behind which later prompts will go on otherwise. Empty: not known."""


NO_INPUTS = SequenceInputs()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds from add_request on; inf is no limit. An expired request costs no further step."""

    queue_s: float = inf
    """Until the first step that the sequence is part of."""
    first_token_s: float = inf
    total_s: float = inf

    @property
    def nearest_s(self) -> float:
        return min(self.queue_s, self.first_token_s, self.total_s)


class TimeLimitKind(Enum):
    """Event that had to happen in time.

    The value is the message to the caller, by which the API process knows the kind too.
    """

    QUEUE = "it waited longer than its queue limit"
    FIRST_TOKEN = "it had no token within its limit for the first one"
    TOTAL = "it took longer than its total limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTerms:
    """Terms on which a request is served; the same for all of its sequences."""

    priority: int = 0
    """Lower is more urgent, as in nice(1). Read under the priority policy."""
    tenant: str = ""
    """Account that the request runs on. Read if tenants are treated fairly."""
    cache_salt: str = ""
    """Prefixes are shared only with requests of the same salt."""
    time_limits: TimeLimits = TimeLimits()


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one generated token, before temperature and truncation."""

    token_id: int
    logprob: float
    rank: int
    """1 is the most likely token."""
    top: tuple[tuple[int, float], ...]
    """The `num_logprobs` most likely tokens with their log-probabilities, best first; for `logprob_token_ids`
    the generated token, then each of them."""


GroupBlocks = tuple[tuple[BlockId, ...], ...]
"""Blocks for each group of layers."""


class NewTable(NamedTuple):
    """Blocks of a new sequence for one group of layers, prefix-cache hits first."""

    block_ids: tuple[BlockId, ...]
    """Blocks of the places that are held; those of one place, one for each stripe, lie together."""
    first: int = 0
    """Place of the first; those before it were passed by a window, and are not read any more."""


class NewSequence(NamedTuple):
    """Sequence that the worker has no row for: admitted first, or again after a preemption."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    """Prompt and, on readmission, the tokens that were generated before."""
    num_prompt_tokens: int
    params: SamplingParams
    tables: tuple[NewTable, ...]
    """Whole block tables so far, one for each group of layers. Blocks that a window passes later stay in the
    worker's table, and are not read either."""
    pooling: PoolingParams | None = None
    """If set, no token is sampled; the share that samples returns the pooled vector."""
    adapter: str = ""
    """Adapter to run the model with; empty: none."""
    prediction: tuple[int, ...] = ()
    """Text that the client expects, as tokens: a source of drafts, without any effect on the sampled text."""
    scope: tuple[str, str] = ("", "")
    """Tenant and cache salt. Nothing that is kept of this sequence serves one of another scope."""
    encoder_inputs: tuple[EncoderInput, ...] = ()
    payloads: tuple[Payload, ...] = ()
    """See SequenceInputs."""


class PreemptionCause(StrEnum):
    """Reason why a running sequence gave up its blocks."""

    GROWTH = "growth"  # a better ranked one, or it itself, needed a block
    DISPLACED = "displaced"  # a more urgent waiting one took its place
    FAIRNESS = "fairness"  # one of a tenant that had far less service took its place


class Preemption(NamedTuple):
    """Departure of a sequence from the running queue before its end, and its cost."""

    sequence_id: SequenceId
    cause: PreemptionCause
    was_swapped: bool
    """Whether its KV went to the host; otherwise it is computed again, or found in the prefix cache."""
    beneficiary: SequenceId
    """Sequence that it made room for; itself, if it was the last in the queue and needed more."""
    num_computed_tokens: int
    """Tokens that it had computed."""
    num_freed_blocks: int


class BlockCopy(NamedTuple):
    """Copy of the whole content of a block to another. The field of the plan says which pools they are in."""

    source: BlockId
    target: BlockId


class StateTap(NamedTuple):
    """State of a sequence in the middle of its share, or at the end, that is kept for later prompts."""

    sequence_id: SequenceId
    position: int
    """Tokens that it stands for; behind the share's first, and none behind its last."""
    block_ids: tuple[BlockId, ...]
    """Blocks to write it to as well, one for each stripe. No sequence has them."""


class ScheduledSequence(NamedTuple):
    """Share of a step that one sequence gets. A named tuple because one is built per sequence and step."""

    sequence_id: SequenceId
    start: int
    """Position of the first token to compute; the KV of all before it is in the cache, or is written
    by this same step (a prefix shared with a sequence that stands earlier or later in the plan)."""
    num_tokens: int
    """At least 1. Several for a prefill chunk; one for a decode, and one more for each draft token."""
    samples: bool
    """Whether the share reaches the end of the known tokens, so that the next one is sampled from its
    logits."""


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class SchedulerOutput(NamedTuple):
    """Plan of one step. The worker's order: release, swap out, swap in, copy, add, grow, compute.

    Copies of one kind may be made in any order: no two have one target, and none reads what another of its
    kind writes. A later kind may read what an earlier one wrote. No block is written that an earlier kind, or
    the same one, still reads.

    The worker must write the keys and values of all scheduled tokens of a layer before any of them
    attends, since a sequence may share blocks that another one fills in the same step.

    Plans are carried out one after the other. One may be made before the result of an earlier one is known;
    a share may then begin at a token that the worker has sampled and the scheduler does not know yet.

    A named tuple because one is built for each step: a frozen dataclass with as many fields takes
    half as long to build as a step of one decode to plan.
    """

    step: int
    released: tuple[SequenceId, ...]
    """Sequences finished, aborted or preempted since the last plan: their rows are free."""
    new_sequences: tuple[NewSequence, ...]
    new_blocks: dict[SequenceId, GroupBlocks]
    """Blocks to append to the tables of sequences that the worker already knows."""
    scheduled: tuple[ScheduledSequence, ...]
    """Shares: decodes first, then shares of several tokens, prefill chunks and decodes with drafts."""
    num_scheduled_tokens: int
    swap_out: tuple[BlockCopy, ...] = ()
    """Copies from the device's pool to the host's, before any other write: blocks of preempted
    sequences, and cached prefixes that the device gives up. Blocks that are written again first come first,
    as far as that is known: a device that copies during its steps waits for no others."""
    swap_in: tuple[BlockCopy, ...] = ()
    """Copies from the host's pool to the device's, after all of `swap_out`."""
    copies: tuple[BlockCopy, ...] = ()
    """Copies within the device's pool, after all of `swap_in`: a prompt's tail, for sequences with the same
    one. Earlier plans have computed the content of the sources; this plan computes none of it."""
    preemptions: tuple[Preemption, ...] = ()
    """Preemptions of this step, for the trace; the worker reads `released`."""
    draft_token_ids: Mapping[SequenceId, tuple[int, ...]] = _NOTHING
    """Guesses for the positions after the first of that sequence's share. The worker returns the ones that
    the model would have sampled too, up to the first that it would not, and one token more."""
    encoder_inputs: Mapping[SequenceId, tuple[EncoderInput, ...]] = _NOTHING
    """Inputs to encode, in this order: each plan names them again until a result says that an output is
    there. It is kept until the last of its positions was computed, or its sequence was released."""
    draft_choice: DraftChoice | None = None
    """For the trace; None if no drafts were offered, or all that have room are verified."""
    taps: tuple[StateTap, ...] = ()
    """States that are to be kept while this step is computed."""
    num_drafts_wanted: Mapping[SequenceId, int] = _NOTHING
    """Most drafts that the worker is to compute for a sequence once this step is sampled; there are blocks
    for them."""
    encoder_slice_s: float = 0.0
    """Time that encoding may take in this step; the rest is done in later ones. 0 if slices
    before took it: then only inputs that are encoded already are found."""

    @property
    def is_empty(self) -> bool:
        """Whether the worker has nothing to do. Releases then travel with the next plan."""
        return not (self.scheduled or self.swap_out or self.encoder_inputs)


class Encoded(NamedTuple):
    """Encoder outputs that are there from now on, and what they took."""

    offsets: Mapping[SequenceId, tuple[int, ...]]
    """First positions of the inputs, by sequence."""
    num_computed: int = 0
    """Inputs that were encoded."""
    num_found: int = 0
    """Inputs that had been encoded before, for this sequence or another."""
    seconds: float = 0.0
    """Time that encoding took of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Result of a plan.

    Every sequence with `samples` is in `token_ids`, in `pooled`, in `failures` or in `unfit`.
    """

    token_ids: Mapping[SequenceId, tuple[int, ...]]
    """Tokens sampled in this step, for each sequence that samples: one, and accepted drafts before it."""
    logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]]
    """Log-probabilities aligned with `token_ids`; only sequences that asked."""
    failures: Mapping[SequenceId, str]
    """Sequences that failed alone (logits that are not finite, say), with the reason for the log."""
    unfit: Mapping[SequenceId, str] = field(default_factory=dict)
    """Sequences whose own grammar failed, with the reason for the caller. What they computed is sound."""
    prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens after each computed position, in order; only sequences that
    asked."""
    pooled: Mapping[SequenceId, bytes] = field(default_factory=dict)
    """Float32, little-endian; for each pooling sequence whose share reaches the end of its prompt."""
    draft_token_ids: Mapping[SequenceId, tuple[int, ...]] = field(default_factory=dict)
    """Guesses at the tokens after those in `token_ids`, for a next plan to verify."""
    draft_passes: DraftPasses = ()
    """Passes that made some of these, in addition to the step itself."""
    num_followed: Mapping[SequenceId, int] = field(default_factory=dict)
    """Tokens that a draft model has computed, of each sequence that it was asked about."""
    encoded: Encoded | None = None
    """Set where the plan named inputs to encode. Of those in `failures` the input could not be encoded."""


class SequenceStart(NamedTuple):
    """Facts reported once, with the first output of a sequence."""

    queue_s: float
    """Time from add_request to the first step that it was part of."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache at first admission."""
    num_lost_tokens: int = 0
    """Further prompt tokens that the groups of layers which keep all tokens had."""
    lost_to: str = ""
    """Name of the group that lacked what is read behind these; empty if none did."""
    num_kept_tokens: int = 0
    """Prompt tokens that later prompts find, by now."""


class SequenceOutput(NamedTuple):
    """Output of one sequence after a step, for the client that owns it. A tuple: one is built per token."""

    sequence_id: SequenceId
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    start: SequenceStart | None = None
    message: str = ""
    """Reason of a rejection or failure, fit for the caller's eyes."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities not reported before, in order: with a prompt in several chunks in several outputs."""
    pooled: bytes = b""
    """Float32, little-endian; with the one output of a pooling sequence."""
    num_preemptions: int = 0
    """Preemptions of the sequence so far."""
    prediction: PredictionUse | None = None
    """Only for a sequence with a prediction, and a step that verified some of it."""


class WaitReason(StrEnum):
    """Reason why the waiting queue waited when it was last looked at."""

    STEP = "step"  # nothing: the next step will look at it
    PLACES = "places"  # max_num_seqs sequences run
    BLOCKS = "blocks"  # too few KV blocks are free for the first in the queue
    TOKENS = "tokens"  # the step's token budget was spent, or what prompts may have of it
    PREEMPTION = "preemption"  # of another in this step; or of the first in the queue, whose token is awaited
    ADAPTER = "adapter"  # max_adapters others are in use
    ENCODER = "encoder"  # the encoder cache is full; or of one that runs: its next input is being encoded
    DELAY = "delay"  # decodes have steps for themselves, until prompts have waited for prefill_delay_factor
    GRAMMAR = "grammar"  # its grammar is being compiled, or is to be after those before it
    ORDER = "order"  # of one sequence: it has all that it needs, but one before it waits


class ReportPage(NamedTuple):
    """Part of a long list of reports."""

    first: int
    most: int


class SequenceReport(NamedTuple):
    """Report on one unfinished sequence."""

    sequence_id: SequenceId
    state: str
    place: int
    """Place in the running queue, or by rank in the waiting queue; 0 is the best. With fairness between
    tenants another tenant's turn may come first."""
    priority: int
    rank: tuple[float, ...]
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    num_bypasses: int
    age_s: float
    wait_reason: str
    """Reason why this sequence waits; empty for a running one, unless its next input is being encoded."""
    expected_start_s: float | None
    """Seconds until it starts, as the last starts were apart; None if it runs or nothing is known."""
    blocks_by_group: Mapping[str, int] = _NOTHING
    """Blocks of num_blocks by the name of their group of layers; empty where it has none."""
    num_cached_tokens: int = 0
    num_lost_tokens: int = 0
    lost_to: str = ""
    num_kept_tokens: int = 0
    """Numbers of SequenceStart: found and lost at its first admission, kept by now."""


class RequestCounts(NamedTuple):
    """Number of sequences in each state."""

    running: int
    waiting: int
    swapped: int
