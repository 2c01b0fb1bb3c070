"""Hints and tools that a request brings in vain: counted, and named in its reply and its line of the log.

Owns: what is made of them, which --strict-fields decides.
"""

import re
from collections.abc import Iterable

from starlette.requests import Request

from engine.errors import RequestRejected
from server.edge.http.edge import UnknownFields, edge_of
from server.edge.observe.request_ids import add_reply_headers, ignored_of

IGNORED_HEADER = "x-tokenyard-ignored"
_MAX_NAMED = 16
_UNFIT = re.compile(r"[^A-Za-z0-9_.-]")
"""Characters of names of the caller's own that a header or a line of the log need not bear."""


def note_ignored(request: Request, names: Iterable[str]) -> None:
    """Count names such as `store` or `tools.web_search`, each once. Raises RequestRejected if that is strict.

    A request may be prepared several times, until its prompt fits.
    """
    edge = edge_of(request)
    noted = ignored_of(request.scope)
    for name in dict.fromkeys(names):
        shown = _UNFIT.sub("_", name[:64])
        if shown in noted:
            continue
        if edge.unknown_fields is UnknownFields.REFUSE:
            message = f"{name[:64]} has no effect here, and this server is set to refuse such fields"
            raise RequestRejected(message, param=name[:64], code="unknown_parameter")
        edge.metrics.ignored_fields.labels(name.partition(".")[0]).inc()
        if not noted:
            add_reply_headers(request.scope, lambda: {IGNORED_HEADER: ", ".join(noted)})
        if len(noted) < _MAX_NAMED:
            noted.append(shown)
