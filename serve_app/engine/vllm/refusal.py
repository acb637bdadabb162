"""Exceptions in vLLM's application: whose fault they are, and what the client gets.

The imports are those of vLLM 0.32.
"""

import json
import logging
import traceback
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from fastapi._compat import ModelField
from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMServerError,
    VLLMValidationError,
)
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.api.errors import CONTEXT, EngineAwayError, RequestError, internal_error, vllm_error
from serve_app.api.facts import PROMPT_LISTS
from serve_app.engine.job import Job, current
from serve_app.engine.vllm.workarounds import make_error_responses

OWN = {"serve_app", "batcher"}
"""Packages whose exceptions are never the request's fault."""

BLAMED = (ValueError, TypeError, OverflowError, NotImplementedError, TemplateError)
"""Exceptions without a class of vLLM's that its application takes for the request's fault."""

OF_REQUESTS = (VLLMClientError, GracefulHTTPError, EngineGenerateError)
"""Classes of vLLM's for mistakes of a request, whenever they are found."""

VALIDATES = (ModelField.__module__, "validate")
"""Module and function that validate the body of a request."""

EXAMINES = {("vllm.v1.engine.input_processor", "process_inputs"), ("vllm.v1.serial_utils", "encode")}
"""Modules that read a request and pack it for the engine; they see nothing but the request."""

EMPTY = "prompt cannot be empty"
"""Words of vLLM's error about a text without tokens; it doesn't say which text of a list."""

STARTED = "response already started"
"""Words of Starlette's error about an exception behind the head of an answer."""


def is_fault(error: BaseException) -> bool:
    """Return whether an exception in vLLM's application is the service's fault, and not the request's.

    vLLM's own classes say it. An exception of another class counts as the request's where vLLM takes it so
    and it was raised in vLLM's code, or in a library that vLLM called; and where it was raised while the body
    was validated, since a validator looks at nothing else.
    """
    if isinstance(error, VLLMClientError | GracefulHTTPError):
        return False
    if isinstance(error, EngineGenerateError) and isinstance(error.__cause__, BLAMED):
        return not _frames(error.__cause__) & EXAMINES
    if isinstance(error, VLLMServerError):
        return True
    nearest = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in OWN or package == "vllm":
            nearest = package
    return nearest in OWN or not (isinstance(error, BLAMED) or VALIDATES in _frames(error))


def _frames(error: BaseException) -> set[tuple[str, str]]:
    """Return the module and the function of each frame of an exception."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return {(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames}


def answer_faults() -> None:
    """Have vLLM's application answer each exception by whose fault it is: 500 for one of the service.

    The current job gets what was found; a stream whose head has not left becomes an error of that status.
    """
    make_error_responses(_honest)


def _honest(original: Callable[..., ErrorResponse]) -> Callable[..., ErrorResponse]:
    def create(message: str | Exception, *more: Any, **options: Any) -> ErrorResponse:
        if not isinstance(message, Exception):
            return original(message, *more, **options)
        error = _cause(message)
        response = original(error, *more, **options)
        failure = _failure(error, response)
        if failure is None or failure.status == response.error.code < 500:
            return response
        kind = "InternalServerError" if failure.status >= 500 else "BadRequestError"
        return original(failure.message, kind, HTTPStatus(failure.status))

    return create


def _cause(error: Exception) -> Exception:
    """Return what an exception that wraps another one, and tells nothing of it, is about."""
    cause = error.__cause__
    if isinstance(cause, Exception):
        if type(error) is RuntimeError and STARTED in str(error):
            return _cause(cause)
        if isinstance(error, EngineGenerateError) and not is_fault(error):
            return cause
    return error


def _failure(error: Exception, response: ErrorResponse) -> RequestError | None:
    """Note an exception in the current job; return what its client gets.

    Returns:
        None for an engine that has died: its job is answered elsewhere.
    """
    if isinstance(error, EngineDeadError) or (job := current()) is None:
        return None
    if job.failure is not None:
        return job.failure
    if isinstance(error, RetryableRequestError):
        failure: RequestError = EngineAwayError(str(error))
    elif isinstance(error, GenerationError) and job.constrained:
        # Grammars that vLLM can't compile are refused before.
        message = "The grammar of this request leaves no way on behind the text so far, and vLLM gave up."
        failure = RequestError(400, "invalid_request_error", message)
    elif is_fault(error) or (job.usage.ran and not isinstance(error, OF_REQUESTS)):
        # An answer that can't be made of the engine's output is no mistake of the request either.
        failure = internal_error(error.__cause__ or error)
        job.fault = job.fault or error
    else:
        status = response.error.code if response.error.code < 500 else HTTPStatus.BAD_REQUEST.value
        reason, param = _reason(error, response, job), response.error.param
        if EMPTY in reason and (param := _empty_text(job.request.body)):
            reason = f"{param}: the text is empty"
        failure = vllm_error(status, reason, param)
    job.failure = failure
    return failure


def _reason(error: Exception, response: ErrorResponse, job: Job) -> str:
    """Return vLLM's reason for a refusal, as a sentence."""
    if isinstance(error, ValidationError):
        # vLLM has made a request of another one; the places are those in the other one.
        item = error.errors(include_url=False)[0]
        return ": ".join([*map(str, item["loc"][-1:]), item["msg"]])
    filled = getattr(error, "parameter", None) == "max_tokens" and getattr(error, "value", None) == 0
    if filled and job.facts.output != 1:
        # The request states no length, and vLLM has computed the rest of the context.
        return f"The prompt fills this model's {CONTEXT}, and no token is left for an answer; shorten it"
    return reason_of(error, response.error.message)


def _empty_text(body: bytes) -> str | None:
    """Return the path of the first empty text in the lists of a body; None: there is none."""
    with suppress(ValueError):
        fields = json.loads(body)
        for name in PROMPT_LISTS:
            if isinstance(items := fields.get(name), list):
                for index, item in enumerate(items):
                    if item in ("", []):
                        return f"{name}[{index}]"
    return None


def reason_of(error: Exception, text: str | None = None) -> str:
    """Return the text of an exception, without the parameter that vLLM writes behind it.

    Args:
        error: The exception.
        text: Its text, if that is known.
    """
    text = str(error) if text is None else text
    behind = isinstance(error, VLLMValidationError) and error.parameter is not None
    return text.rpartition(" (parameter=")[0] if behind else text


def hide_refusals() -> None:
    """Keep vLLM from logging a stack trace of a refusal or a client's mistake: it does in each stream."""

    def shown(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or is_fault(error)

    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(shown)
