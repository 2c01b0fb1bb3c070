"""The endpoints of the API, one line each.

Owns: the list from which the application, the document, the names of routes in logs, metrics and traces, the
paths without a key and the paths of batch files follow.
"""

from collections.abc import Iterable

from server.api.anthropic import messages as anthropic_messages
from server.api.batches import batch_routes, file_routes
from server.api.chat import chat
from server.api.completions import completions
from server.api.llama_cpp import endpoints as llama_cpp_endpoints
from server.api.ollama import embed as ollama_embed
from server.api.ollama import endpoints as ollama_endpoints
from server.api.operations import admin, models, ops, render, tokenization
from server.api.pooling import endpoints as pooling_endpoints
from server.api.responses import responses
from server.edge.http.endpoint import Endpoint
from server.page import page, what_if, yard

PUBLIC: tuple[Endpoint, ...] = (
    chat.ENDPOINT,
    completions.ENDPOINT,
    models.ENDPOINT,
    models.BY_HAND,
    ops.ENDPOINT,
    responses.ENDPOINT,
    responses.BY_ID,
    tokenization.ENDPOINT,
    render.ENDPOINT,
    pooling_endpoints.ENDPOINT,
    file_routes.ENDPOINT,
    batch_routes.ENDPOINT,
    anthropic_messages.ENDPOINT,
    ollama_endpoints.ENDPOINT,
    ollama_embed.ENDPOINT,
    llama_cpp_endpoints.ENDPOINT,
)
PAGE: tuple[Endpoint, ...] = (page.ENDPOINT,)
"""The web page's own files."""
ADMIN_PAGE: tuple[Endpoint, ...] = (*PAGE, models.BY_HAND)
"""The page on a port of the admin routes, with the models that it lists and loads."""
YARD: tuple[Endpoint, ...] = (yard.ENDPOINT, what_if.ENDPOINT)
"""The live view of the scheduler and its simulator, which change nothing."""
ADMIN: tuple[Endpoint, ...] = (admin.ENDPOINT, *YARD)
"""Endpoints for operators, served only if they are enabled; they may have a port of their own."""
ADAPTERS: tuple[Endpoint, ...] = (models.ADAPTERS,)
"""Endpoints that load and unload adapters, only with --lora-directory."""
POLLED_PATHS = frozenset({"/admin/requests", "/admin/events", "/admin/server", "/models"})
"""Routes that pages and tools ask again and again."""
OPENAPI_PATH = "/openapi.json"


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


ROUTES = _union(each.paths for each in (*PUBLIC, *PAGE, *ADMIN, *ADAPTERS)) | {OPENAPI_PATH}
"""Labels of the request counter, and words of the log."""
OPEN_PATHS = _union(each.open_paths for each in PUBLIC)
KEYLESS_PATHS = _union(each.keyless_paths for each in PAGE)
BATCH_PATHS = _union(each.batch_paths for each in PUBLIC)
OPERATIONS = {path: name for each in PUBLIC for path, name in each.operations.items()}
"""`gen_ai.operation.name` by path."""
ERROR_SHAPES = {path: shape for each in PUBLIC for path, shape in each.error_shapes.items()}
"""Shapes of errors by the beginning of paths; elsewhere OpenAI's."""
EVENT_SHAPES = {path: shape for each in PUBLIC for path, shape in each.event_shapes.items()} | ERROR_SHAPES
"""The same for errors that are events."""
