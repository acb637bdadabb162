"""Errors of a request, as its caller gets them."""

import math
from typing import Any, Literal

from starlette.responses import JSONResponse

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


class RequestError(Exception):
    """A request that can't be served, with what its caller needs to correct it.

    Args:
        status: The HTTP status.
        type: The kind of error, for programs.
        message: A sentence for people.
        param: The field that is wrong.
        retry_after_s: Seconds after which another try is likely to succeed.
    """

    def __init__(
        self,
        status: int,
        type: ErrorType,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status, type, message, param, retry_after_s)
        self.status = status
        self.type = type
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args

    def at(self, param: str) -> "RequestError":
        """Return the same error, attributed to the part of the request that `param` names."""
        message = f"{param}: {self.message}"
        return RequestError(self.status, self.type, message, param=param, retry_after_s=self.retry_after_s)

    def body(self) -> dict[str, Any]:
        """Return the error as JSON in the shape of OpenAI's API."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.status,
            }
        }

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that go with the error."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        # The header has whole seconds; rounding down would send clients back too early.
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


def _rebuild(
    status: int, type: ErrorType, message: str, param: str | None, retry_after_s: float | None
) -> RequestError:
    return RequestError(status, type, message, param=param, retry_after_s=retry_after_s)


def error_response(error: RequestError) -> JSONResponse:
    """Return an error as an HTTP response."""
    return JSONResponse(error.body(), error.status, error.headers())


def engine_failed() -> RequestError:
    """Return the error for a client whose Engine died with its request."""
    message = "The engine that had this request failed. Try again."
    return RequestError(503, "service_unavailable", message, retry_after_s=1.0)
