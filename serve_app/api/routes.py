"""Routes of vLLM's application that clients may call, all by POST, by the models that serve them."""

from collections.abc import Collection

from serve_app.api.errors import RequestError

GENERATE = "/generate"
CHAT_BATCH = "/v1/chat/completions/batch"
RESPONSES = "/v1/responses"

PROCESS = "/process"
"""The route of functions of a batch."""

GENERATION = (
    "/v1/chat/completions",
    "/v1/completions",
    CHAT_BATCH,
    RESPONSES,
    "/v1/messages",
    "/v1/messages/count_tokens",
)
"""Routes of models that generate text; the most frequent routes first."""

EMBEDDINGS = "/v1/embeddings"
CLASSIFY = ("/v1/classify", "/classify")
SCORE = ("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
"""Routes that score pairs of texts, of rerankers and of embedding models."""

POOLING = (EMBEDDINGS, *CLASSIFY, *SCORE)
"""Routes of models that return one result for each prompt, and no text: embeddings, classes and scores."""

SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")

OPENAI = (*GENERATION, *POOLING, *SPEECH)
"""All these routes but `TOKENIZING`. Other routes stay closed: a new vLLM may add routes that administer the
engine."""

MOVED = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize", "/v1/classify": "/classify"}
"""Routes that clients expect under `/v1/`, and their paths in vLLM."""

TOKENIZING = ("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize")
"""Routes that all models in vLLM serve."""

SAME = {"/classify", "/v2/rerank", "/rerank", "/score"}
"""Aliases of routes; messages leave them out."""


def listed(paths: Collection[str]) -> str:
    """Return routes as a message lists them, without aliases.

    Args:
        paths: The routes, by any of their names.
    """
    names = [path for path in (GENERATE, *OPENAI) if MOVED.get(path, path) in paths and path not in SAME]
    *most, last = names or ["/tokenize"]
    return f"{', '.join(most)} and {last}" if most else last


def named(path: str) -> str:
    """Return a route as messages name it.

    Args:
        path: The route, as a client or vLLM names it.
    """
    return next((name for name, moved in MOVED.items() if moved == path), path)


def unserved(model: str, path: str, served: Collection[str]) -> RequestError:
    """Return the error for a request of a route that a model in vLLM doesn't serve.

    Args:
        model: Id of the model.
        path: The route, as vLLM names it.
        served: Routes that the model serves, as vLLM names them.
    """
    message = f"model: {model!r} serves {listed(served)}, not {named(path)}"
    return RequestError(400, "invalid_request_error", message, param="model")
