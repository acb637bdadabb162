"""Requests and responses of OpenAI's `/v1/embeddings`."""

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON, check_count, parse_body
from serve_app.api.scheduling import ServiceTier


def _texts(value: object) -> object:
    if isinstance(value, list) and value and isinstance(value[0], int | list):
        message = "a function takes texts, not lists of tokens; send text"
        raise ValueError(f"{message} (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)")
    return [value] if isinstance(value, str) else value


class EmbeddingRequest(BaseModel):
    """The body of `POST /v1/embeddings`.

    Attributes:
        input: One text or several.
        model: Which model answers.
        encoding_format: Form of a vector: numbers, or base64 of little-endian float32.
        dimensions: Length of the vectors; only the model's own is possible.
        user: OpenAI's field; not used.
        service_tier: Read before; see `serve_app.api.scheduling`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_texts)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(strict=True, ge=1)] | None = None
    user: str | None = None
    service_tier: ServiceTier | None = None


def parse_embedding(body: bytes | JSON, *, max_texts: int) -> EmbeddingRequest:
    """Check the body of a `/v1/embeddings` call.

    Args:
        body: JSON text, or the parsed object.
        max_texts: Maximum texts that one call may carry.

    Raises:
        RequestError: 400 that names the field and the expected form.
    """
    request = parse_body(EmbeddingRequest, body)
    check_count("input", len(request.input), max_texts)
    return request


def embedding_response(
    request: EmbeddingRequest, model: str, vectors: Sequence[Sequence[float]], tokens: int
) -> JSON:
    """Return the answer to a request; its `data` is an iterator, since thousands of vectors take a while.

    Args:
        request: The request.
        model: The model's id.
        vectors: One per text, in the order of the texts.
        tokens: Cost of the texts.

    Raises:
        RequestError: 400, the vectors don't have the requested length; 500, the results are not vectors. The
            iterator raises the 500 too.
    """
    try:
        length = len(vectors[0])
    except TypeError as error:
        raise _no_vector(error) from error
    if request.dimensions not in (None, length):
        message = f"dimensions: this model's vectors have {length}, not {request.dimensions}"
        raise RequestError(400, "invalid_request_error", message, param="dimensions")
    write = _base64 if request.encoding_format == "base64" else _plain
    return {
        "object": "list",
        "data": (
            {"object": "embedding", "index": index, "embedding": write(vector)}
            for index, vector in enumerate(vectors)
        ),
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _plain(vector: Sequence[float]) -> Any:
    return vector


def _base64(vector: Sequence[float]) -> str:
    try:
        numbers = array("f", vector)
    except TypeError as error:
        raise _no_vector(error) from error
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


def _no_vector(error: TypeError) -> RequestError:
    return RequestError(500, "internal_error", f"The model's results are not vectors of numbers: {error}")
