"""Errors of a request, as its caller gets them."""

import logging
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from serve_app.api.headers import request_id

logger = logging.getLogger("ray.serve")

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "processing_error",
    "overloaded_error",
    "service_unavailable",
    "internal_error",
]


FAULT = "request %s to %s failed by a fault of the service"
"""Log message about a request that gets a 500, with its id and its route."""

ANTHROPIC = "/v1/messages"
"""Beginning of the routes of Anthropic's API."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class EngineLostError(Exception):
    """The engine died while it had the request."""

    def __str__(self) -> str:
        return "its engine has died"


class RequestError(Exception):
    """A request that can't be served, with the details that its caller needs to correct it.

    Args:
        status: The HTTP status.
        type: The kind of error, for programs.
        message: A sentence for people.
        param: The field that is wrong.
        retry_after_s: Seconds after which another try is likely to succeed.
        final: A retry of the same request is useless, although the status suggests a retry.
        code: OpenAI's code of the error, by which clients recognise it; None: the status.
    """

    def __init__(
        self,
        status: int,
        type: ErrorType,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        final: bool = False,
        code: str | None = None,
    ) -> None:
        super().__init__(status, type, message, param, retry_after_s, final, code)
        self.status = status
        self.type = type
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.final = final
        self.code = code

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args

    def at(self, param: str) -> "RequestError":
        """Return the same error, attributed to the part of the request that `param` names."""
        message = f"{param}: {self.message}"
        return _rebuild(self.status, self.type, message, param, self.retry_after_s, self.final, self.code)

    def body(self) -> dict[str, Any]:
        """Return the error as JSON in the shape of OpenAI's API."""
        code = self.code or self.status
        error = {"message": self.message, "type": self.type, "param": self.param, "code": code}
        if self.final:
            # Once an answer has begun, a header is too late.
            error["should_retry"] = False
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error as JSON in the shape of Anthropic's API."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        type = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": type, "message": self.message}}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that go with the error."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.final or self.status == 408:
            # OpenAI's and Anthropic's clients would retry otherwise; after a 408 the request's time is over.
            return {"x-should-retry": "false"}
        if self.retry_after_s is None:
            return {}
        # The header has whole seconds; rounding down would send clients back too early.
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class EngineAwayError(RequestError):
    """The engine that has the request can't serve it; another engine may.

    Args:
        message: A sentence for people.
        retry_after_s: Seconds after which another try is likely to succeed.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(503, "service_unavailable", message, retry_after_s=retry_after_s)


def _rebuild(
    status: int,
    type: ErrorType,
    message: str,
    param: str | None,
    retry_after_s: float | None,
    final: bool,
    code: str | None = None,
) -> RequestError:
    return RequestError(
        status, type, message, param=param, retry_after_s=retry_after_s, final=final, code=code
    )


_TYPES: dict[int, ErrorType] = {
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "service_unavailable",
}


def type_of(status: int) -> ErrorType:
    """Return the type of an error that is known by its status alone."""
    return _TYPES.get(status, "internal_error" if status >= 500 else "invalid_request_error")


_OVERFLOW = re.compile(
    r"maximum context length|prompt length \d+ exceeds the max_model_len|maximum model length of"
)
"""Words of vLLM about a prompt that is too long."""

CONTEXT = "maximum context length"
"""Words by which clients take an error for such a prompt."""


def vllm_error(status: int, message: str, param: str | None = None) -> RequestError:
    """Return an error of vLLM's application in the words of this service.

    Args:
        status: The HTTP status.
        message: vLLM's reason.
        param: The field that vLLM names.
    """
    if status >= 500 or not _OVERFLOW.search(message):
        return RequestError(status, type_of(status), message, param=param)
    if CONTEXT not in message:
        message = f"This model's {CONTEXT} is exceeded. {message}"
    # vLLM has names here that are no fields, such as `input_tokens`.
    return RequestError(status, type_of(status), message, code="context_length_exceeded")


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """Return an error as JSON, in the shape of the API that a route belongs to."""
    return error.anthropic_body() if path.startswith(ANTHROPIC) else error.body()


def error_response(error: RequestError, path: str) -> JSONResponse:
    """Return an error as an HTTP response, in the shape of the API that a route belongs to."""
    return JSONResponse(error_body(error, path), error.status, error.headers())


def path_of(scope: Scope) -> str:
    """Return the path of a request below the prefix at which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error, path_of(request.scope))


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = RequestError(error.status_code, type_of(error.status_code), message)
    response = error_response(refusal, path_of(request.scope))
    response.headers.update(error.headers or {})
    return response


async def fault_response(request: Request, error: Exception) -> Response:
    """Log a fault of the service with its stack; return its answer."""
    path = path_of(request.scope)
    logger.error(FAULT, request_id(request.scope["headers"]), path, exc_info=error)
    return error_response(internal_error(error), path)


EXCEPTION_HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    RequestError: _refuse,
    HTTPException: _refuse_http,
    Exception: fault_response,
}
"""Handlers of a Starlette application: errors have the shape of the route's API; faults are logged."""


def internal_error(error: BaseException) -> RequestError:
    """Return the error for a client whose request met a fault of the service; the caller logs the stack.

    The message has only the type of the exception: its text may be about the server, or quote another
    request.
    """
    message = f"The service failed on this request ({type(error).__name__}); its log has the stack."
    return RequestError(500, "internal_error", message)


def engine_failed() -> RequestError:
    """Return the error for a client whose Engine died with its request."""
    return EngineAwayError("The engine that had this request failed. Try again.")
