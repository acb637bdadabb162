"""Routes of `/v1/files` and `/v1/batches`."""

import time
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.routing import Route

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling, SchedulingFields, scheduling_of
from serve_app.batches.batch_routes import BatchRoutes, Foresee
from serve_app.batches.content import Contents
from serve_app.batches.file_routes import FileRoutes
from serve_app.batches.forecast import Outlook
from serve_app.batches.limits import Limits
from serve_app.batches.pacing import Clock
from serve_app.batches.routes import RouteContext
from serve_app.batches.store import Store


def request_scheduling(request: Request) -> Scheduling:
    """Return the scheduling of a request, as for every other route."""
    headers = request.scope["headers"]
    if (caller := request.scope.get("caller")) is not None:
        scheduling: Scheduling = caller.scheduling(headers, SchedulingFields())
        return scheduling
    return scheduling_of(headers, SchedulingFields())


class BatchAPI:
    """The routes.

    Args:
        store: The state.
        content: The contents.
        notice: Called when a batch was added or cancelled.
        limits: Returns the limits on the files and batches of an API key, by its name.
        rights: Returns the rights of the batches that an API key creates, by its name; see `KeyRules.rights`.
        scheduling: Returns the tenant of a request, who sees its own files and batches only, and its weight.
        warnings: Returns messages about batches, by id.
        foresee: Returns a new batch with what is known of it, and its outlook; see `Runner.foresee`.
        refuse: Whether a batch is refused whose window surely doesn't hold.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        content: Contents,
        notice: Callable[[], None],
        *,
        limits: Callable[[str], Limits] = lambda key: Limits(),
        rights: Callable[[str], JSON] = lambda key: {},
        scheduling: Callable[[Request], Scheduling] = request_scheduling,
        warnings: Callable[[], Mapping[str, str]] = dict,
        foresee: Foresee = lambda batch, size: (batch, Outlook("unknown")),
        refuse: bool = False,
        clock: Clock = time.time,
    ) -> None:
        context = RouteContext(store, content, limits, rights, scheduling, clock)
        self._files = FileRoutes(context)
        self._batches = BatchRoutes(context, notice, warnings, foresee, refuse)

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [*self._files.routes(), *self._batches.routes()]
