"""Ray Data stage that sends batches of rows to an Engine, one call per batch."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import from_json, to_json

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import ServiceTier
from serve_app.client import Backoff
from serve_app.dataset.errors import RowError, gave_up
from serve_app.dataset.formats import numbered
from serve_app.dataset.output import result_columns
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.run import DatasetRun, Drive, Item, call_fields, check_columns, unsent
from serve_app.dataset.stats import RunStats, split
from serve_app.rows.errors import GaveUpError, RunError
from serve_app.rows.handle import HandleClient
from serve_app.rows.pacing import EngineLoad, Fixed
from serve_app.rows.places import TakenRow
from serve_app.rows.rows import QuotaError, Result, Row, RowAnswer, RowRequest
from serve_app.rows.tries import Again, Sender


class Generate:
    """A class for `map_batches`; each batch is one call over the Engine's handle.

    One actor sends many batches concurrently; use it with `batch_format="pyarrow"`, `concurrency=1` and
    `max_concurrency` as the number of concurrent calls. A batch comes back with its own columns and `result`,
    `finish_reason`, `prompt_tokens`, `completion_tokens`, `attempts` and `error`: a row that can't be served
    has an error with a type and a message, and the other rows of its batch are served. An input that has a
    column with one of these names is refused before a row is sent.

    Args:
        app: The Serve application.
        model: The model's id.
        prompts: Arguments of `Prompter`; by default the column `prompt` is the prompt.
        sampling: Sampling fields of `/generate`.
        service_tier: Tier of the calls; "flex" goes behind live traffic.
        retries: Most retries of a row.
        columns: The columns to add, with their names in the dataset, such as `{"result": "summary"}`; by
            default all, under the names above.

    Raises:
        RunError: There is no such Engine, or a column is wrong. On a call: the service is gone or refuses the
            batch, or the batch has a column of the same name.
    """

    def __init__(
        self,
        app: str,
        model: str,
        prompts: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        service_tier: ServiceTier = "flex",
        retries: int = 20,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self._columns = _added(columns)
        self._prompter = Prompter(**(prompts or {}))
        self._client = HandleClient(app, model)
        self._sampling = sampling or {}
        self._tier: ServiceTier = service_tier
        self._retries = retries

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """Yield the batch as an Arrow table, with the columns of the results."""
        import pyarrow as pa

        if not isinstance(batch, pa.Table):
            # Other batch formats of Ray Data: pandas, or a dict of NumPy arrays.
            from ray.data.block import BlockAccessor

            batch = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
        for field, name, _ in self._columns:
            if name in batch.column_names:
                raise RunError(
                    f"the dataset has a column {name!r} already: give the new column another name, as in "
                    f'columns={{"{field}": "my_{field}"}}, or drop the column of the dataset'
                )
        found = [from_json(result.text) for result in await self._results(batch.to_pylist())]
        for field, name, kind in self._columns:
            batch = batch.append_column(name, pa.array([row[field] for row in found], kind))
        yield batch

    async def _results(self, rows: list[JSON]) -> list[Result]:
        """Return the result of each row.

        The rows are one call. If the call fails, each row is a call of its own. If the engines failed, these
        calls run one after the other, since each row may be the cause.

        Raises:
            RunError: The service is gone or refuses the rows, or no row has a prompt.
        """
        fields = call_fields(self._sampling, None)
        done: list[Result] = []
        run = DatasetRun(fields, self._prompter.chat, self._tier, done.extend, RunStats())
        items = [Item.of(row, self._prompter, "id") for row in numbered(rows)]
        check_columns(items)
        sound = [item for item in items if not isinstance(item.prompt, RowError)]
        if not sound:
            return [result for item in items if (result := unsent(item))]
        call = _Call(fields, self._prompter.chat, self._tier, done.extend, RunStats())
        sender = Sender(_Together(self._client), Fixed(1), Backoff(), self._retries, patient=False)
        prompts = to_json([item.prompt for item in sound], inf_nan_mode="null")
        taken = TakenRow(call, Row(0, prompts))
        try:
            found = await sender.try_once(taken)
            while isinstance(found, Again):
                await asyncio.sleep(found.wait_s)
                found = await sender.try_once(taken)
        except GaveUpError as error:
            raise gave_up(error) from None
        answers = split(call.answer, len(sound))
        if answers[0].status == 200:
            done += [result for item in items if (result := unsent(item))]
            for item, answer in zip(sound, answers, strict=True):
                done.append(run.result(run.row(item), answer, call.times))
            return sorted(done)
        drive = Drive(
            numbered(rows),
            self._prompter,
            self._client,
            fields,
            done.extend,
            tier=self._tier,
            concurrency=1 if answers[0].status >= 500 else len(rows),
            retries=self._retries,
            observed=False,
        )
        await drive.run()
        return sorted(done)


class _Call(DatasetRun):
    """The rows of a batch in one call.

    Attributes:
        answer: The answer to the call.
        times: Number of times that the call was sent.
    """

    answer: RowAnswer
    times: int

    def body(self, row: Row) -> bytes:
        """Return the call."""
        return self.call(row.line, row.text)

    def result(self, row: Row, answer: RowAnswer, tries: int) -> Result:
        """Keep the answer."""
        self.answer, self.times = answer, tries
        return Result(row.line, b"", answer.status != 200)


class _Together:
    """A client of calls with many rows: a failure is final, unless the service is full or absent."""

    def __init__(self, client: HandleClient) -> None:
        self._client = client

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a call and return its answer."""
        try:
            answer = await self._client.send(request)
        except QuotaError:
            raise
        except RequestError as error:
            answer = RowAnswer.of(error)
        return answer if answer.status in (429, 503) else answer._replace(final=True)

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return None: one call needs no pace."""
        return None


def _added(columns: Mapping[str, str] | None) -> list[tuple[str, str, Any]]:
    """Return the columns to add: field of the result, name in the dataset, and Arrow type."""
    kinds = dict(result_columns())
    names = {field: field for field in kinds} if columns is None else dict(columns)
    if unknown := sorted(names.keys() - kinds.keys()):
        raise RunError(f"columns: there is no {unknown[0]!r} to add; there are {', '.join(kinds)}")
    for field, name in names.items():
        if not isinstance(name, str) or not name:
            raise RunError(f"columns: the name of {field!r} must be text, not {name!r}")
        if list(names.values()).count(name) > 1:
            raise RunError(f"columns: two columns have the name {name!r}")
    return [(field, name, kinds[field]) for field, name in names.items()]
