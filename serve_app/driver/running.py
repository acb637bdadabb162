"""A run: sends the chunks of a dataset concurrently and yields finished rows."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Literal

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import ServiceTier
from serve_app.dataset.errors import DriverError
from serve_app.dataset.formats import numbered
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.readers import open_source
from serve_app.driver.chunks import Chunk, chunked
from serve_app.driver.clients import Client
from serve_app.driver.run_stats import RunStats
from serve_app.driver.sending import Sender, StoppedError
from serve_app.jobs.pacing import Auto, Backoff, Concurrency, Fixed


class Run:
    """One pass over a dataset.

    Args:
        client: The service.
        body: Fields of every call, without the prompts: sampling, model, service tier.
        chat: Whether prompts are lists of messages.
        concurrency: Limit on concurrent calls.
        retries: Most retries of a call.
        backoff: Waits between retries.

    Attributes:
        stats: Statistics of the run.
        concurrency: Limit on concurrent calls.
        asleep: Whether the model has no replica, as of the last statistics.
        reading: Whether a thread reads the input now; it may do so after the end, if the input is silent.
    """

    def __init__(
        self,
        client: Client,
        body: JSON,
        *,
        chat: bool = False,
        concurrency: Concurrency | None = None,
        retries: int = 20,
        backoff: Backoff | None = None,
    ) -> None:
        self.stats = RunStats()
        self.concurrency = concurrency or Fixed(10)
        self.asleep = False
        self.reading = False
        self._client = client
        self._stopping = asyncio.Event()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._sender = Sender(
            client,
            body,
            chat=chat,
            retries=retries,
            backoff=backoff or Backoff(),
            concurrency=self.concurrency,
            stats=self.stats,
            stopping=self._stopping,
        )

    def stop(self) -> None:
        """Send no more calls; calls in flight are finished."""
        self._stopping.set()

    async def results(self, chunks: Iterator[Chunk]) -> AsyncGenerator[list[JSON], None]:
        """Yield the output rows of each chunk, in the order in which chunks finish.

        Raises:
            DriverError: No row could be served, or the input can't be read.
        """
        polling = asyncio.create_task(self._poll())
        stopped = asyncio.create_task(self._stopping.wait())
        # One chunk is read ahead, so that a slow disk or bucket doesn't delay sending.
        reading = self._read(chunks)
        sending: set[asyncio.Task[list[JSON]]] = set()
        more = True
        failure: DriverError | None = None
        try:
            await self._read_stats()
            while True:
                while (
                    more
                    and reading.done()
                    and len(sending) < self.concurrency.limit
                    and not self._stopping.is_set()
                ):
                    if (chunk := reading.result()) is None:
                        more = False
                    else:
                        sending.add(asyncio.create_task(self._sender.send(chunk)))
                        reading = self._read(chunks)
                awaited: set[asyncio.Future[Any]] = set(sending)
                if not self._stopping.is_set():
                    awaited.add(stopped)
                    if more and len(sending) < self.concurrency.limit:
                        awaited.add(reading)
                    elif not sending:
                        break
                elif not sending:
                    break
                # The timeout is for a limit that grows while no call ends.
                interval_s = self.concurrency.interval_s
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED, timeout=interval_s)
                for sent in [task for task in sending if task.done()]:
                    sending.remove(sent)
                    try:
                        rows = sent.result()
                    except StoppedError:
                        continue
                    except DriverError as error:
                        # Other calls in flight are finished first: they may have been served.
                        failure = failure or error
                        self.stop()
                        continue
                    for row in rows:
                        self.stats.totals.add(row)
                    yield rows
            self.stats.end()
            if failure:
                raise failure
            await self._read_stats()
        finally:
            tasks: list[asyncio.Future[Any]] = [polling, stopped, reading, *sending]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # The thread may be blocked by a pipe without input.
            self._reader.shutdown(wait=False)

    def _read(self, chunks: Iterator[Chunk]) -> "asyncio.Future[Chunk | None]":
        return asyncio.get_running_loop().run_in_executor(self._reader, self._next, chunks)

    def _next(self, chunks: Iterator[Chunk]) -> Chunk | None:
        self.reading = True
        try:
            return next(chunks, None)
        finally:
            self.reading = False

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self.concurrency.interval_s)
            await self._read_stats()

    async def _read_stats(self) -> None:
        replicas = await self._client.replicas()
        if replicas is not None:
            self.asleep = not replicas
            self.stats.utilization.update(replicas)
        self.concurrency.observe(self.stats.utilization.load if replicas else None, self.stats.in_flight)


async def run(
    dataset: str | Iterable[Mapping[str, Any] | str],
    client: Client,
    *,
    prompts: Prompter | None = None,
    sampling: Mapping[str, Any] | None = None,
    model: str | None = None,
    service_tier: ServiceTier = "flex",
    chunk_size: int = 50,
    max_concurrency: int | Literal["auto"] = 10,
    retries: int = 20,
    id_column: str = "id",
    limit: int | None = None,
) -> AsyncIterator[JSON]:
    """Send a dataset through a service and yield an output row for each of its rows.

    Rows are yielded in the order in which they finish; `row` is the number of the input row.

    Args:
        dataset: Rows as mappings or as bare prompts, or an input as on the command line: a path, a pattern,
            a URI.
        client: The service.
        prompts: Makes prompts from rows; by default the column `prompt` is the prompt.
        sampling: Sampling fields of `/generate`.
        model: Id of the model; may be left out where only one is served.
        service_tier: Tier of the calls; "flex" goes behind live traffic.
        chunk_size: Rows in one call.
        max_concurrency: Concurrent calls; "auto" adapts to the service.
        retries: Most retries of a call.
        id_column: Column of a row's id.
        limit: Number of rows to take, from the beginning.

    Raises:
        DriverError: No row could be served, or the input can't be read.
    """
    prompter = prompts or Prompter()
    rows = numbered(open_source(dataset).values() if isinstance(dataset, str) else map(_columns, dataset))
    concurrency = Auto(records=chunk_size) if max_concurrency == "auto" else Fixed(max_concurrency)
    body = call_body(sampling or {}, model, service_tier)
    dataset_run = Run(client, body, chat=prompter.chat, concurrency=concurrency, retries=retries)
    chunks = chunked(rows, prompter, chunk_size, id_column=id_column, limit=limit)
    async with aclosing(dataset_run.results(chunks)) as results:
        async for done in results:
            for row in done:
                yield row


def call_body(sampling: Mapping[str, Any], model: str | None, service_tier: ServiceTier) -> JSON:
    """Return the fields of every call of a run, without the prompts."""
    named = {} if model is None else {"model": model}
    return {**sampling, **named, "service_tier": service_tier}


def _columns(row: Mapping[str, Any] | str) -> JSON:
    return {"prompt": row} if isinstance(row, str) else dict(row)
