"""Ray Data stage that sends batches of rows to an Engine, one call per batch."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from serve_app.api.scheduling import ServiceTier
from serve_app.dataset.formats import numbered
from serve_app.dataset.output import result_columns
from serve_app.dataset.prompts import Prompter
from serve_app.dataset.run import Drive, call_fields
from serve_app.jobs.errors import RunError
from serve_app.jobs.handle import HandleClient
from serve_app.jobs.rows import Result


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
        done: list[Result] = []

        def write(results: Sequence[Result]) -> None:
            done.extend(results)

        rows = numbered(batch.to_pylist())
        drive = Drive(
            rows,
            self._prompter,
            self._client,
            call_fields(self._sampling, None),
            write,
            tier=self._tier,
            chunk=max(1, len(batch)),
            concurrency=1,
            retries=self._retries,
            observed=False,
        )
        await drive.run()
        found = [from_json(result.text) for result in sorted(done)]
        for field, name, kind in self._columns:
            batch = batch.append_column(name, pa.array([row[field] for row in found], kind))
        yield batch


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
