"""Trials of client grammars, before the engine process gets them.

Owns: the process that tries them, its time limit, and the verdicts on grammars tried before: by that
process, or by the worker that had to end a request.
Never: compiles in this process: a schema of a few lines can keep a compiler busy for hours.
"""

import hashlib
from collections import OrderedDict
from dataclasses import replace

from engine.errors import (
    EngineUnavailable,
    GrammarRejected,
    OverloadReason,
    RequestRejected,
)
from engine.grammars.messages import GrammarVerdict, Tokens
from engine.processes.framed_child import ChildEnded, FramedChild
from engine.processes.turns import TurnsByKey
from engine.types import ModelInfo
from scheduler.messages import GRAMMAR_TOO_DEAR, Grammar

_START_TIMEOUT_S = 60.0
_MAX_WAITING = 31
_MAX_REMEMBERED = 256
_MAX_COST_S = 0.05
"""Limit for one sequence. The worker compiles between two steps; a schema of 300 properties takes 0.01 s."""
_MAX_COST_OF_ALL_S = 2.0
"""Limit for all choices of a request: they begin in several steps (scheduler/step/budget.py), but slow all
others down."""
_MAX_MASKS_OF_ALL_S = 0.25
"""Limit for the dearest mask of the trial, once for each choice: they are computed in one step."""
_SIGKILL = -9


class GrammarCompiler:
    """Tries one grammar at a time. The process starts with the first one, and again after a failure."""

    def __init__(self, folder: str, *, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._child = FramedChild("engine.grammars.process", RAYON_NUM_THREADS="1")
        self._turns = TurnsByKey(1, _MAX_WAITING, OverloadReason.GRAMMARS)
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._blamed: OrderedDict[bytes, str] = OrderedDict()
        """Reasons by grammars, as the worker got them, which were refused there."""
        self._refuses_all = ""

    async def compile(
        self, grammar: Grammar, info: ModelInfo, *, param: str, num_choices: int = 1, tenant: str = ""
    ) -> Grammar:
        """Try a grammar for `num_choices` sequences; return it as the worker takes it.

        `param` names the request field that holds it. Raises GrammarRejected, RequestRejected (this model
        takes no grammars), Overloaded, EngineUnavailable.
        """
        verdict = self._recall(grammar)
        if verdict is None:
            verdict = await self._turns.run(tenant, lambda: self._try_in_turn(grammar, info, param))
        if verdict.refusal:
            raise GrammarRejected(verdict.refusal, param=param)
        _check_cost(verdict, num_choices, param)
        tried = replace(grammar, text=verdict.text, cost_s=verdict.cost_s)
        if reason := self._blamed.get(_key(tried)):
            raise GrammarRejected(f"an earlier request with it was ended: {reason}", param=param)
        return tried

    def blame(self, grammar: Grammar | None, reason: str) -> None:
        """Refuse a grammar from now on if the worker ended a request because of its price.

        Any other failure may be one of the text or of the sampling, which others do not share.
        """
        if grammar is None or GRAMMAR_TOO_DEAR not in reason:
            return
        self._blamed[_key(grammar)] = reason
        if len(self._blamed) > _MAX_REMEMBERED:
            self._blamed.popitem(last=False)

    async def close(self) -> None:
        await self._child.kill()

    async def _try_in_turn(self, grammar: Grammar, info: ModelInfo, param: str) -> GrammarVerdict:
        # The one tried just before may have been the same.
        verdict = self._recall(grammar) or await self._try(grammar, info, param)
        self._remember(grammar, verdict)
        return verdict

    async def _try(self, grammar: Grammar, info: ModelInfo, param: str) -> GrammarVerdict:
        try:
            await self._start(info)
        except (TimeoutError, OSError, ChildEnded):
            raise EngineUnavailable("the process that compiles grammars does not start") from None
        if self._refuses_all:
            raise RequestRejected(f"{param}: {self._refuses_all}", param=param, code="unsupported_parameter")
        try:
            return await self._child.ask(grammar, GrammarVerdict, self._timeout_s)
        except TimeoutError:
            # Not remembered, like the next error: on a calmer machine it may succeed.
            reason = f"compiling this takes more than {self._timeout_s:g} s; make it simpler"
            raise GrammarRejected(reason, param=param) from None
        except ChildEnded as error:
            if error.exit_code != _SIGKILL:
                reason = "compiling this takes too much memory, or fails; make it simpler"
                raise GrammarRejected(reason, param=param) from None
            # Killed from outside; the grammar may be fine.
            raise EngineUnavailable(
                "the process that compiles grammars was killed; the request may be sent again"
            ) from None

    async def _start(self, info: ModelInfo) -> None:
        """Start the process unless it runs. Raises TimeoutError, OSError, ChildEnded."""
        if self._refuses_all or self._child.pid is not None:
            return
        await self._child.start()
        tokens = Tokens(folder=self._folder, vocab_size=info.vocab_size, eos_token_ids=info.eos_token_ids)
        self._refuses_all = (await self._child.ask(tokens, GrammarVerdict, _START_TIMEOUT_S)).refusal

    def _recall(self, grammar: Grammar) -> GrammarVerdict | None:
        key = _key(grammar)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def _remember(self, grammar: Grammar, verdict: GrammarVerdict) -> None:
        self._verdicts[_key(grammar)] = verdict
        if len(self._verdicts) > _MAX_REMEMBERED:
            self._verdicts.popitem(last=False)


def _key(grammar: Grammar) -> bytes:
    return hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode()).digest()


def _check_cost(verdict: GrammarVerdict, num_choices: int, param: str) -> None:
    """Raise GrammarRejected if the grammar would hold up the other sequences for too long."""
    cost_s, masks_s = verdict.cost_s, verdict.mask_s * num_choices
    if cost_s > _MAX_COST_S:
        raise GrammarRejected(
            f"compiling this takes {cost_s:.2f} s of processor time; {_MAX_COST_S:g} s are allowed; make it"
            " simpler",
            param=param,
        )
    if cost_s * num_choices > _MAX_COST_OF_ALL_S:
        raise GrammarRejected(
            f"compiling this for each of {num_choices} choices takes {cost_s * num_choices:.1f} s of"
            f" processor time; {_MAX_COST_OF_ALL_S:g} s are allowed; ask for fewer, or make it simpler",
            param=param,
        )
    if masks_s > _MAX_MASKS_OF_ALL_S:
        raise GrammarRejected(
            f"one token of each of {num_choices} choices takes {masks_s:.2f} s of processor time with this;"
            f" {_MAX_MASKS_OF_ALL_S:g} s are allowed; ask for fewer, or make it simpler",
            param=param,
        )
