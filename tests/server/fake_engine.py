"""An engine without a model: the face of AsyncEngine, predictable text, faults on demand.

A token is one byte; the reply repeats the prompt's letters in capitals, one token per output.
"""

import asyncio
import dataclasses
import struct
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from engine.errors import AdapterConflict, EngineUnavailable, NoChatTemplate, Overloaded, RequestRejected
from engine.journal import Journal
from engine.text.template_messages import Chat, FinalMessage
from engine.text.tokenizer import SpecialTokens
from engine.types import (
    ChosenLogprob,
    EngineLoad,
    EngineState,
    FinishReason,
    GenerationRequest,
    Grammar,
    Health,
    LogprobEntry,
    ModelInfo,
    ModelNames,
    PoolingRequest,
    QueueForecast,
    ReportPage,
    ServedAdapter,
    ServiceTerms,
    TextCut,
    TokenizedText,
    TokenOutput,
    TokenText,
)
from server.edge.http.edge import NumberedOutputs
from tests.server.merging import merged

EOS = 256
INFO = ModelInfo(
    served_names=("fake", "org/fake-alias"),
    model_type="fake",
    weight_bytes=1,
    num_parameters=1,
    dtype="float32",
    device="cpu",
    vocab_size=300,
    max_model_len=128,
    block_size=4,
    num_blocks=64,
    kv_cache_bytes=1024,
    eos_token_ids=(EOS,),
    default_sampling={"temperature": 0.5, "top_k": 40.0},
    created_s=1_700_000_000,
    has_chat_template=True,
    template_variables=frozenset({"known"}),
)
READY = Health(state=EngineState.READY, is_live=True, detail="ready", num_steps=7, progress=1.0)


@dataclass
class FakeMetrics:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def look(self) -> None:
        """A look finds that the engine is idle."""


