"""The engines, as the batches use them."""

from collections.abc import Collection
from typing import NamedTuple, Protocol

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.batches.engine_load import EngineLoad


class Answer(NamedTuple):
    """The answer to a row.

    Attributes:
        status: HTTP status.
        body: Body, in the shape of OpenAI's API.
        retry_after_s: Seconds after which another try is likely to succeed.
        final: Another try is of no use, although the status suggests one.
    """

    status: int
    body: JSON
    retry_after_s: float | None = None
    final: bool = False


class QuotaError(RequestError):
    """A quota of a row's tenant or key is used up. It says nothing about the room at the engines."""


class Client(Protocol):
    """A way to the engines."""

    async def send(
        self, endpoint: str, body: JSON, scheduling: Scheduling, models: Collection[str] | None
    ) -> Answer:
        """Send a row and return its answer.

        Args:
            endpoint: The route, such as `/v1/chat/completions`.
            body: The body of the request.
            scheduling: Its tier, its tenant, and the tenant's weight.
            models: Ids of the models that its batch may use; None: all.

        Raises:
            QuotaError: Its tenant or key has no quota for it now.
            RequestError: The same as an answer with its status.
            Exception: The engine couldn't be reached.
        """

    async def refresh(self) -> None:
        """Learn which adapters are served now."""

    def base_of(self, model: str) -> str | None:
        """Return the model whose engines run a model or an adapter; None: it isn't served now."""

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of the engines of a model.

        Args:
            base: The model; None: all engines that had rows since the last such call.

        Returns:
            Their load; None: it isn't known.
        """
