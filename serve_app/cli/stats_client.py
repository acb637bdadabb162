"""Client of a service's statistics: `GET /stats` and `GET /health`."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import click
import httpx

from serve_app.api.protocol import JSON
from serve_app.client import base_url

CONNECT_S, ANSWER_S = 5.0, 10.0
"""Seconds to get a connection, and to get an answer: replicas have 5 s for theirs."""

KEY_HELP = "name the environment variable that holds your API key: --api-key-env NAME"


class StatsError(click.ClickException):
    """The statistics can't be had; the message tells the user the reason."""


@dataclass(frozen=True, slots=True)
class Poll:
    """The statistics of a service at one time.

    Attributes:
        at: Time of the answer, in seconds on the client's clock.
        time: Time of day.
        stats: The body of `/stats`.
        health: The body of `/health`; empty: it couldn't be read.
    """

    at: float
    time: datetime
    stats: JSON
    health: JSON


class StatsClient:
    """A service behind a URL.

    Args:
        url: Address of the service, with or without `/v1`.
        api_key: Sent as a bearer token.
        clock: Monotonic clock, in seconds.
        transport: Another transport, for tests.

    Raises:
        StatsError: The URL is wrong.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        try:
            self.url = base_url(url)
        except ValueError as error:
            raise StatsError(str(error)) from None
        self._clock = clock
        # /stats is a page for a browser, and JSON for what asks for JSON.
        headers = {"accept": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        self._http = httpx.Client(headers=headers, timeout=timeout, transport=transport)

    def poll(self) -> Poll:
        """Return the statistics now.

        Raises:
            StatsError: There is no service, it isn't saturate, or it refuses the key.
        """
        response = self._get("/stats")
        if response.status_code != 200:
            raise StatsError(f"{self.url}: {_refusal(response)}")
        try:
            stats: JSON = response.json()
            if not all(isinstance(report["replicas"], list) for report in stats["models"].values()):
                raise TypeError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StatsError(f"{self.url}: {_foreign('an answer without the statistics')}") from None
        return Poll(self._clock(), datetime.now(UTC), stats, self._health())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(f"{self.url}{path}")
        except httpx.ConnectError as error:
            raise StatsError(
                f"{self.url}: no service is there ({error}); `saturate serve` starts one, and "
                "`saturate top URL` looks at another address"
            ) from None
        except httpx.TimeoutException:
            raise StatsError(f"{self.url}: no answer within {ANSWER_S:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            # A connection that breaks has no message.
            raise StatsError(f"{self.url}: {str(error) or type(error).__name__}") from None

    def _health(self) -> JSON:
        """Return the health of the models; a picture without it lacks little."""
        with suppress(StatsError, ValueError):
            # A service that starts answers 503, with a report.
            report = self._get("/health").json()
            if isinstance(report, dict) and isinstance(report.get("models"), dict):
                return report
        return {}


def _refusal(response: httpx.Response) -> str:
    """Return the reason of an answer other than 200."""
    status = response.status_code
    message = ""
    with suppress(ValueError, KeyError, TypeError):
        message = str(response.json()["error"]["message"])
    if status in {401, 403}:
        return f"the service answers {status} ({message or response.reason_phrase}); {KEY_HELP}"
    if message or status >= 500:
        return f"the service answers {status} ({message or response.reason_phrase})"
    return _foreign(f"{status} {response.reason_phrase}")


def _foreign(answer: str) -> str:
    return (
        f"something answers there, but not as saturate does (GET /stats: {answer}); check the port and the "
        "route_prefix, or wait if the service only just starts"
    )
