"""Ray Data stage that sends batches of rows to an Engine, one call per batch."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from serve_app.api.pacing import Backoff, Fixed
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import ServiceTier
from serve_app.driver.chunks import chunked
from serve_app.driver.clients import HandleClient
from serve_app.driver.parquet import result_columns
from serve_app.driver.prompts import Prompter
from serve_app.driver.rows import numbered
from serve_app.driver.run_stats import RunStats
from serve_app.driver.running import call_body
from serve_app.driver.sending import Sender


class Generate:
    """A class for `map_batches`; each batch is one call over the Engine's handle.

    One actor sends many batches concurrently; use it with `batch_format="pyarrow"`, `concurrency=1` and
    `max_concurrency` as the number of concurrent calls. A batch comes back with its own columns and `result`,
    `finish_reason`, `prompt_tokens`, `completion_tokens`, `attempts` and `error`: a row that can't be served
    has an error with a type and a message, and the others of its batch are served.

    Args:
        app: The Serve application.
        model: The model's id.
        prompts: Arguments of `Prompter`; by default the column `prompt` is the prompt.
        sampling: Sampling fields of `/generate`.
        service_tier: Tier of the calls; "flex" goes behind live traffic.
        retries: Most retries of a call.

    Raises:
        DriverError: There is no such Engine. While a batch is sent: the service is gone or refuses it.
    """

    def __init__(
        self,
        app: str,
        model: str,
        prompts: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        service_tier: ServiceTier = "flex",
        retries: int = 20,
    ) -> None:
        self._prompter = Prompter(**(prompts or {}))
        self._sender = Sender(
            HandleClient(app, model),
            call_body(sampling or {}, None, service_tier),
            chat=self._prompter.chat,
            retries=retries,
            backoff=Backoff(),
            concurrency=Fixed(1),
            stats=RunStats(),
            stopping=asyncio.Event(),
        )

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Yield the batch as an Arrow table, with the columns of the results."""
        import pyarrow as pa

        rows: list[JSON] = batch.to_pylist()
        for chunk in chunked(numbered(iter(rows)), self._prompter, max(1, len(rows))):
            done = await self._sender.send(chunk)
            for name, kind in result_columns():
                batch = batch.append_column(name, pa.array([row[name] for row in done], kind))
        yield batch
