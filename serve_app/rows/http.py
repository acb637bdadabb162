"""A service over HTTP: sends rows, and interprets the answers."""

from contextlib import suppress
from typing import Self

import httpx

from serve_app.api.errors import RequestError
from serve_app.api.headers import KEEP_ALIVE
from serve_app.client import AsyncClient, ServiceError, error_of, json_of, retry_after_s
from serve_app.rows.errors import RunError
from serve_app.rows.rows import RowAnswer, RowRequest
from serve_app.stats import ReplicaStats

STATS_TIMEOUT_S = 10.0

TIMEOUT = httpx.Timeout(connect=60.0, read=600.0, write=30.0, pool=None)

HEADERS = {"content-type": "application/json", KEEP_ALIVE: "1"}
"""With `KEEP_ALIVE` the service sends bytes while a call waits: the read timeout bounds its silence only."""


class HTTPClient:
    """A service behind a URL.

    Args:
        url: Base URL of the service; `/v1` at its end is left out.
        model: Model whose statistics are read; None: the first model.
        api_key: Sent as a bearer token.
        timeout: Seconds to connect, read and write. A call that waits or runs gets a byte every 5 s.
        transport: Another transport, for tests.

    Raises:
        RunError: The URL isn't the URL of a service.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: httpx.Timeout = TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        try:
            self._client = AsyncClient(url, api_key, timeout=timeout, transport=transport)
        except ServiceError as error:
            raise RunError(f"--url {error.message}") from None
        self.url = self._client.url
        self._model = model

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a row and return its answer. The service itself counts the engines that a request loses."""
        try:
            response = await self._client.request(
                "POST", request.endpoint, content=request.text, headers=HEADERS
            )
        except httpx.HTTPError as error:
            return _failed(503, self._client.unreachable(error).message)
        return answer_of(response)

    async def replicas(self) -> list[ReplicaStats] | None:
        """Return the statistics of the model's replicas; None if unavailable."""
        with suppress(ServiceError):
            stats = await self._client.stats(timeout=STATS_TIMEOUT_S)
            model = stats.model_or_base(self._model)
            if model is not None and not model.error:
                return model.replicas
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def answer_of(response: httpx.Response) -> RowAnswer:
    """Return a response as the answer to a row: the service's answer, or an error in the service's form."""
    status = response.status_code
    # A row may be sent again after a 408: it has no deadline of its own.
    final = status >= 500 and response.headers.get("x-should-retry") == "false"
    if status == 200:
        body = json_of(response)
        if body is None:
            return _failed(502, f"{response.url}: the answer is no JSON object")
        if not (error := body.get("error")):
            return RowAnswer(200, body)
        # The call failed after its answer had begun.
        code = error.get("code") if isinstance(error, dict) else None
        if not isinstance(code, int) or not 400 <= code < 600:
            return _failed(502, f"{response.url}: the answer is an error of another form: {error!r:.200}")
        return RowAnswer(code, body, final=error.get("should_retry") is False)
    retry_after = retry_after_s(response)
    if error := error_of(response):
        return RowAnswer(status, {"error": error}, retry_after, final)
    text = response.text.strip()[:200]
    message = f"{response.url}: {status} {response.reason_phrase}: {text}"
    # Ray Serve's proxy answers 404 in its own words while the application isn't deployed yet.
    return _failed(503 if status == 404 else status, message)._replace(retry_after_s=retry_after)


def _failed(status: int, message: str) -> RowAnswer:
    return RowAnswer.of(RequestError(status, "service_unavailable", message))
