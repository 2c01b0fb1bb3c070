"""What can go wrong, by whose fault it is; server/error_replies.py maps each type to HTTP once.

EngineError
├── RequestRejected      the caller's: says which parameter, and what would be right
│   ├── ContextLengthExceeded
│   ├── GrammarRejected
│   ├── WrongTask
│   └── NoChatTemplate
├── Overloaded           too much work is waiting: come back later
│   └── TenantOverloaded   too much of one tenant's
├── EngineUnavailable    loading, draining or dead before the request was started
├── DeadlineExceeded     a time limit ran out before there was any token
├── RequestFailed        the model failed on this request alone
├── EngineDied           the engine process died with this request in flight
└── EngineDiedTwice      so did the next one, to which it was handed
"""

from enum import StrEnum


class OverloadReason(StrEnum):
    """Of what there was too much; a label of the metrics."""

    REQUESTS = "requests"  # --max-queued-requests
    TOKENS = "tokens"  # --max-queued-tokens
    TEXTS = "texts"  # more are being tokenized than the pool takes
    DISPLACED = "displaced"  # a more urgent request took the place
    GRAMMARS = "grammars"  # more wait to be compiled than is good
    KEY_TOKENS = "key_tokens"  # max_queued_tokens of one API key


class EngineError(Exception):
    """The root. Its text is fit for the caller's eyes: no path, no address, no stack."""


class RequestRejected(EngineError):
    """The caller's fault; nothing was computed."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestRejected):
    """The prompt, or the prompt and max_tokens together, do not fit the context window."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class WrongTask(RequestRejected):
    """The model does something else: it generates, makes vectors, or makes scores."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="wrong_task")


class GrammarRejected(RequestRejected):
    """A grammar that is wrong, cannot be enforced, or is too expensive."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(f"{param}: {message}", param=param, code="invalid_grammar")


class NoChatTemplate(RequestRejected):
    """The checkpoint brings no chat template; /v1/completions still works."""

    def __init__(self) -> None:
        super().__init__(
            "this model has no chat template; use /v1/completions, or serve a checkpoint with one",
            param="messages",
            code="no_chat_template",
        )


class Overloaded(EngineError):
    """Too much is waiting already."""

    def __init__(
        self, message: str, *, retry_after_s: float, reason: OverloadReason = OverloadReason.REQUESTS
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class TenantOverloaded(Overloaded):
    """One tenant has as much waiting as it may; others are still welcome."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=OverloadReason.KEY_TOKENS)


class EngineUnavailable(EngineError):
    """Loading, draining or dead. `code` is `not_ready` or `shutting_down`."""

    def __init__(self, message: str, *, code: str = "not_ready", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """A time limit, the request's own or the operator's, ran out before there was any token."""


class RequestFailed(EngineError):
    """The model or the worker failed on this request; a retry would most likely fail again."""


class EngineDied(EngineError):
    """The engine process is gone and took this request with it; a retry may succeed."""

    def __init__(
        self, message: str = "the engine stopped while this request was running; it may be sent again"
    ) -> None:
        super().__init__(message)


class EngineDiedTwice(EngineError):
    """Two engine processes died with this request in flight: a third should not be risked."""

    def __init__(self) -> None:
        super().__init__("two engine processes stopped while they held this request; perhaps because of it")