@dataclass
class FakeEngine:
    model_info: ModelInfo = INFO
    state: Health = READY
    metrics: FakeMetrics = field(default_factory=FakeMetrics)
    admission_error: Exception | None = None
    own_limit_runs_out: bool = False
    """Raised before the first output."""
    full_up_to: int | None = None
    """The queue is full of calls of this priority, and whoever is more urgent takes a place of theirs."""
    asked_room: list[int | None] = field(default_factory=list)
    grammar_choices: list[int] = field(default_factory=list)
    """For how many choices each grammar was asked for."""
    error_after: int | None = None
    error: Exception | None = None
    """Raised after so many outputs of a request."""
    pause_s: float = 0.0
    """Before every output."""
    stall_after: int | None = None
    """Never goes on after so many outputs."""
    end_as: FinishReason | None = None
    """End of every choice; None: as it really ends."""
    stop_reason: int | str | None = None
    """Stop string or token that choices ended at."""
    is_without_end: bool = False
    can_infill: bool = False
    choice_logprobs: tuple[float, ...] = (-0.5,)
    """Log-probability of every token of a choice; choices beyond the last take turns."""
    texts: tuple[str, ...] | None = None
    """Text of a choice, one token each; None: the prompt in capitals."""
    requests: list[GenerationRequest] = field(default_factory=list)
    are_read_whole: list[bool] = field(default_factory=list)
    """For each call of `generate_all`, whether its outputs are read in large pieces."""
    chats: list[tuple[list[dict[str, Any]], Chat]] = field(default_factory=list)
    pooled: list[PoolingRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_running: int = 0
    num_resets: int = 0

    async def explain(self, page: ReportPage) -> tuple[list[dict[str, Any]], int]:
        live = [{"request_id": request.request_id, "state": "running"} for request in self.requests]
        return live[page.first :][: page.most], len(live)

    views: tuple[bytes, ...] = ()
    """Views for a viewer, before the stream ends."""
    viewers_error: Exception | None = None

    async def watch(self) -> AsyncGenerator[bytes, None]:
        if self.viewers_error is not None:
            raise self.viewers_error
        for view in self.views:
            yield view

    @property
    def info(self) -> ModelInfo:
        if self.state.state is not EngineState.READY:
            raise EngineUnavailable("the model is loading", retry_after_s=2.5)
        return self.model_info

    @property
    def names(self) -> ModelNames:
        info = self.model_info
        return ModelNames(info.served_names, info.name_patterns, info.variants)

    takes_adapters: bool = True

    def load(self) -> EngineLoad:
        return EngineLoad(num_requests=len(self.requests), num_waiting=3, kv_cache_usage=0.25)

    def health(self) -> Health:
        return self.state

    async def encode(self, text: str) -> tuple[int, ...]:
        if "\0" in text:
            raise RequestRejected("the prompt has a null character", param="prompt")
        return tuple(text.encode())

    async def encode_plain(self, text: str) -> tuple[int, ...]:
        return (await self.encode(text)) + (1,)  # to be told from `encode`

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(word.encode()) for word in words)

    async def encode_infill(self, prefix: str, suffix: str) -> tuple[int, ...]:
        if not self.can_infill:
            raise RequestRejected("no holes here", param="suffix", code="unsupported_parameter")
        return (2, *prefix.encode(), 3, *suffix.encode(), 4)

    async def decode(self, token_ids: Sequence[int], special: SpecialTokens) -> str:
        ids = [token_id for token_id in token_ids if token_id < EOS or special is SpecialTokens.KEEP]
        return "".join("<eos>" if token_id == EOS else chr(token_id) for token_id in ids)

    async def compile_grammar(
        self, grammar: Grammar, *, param: str, num_choices: int, tenant: str
    ) -> Grammar:
        self.grammar_choices.append(num_choices)
        if "refuse" in grammar.text:
            raise RequestRejected(f"{param}: refused", param=param, code="invalid_grammar")
        return grammar

    def token_text(self, token_id: int) -> TokenText:
        return TokenText(token_id, chr(token_id), chr(token_id).encode())

    async def tokenizer_config(self) -> dict[str, Any]:
        return {"tokenizer_class": "Fake", "name_or_path": "/secret/place", "model_max_length": 128}

    async def vocabulary_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    async def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        if not self.model_info.has_chat_template:
            raise NoChatTemplate
        self.chats.append((chat.messages, chat))
        contents = [message["content"] or "" for message in chat.messages]
        texts = [
            each if isinstance(each, str) else "\n".join(part["text"] for part in each) for each in contents
        ]
        return tuple("".join(texts).encode()) or (10,)

    async def num_answer_tokens(self, chat: Chat) -> int:
        return 3 if chat.final is FinalMessage.ANSWER else 0

    async def load_adapter(self, name: str, folder_name: str, *, replaces: bool) -> None:
        if folder_name != "good":
            raise RequestRejected("lora_path: refused", param="lora_path")
        if self.model_info.adapter_named(name) and not replaces:
            raise AdapterConflict("it is loaded", param="lora_name")
        loaded = ServedAdapter(name=name, identity=f"{name}@1", folder="/x/good", rank=8, created_s=7)
        others = tuple(each for each in self.model_info.served_adapters if each.name != name)
        self.model_info = dataclasses.replace(self.model_info, served_adapters=(*others, loaded))

    def unload_adapter(self, name: str) -> bool:
        left = tuple(each for each in self.model_info.served_adapters if each.name != name)
        is_there = len(left) < len(self.model_info.served_adapters)
        self.model_info = dataclasses.replace(self.model_info, served_adapters=left)
        return is_there

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def encode_texts(self, texts: Sequence[str], cut: TextCut) -> list[TokenizedText]:
        return [TokenizedText((await self.encode(text))[: cut.max_tokens]) for text in texts]

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], cut: TextCut) -> list[TokenizedText]:
        return [
            TokenizedText((*first.encode(), 0, *second.encode())[: cut.max_tokens], len(first) + 1)
            for first, second in pairs
        ]

    async def pool_all(self, requests: Sequence[PoolingRequest]) -> list[bytes]:
        """The first number of a vector is the number of tokens, the second their mean, the third 1."""
        self.pooled += requests
        if self.admission_error is not None:
            raise self.admission_error
        self.num_running += len(requests)
        try:
            await (asyncio.Event().wait() if self.stall_after == 0 else asyncio.sleep(self.pause_s))
        except asyncio.CancelledError:
            self.aborted += [request.request_id for request in requests]
            raise
        finally:
            self.num_running -= len(requests)
        return [self._vector(request) for request in requests]

    def _vector(self, request: PoolingRequest) -> bytes:
        ids = request.prompt_token_ids
        size = request.params.num_dimensions or self.model_info.pooling.num_dimensions
        return struct.pack("<3f", len(ids), sum(ids) / len(ids), 1.0)[: 4 * size]

    def require_room(self, priority: int | None, journal: Journal | None = None) -> None:
        self.asked_room.append(priority)
        if self.full_up_to is not None and priority is not None and priority >= self.full_up_to:
            raise Overloaded("the queue is full", retry_after_s=3.0)

    require_any_room = require_room

    def forecast(self, terms: ServiceTerms) -> QueueForecast:
        return QueueForecast(7, 2.5, "places") if terms.priority else QueueForecast(0, None, "step")

    def generate_all(
        self, requests: Sequence[GenerationRequest], *, is_read_whole: bool = False
    ) -> NumberedOutputs:
        self.are_read_whole.append(is_read_whole)
        return merged([self.generate(request) for request in requests])

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        if self.own_limit_runs_out:
            request.journal.own_limit_ran_out = True
        if self.admission_error is not None:
            raise self.admission_error
        self.num_running += 1
        is_over = False
        try:
            outputs = self.outputs(request)
            for number, output in enumerate(outputs):
                if number == self.stall_after:
                    await asyncio.Event().wait()
                if number == self.error_after:
                    assert self.error is not None
                    raise self.error
                await asyncio.sleep(self.pause_s)
                request.journal.num_output_tokens += len(output.token_ids)
                yield output
            is_over = True
        finally:
            self.num_running -= 1
            if not is_over:
                self.aborted.append(request.request_id)

    def outputs(self, request: GenerationRequest) -> list[TokenOutput]:
        """Choices take turns, as they do in a batch."""
        prompt = bytes(token_id % 256 for token_id in request.prompt_token_ids).decode(errors="replace")
        said = self.texts if self.texts is not None else tuple(prompt.upper() or "?")
        said = tuple(said[place % len(said)] for place in range(request.params.max_tokens))
        outputs = [
            self._output(request, index, place, text)
            for place, text in enumerate(said)
            for index in range(request.n)
        ]
        for index in range(request.n):
            last = max(place for place, output in enumerate(outputs) if output.index == index)
            if not self.is_without_end:
                end = self.end_as or FinishReason.LENGTH
                outputs[last] = replace(outputs[last], finish_reason=end, stop_reason=self.stop_reason)
        return outputs

    def _output(self, request: GenerationRequest, index: int, place: int, text: str) -> TokenOutput:
        logprobs: tuple[ChosenLogprob, ...] = ()
        if request.params.num_logprobs is not None:
            chosen = entry(text, self.choice_logprobs[index % len(self.choice_logprobs)])
            top = tuple(
                entry(other, -1.0) for other in "ABCDEFGHIJKLMNOPQRSTU"[: request.params.num_logprobs]
            )
            logprobs = (ChosenLogprob(chosen=chosen, top=top),)
        return TokenOutput(
            index=index,
            text=text,
            token_ids=(place,),
            logprobs=logprobs,
            num_cached_tokens=4 if index == 0 else 8,
            num_kept_tokens=8,
            num_accepted_prediction=int(0 < place < len(request.prediction)),
            num_rejected_prediction=int(bool(request.prediction) and not 0 < place < len(request.prediction)),
            prompt_logprobs=self._prompt_logprobs(request) if place == 0 else (),
        )

    def _prompt_logprobs(self, request: GenerationRequest) -> tuple[ChosenLogprob, ...]:
        num_top = request.params.num_prompt_logprobs
        if num_top is None:
            return ()
        top = tuple(entry(other, -1.0) for other in "ABCDEFGHIJKLMNOPQRSTU"[:num_top])
        return tuple(
            ChosenLogprob(chosen=entry(chr(token_id), -2.0), top=top, rank=30)
            for token_id in request.prompt_token_ids[1:]
        )


def entry(text: str, logprob: float = -0.5) -> LogprobEntry:
    return LogprobEntry(token_id=ord(text[:1] or "?"), token=text, token_bytes=text.encode(), logprob=logprob)
