"""Base of the routes of files and of batches."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from serve_app.api.errors import RequestError, error_response
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.batches.content import Contents
from serve_app.batches.errors import DatabaseError, FencedError
from serve_app.batches.files import delete_contents
from serve_app.batches.limits import Limits
from serve_app.batches.pacing import Clock
from serve_app.batches.store import Store

logger = logging.getLogger("ray.serve")

Handler = Callable[[Request], Awaitable[Response]]
P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
"""Calls of the store and of the contents at once."""

NUMBER = re.compile(r"[0-9]{1,9}")


def _threads() -> ThreadPoolExecutor:
    # Threads of their own: those of the loop may be busy with the input and the end of large batches.
    return ThreadPoolExecutor(THREADS, thread_name_prefix="batches-api")


@dataclass(frozen=True, slots=True)
class RouteContext:
    """State, contents and callers, as the routes use them.

    Attributes:
        store: The state.
        content: The contents.
        limits: Returns the limits on the files and batches of an API key, by its name.
        rights: Returns the rights of the batches that an API key creates, by its name.
        scheduling: Returns the tenant of a request, who sees its own files and batches only, and its weight.
        clock: Seconds since the epoch.
    """

    store: Store
    content: Contents
    limits: Callable[[str], Limits]
    rights: Callable[[str], JSON]
    scheduling: Callable[[Request], Scheduling]
    clock: Clock
    _pool: ThreadPoolExecutor = field(init=False, default_factory=_threads)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads of the routes."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request."""
        return self.scheduling(request).tenant

    def delete(self, ids: list[str]) -> None:
        """Delete contents whose files are deleted already, so that no error is the client's."""
        try:
            delete_contents(self.store, self.content, ids)
        except (OSError, DatabaseError, FencedError) as error:
            logger.error("contents can't be deleted before the next start: %s", error)


def route(method: str, path: str, handler: Handler) -> Route:
    """Return a route whose errors are answers."""

    async def answer(request: Request) -> Response:
        try:
            if any("\0" in text for text in (*request.path_params.values(), *request.query_params.values())):
                # PostgreSQL refuses it, which would look like a database that fails.
                raise bad_request("The path and the query must not have a NUL")
            return await handler(request)
        except RequestError as error:
            failed = error
        except (OSError, DatabaseError) as error:
            logger.error("%s %s: %s", request.method, request.url.path, error)
            message = "The service's disk or database fails. Try again later."
            failed = RequestError(503, "service_unavailable", message)
        except FencedError as error:
            logger.error("%s %s: %s", request.method, request.url.path, error)
            message = "Another replica of the service has taken over the batches. Try again."
            failed = RequestError(503, "service_unavailable", message)
        return error_response(failed, request.url.path)

    return Route(path, answer, methods=[method])


def page_limit(request: Request, usual: int, most: int) -> int:
    """Return the query parameter `limit`: a number from 1 to `most`; `usual` where it is missing."""
    text = request.query_params.get("limit", str(usual))
    limit = int(text) if NUMBER.fullmatch(text) else 0
    if not 1 <= limit <= most:
        raise bad_request(f"limit: must be a number from 1 to {most}", "limit")
    return limit


def new_file_id() -> str:
    """Return the id of a new file."""
    return f"file-{uuid4().hex}"


def no_file(id: str) -> RequestError:
    """Return the error for a file that the tenant hasn't."""
    return RequestError(404, "not_found_error", f"There is no file {id!r}", param="id")


def conflict(message: str) -> RequestError:
    """Return the error for a change that the state of a file or batch doesn't allow."""
    # OpenAI's clients would send it again otherwise.
    return RequestError(409, "invalid_request_error", message, param="id", final=True)


def bad_request(message: str, param: str | None = None) -> RequestError:
    """Return the error for a wrong field."""
    return RequestError(400, "invalid_request_error", message, param=param)
