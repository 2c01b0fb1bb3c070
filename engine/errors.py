"""The errors of the engine, ordered by fault; server/edge/error_replies.py maps each type to HTTP.

EngineError
├── RequestRejected      the caller's fault; names the parameter, and what would be right
│   ├── ContextLengthExceeded
│   ├── TooManyPictures
│   ├── GrammarRejected
│   ├── WrongTask
│   ├── AdapterConflict
│   └── NoChatTemplate
├── Overloaded           too much work is waiting; the request may be sent again later
│   └── TenantOverloaded   too much work of one tenant is waiting
├── EngineUnavailable    loading, draining or dead before the request was started
├── DeadlineExceeded     a time limit ran out before there was any token
├── RequestFailed        the model failed on this request alone
├── EngineDied           the engine process died while it held this request, and none follows
└── EngineDiedTwice      two engine processes died while they held this request
"""

import re
from enum import StrEnum


class OverloadReason(StrEnum):
    """The limit that was reached; a label of the metrics."""

    REQUESTS = "requests"  # --max-queued-requests
    TOKENS = "tokens"  # --max-queued-tokens
    TEXTS = "texts"  # the threads that tokenize have too many texts
    DISPLACED = "displaced"  # a more urgent request took its place
    GRAMMARS = "grammars"  # too many wait to be compiled
    PICTURES = "pictures"  # too many wait to be prepared, or their shared memory is full
    KEY_TOKENS = "key_tokens"  # max_queued_tokens of one API key


class EngineError(Exception):
    """The root. Its text may be shown to clients: no path, no address, no stack."""


class RequestRejected(EngineError):
    """A fault of the request; nothing was computed."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(RequestRejected):
    """The prompt, or the prompt and max_tokens together, do not fit the context window."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class TooManyPictures(RequestRejected):
    """The request has more pictures than one may have."""


class WrongTask(RequestRejected):
    """The model is served for another task: generation, vectors, or scores."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="wrong_task")


class AdapterConflict(RequestRejected):
    """An adapter of this name is loaded already."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message, param=param, code="adapter_loaded")


class GrammarRejected(RequestRejected):
    """A grammar that is wrong, cannot be enforced, or is too expensive.

    Without a parameter: that was seen while it was followed, and the request may have tokens already.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        text = message if param is None else f"{param}: {message}"
        super().__init__(text, param=param, code="invalid_grammar")


class NoChatTemplate(RequestRejected):
    """The checkpoint brings no chat template; /v1/completions still works."""

    def __init__(self) -> None:
        super().__init__(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template",
            param="messages",
            code="no_chat_template",
        )


class Overloaded(EngineError):
    """The queue, or another bound on waiting work, is full."""

    def __init__(
        self, message: str, *, retry_after_s: float, reason: OverloadReason = OverloadReason.REQUESTS
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class TenantOverloaded(Overloaded):
    """One tenant has reached its limit; requests of others are still accepted."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s, reason=OverloadReason.KEY_TOKENS)


_PATH = re.compile(r"(?<![\w./:~])~?/(?:[^\s'\"/]+/)*(?=[\w.-])")
_QUOTED_PATH = re.compile(r"""(['"])~?/[^'"]*?([^'"/]+/?)\1""")


def without_folders(text: str) -> str:
    """Return a text for clients, in which of each absolute path the last part is left."""
    return _PATH.sub("", _QUOTED_PATH.sub(r"\1\2\1", text))


class EngineUnavailable(EngineError):
    """The engine is loading, draining or dead. `code` is `not_ready`, `shutting_down` or `model_broken`."""

    def __init__(self, message: str, *, code: str = "not_ready", retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class DeadlineExceeded(EngineError):
    """A time limit, the request's own or the operator's, ran out before there was any token."""


class RequestFailed(EngineError):
    """The model or the worker failed on this request; a retry would most likely fail again."""


class EngineDied(EngineError):
    """The engine process is gone and no other will be started; a retry elsewhere may succeed."""

    def __init__(
        self, message: str = "the engine stopped while this request was running; it may be sent again"
    ) -> None:
        super().__init__(message)


class EngineDiedTwice(EngineError):
    """Two engine processes died while they held this request; a third is not risked."""

    def __init__(self) -> None:
        super().__init__("two engine processes stopped while they held this request; perhaps because of it")
