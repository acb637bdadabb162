"""The Ray Data stage, over a fake handle."""

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from serve_app.api.errors import RequestError
from serve_app.dataset.ray_data import Generate
from serve_app.rows.errors import RunError
from tests.progress import STILL_S
from tests.serve_app.jobs.generate_handle import Handle

LIMIT_S = STILL_S
DETAIL = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
ADDED = ["result", "finish_reason", "prompt_tokens", "completion_tokens", "attempts", "error"]


async def through(stage: Generate, batch: Any, handle: Handle) -> pa.Table:
    """Return a batch that has gone through a stage, whose Engine answers in upper case."""

    async def collect() -> list[pa.Table]:
        return [table async for table in stage(batch)]

    collecting = asyncio.ensure_future(collect())
    async with asyncio.timeout(LIMIT_S):
        if len(batch):
            response = await handle.asked.get()
            texts = handle.bodies[-1]["prompts"]
            details = [DETAIL] * len(texts)
            response.future.set_result({"results": [text.upper() for text in texts], "details": details})
        (table,) = await collecting
    return table


async def test_two_stages_in_a_row_name_their_columns(handle: Handle) -> None:
    first = Generate("llm", "demo")
    second = Generate(
        "llm", "demo", {"column": "result"}, columns={"result": "again", "error": "again_error"}
    )
    table = await through(first, pa.table({"prompt": ["a", "b"]}), handle)
    table = await through(second, table, handle)
    assert table.column_names == ["prompt", *ADDED, "again", "again_error"]
    assert table.column("again").to_pylist() == ["A", "B"]


@pytest.mark.parametrize("name", ADDED)
async def test_a_column_that_the_input_has_is_an_error_before_any_row(name: str, handle: Handle) -> None:
    stage = Generate("llm", "demo")
    batch = pa.table({"prompt": ["a"], name: [1]})
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(RunError, match=f"the dataset has a column '{name}' already: .*my_{name}"):
            _ = [table async for table in stage(batch)]
    assert handle.bodies == []
    stage = Generate("llm", "demo", columns={name: f"my_{name}"})
    assert (await through(stage, batch, handle)).column_names == ["prompt", name, f"my_{name}"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"usage": "u"}, "there is no 'usage' to add; there are result, finish_reason"),
        ({"result": "a", "error": "a"}, "two columns have the name 'a'"),
        ({"result": ""}, "the name of 'result' must be text"),
    ],
)
def test_wrong_columns_are_refused_at_once(columns: dict[str, str], message: str, handle: Handle) -> None:
    with pytest.raises(RunError, match=message):
        Generate("llm", "demo", columns=columns)


async def test_a_block_without_rows_has_the_same_columns(handle: Handle) -> None:
    full = await through(Generate("llm", "demo"), pa.table({"prompt": ["a"]}), handle)
    empty = await through(Generate("llm", "demo"), pa.table({"prompt": pa.array([], pa.string())}), handle)
    assert (empty.schema, empty.num_rows) == (full.schema, 0)
    assert len(handle.bodies) == 1


async def test_other_batch_formats_are_taken_too(handle: Handle) -> None:
    pandas = pytest.importorskip("pandas")
    for batch in (
        pandas.DataFrame({"prompt": ["a", "b"], "n": [1, 2]}),
        {"prompt": np.array(["a", "b"]), "n": np.array([1, 2])},
    ):
        table = await through(Generate("llm", "demo"), batch, handle)
        assert table.column_names == ["prompt", "n", *ADDED]
        assert table.column("result").to_pylist() == ["A", "B"]
        assert table.column("n").to_pylist() == [1, 2]


async def test_chats_in_numpy_batches_are_sent_as_json(handle: Handle) -> None:
    """As Ray Data's `map_batches` gives them by default, also where they come from Parquet."""
    stage = Generate("llm", "demo", {"messages_column": "chat"}, {"max_tokens": np.int64(4)})
    chats = [
        np.array([{"role": "user", "content": "a", "name": None}], dtype=object),
        np.array([{"role": "user", "content": "b", "name": "ada"}], dtype=object),
    ]
    column = np.empty(2, dtype=object)
    column[:] = chats

    async def collect() -> list[pa.Table]:
        return [table async for table in stage({"chat": column})]

    collecting = asyncio.ensure_future(collect())
    async with asyncio.timeout(LIMIT_S):
        response = await handle.asked.get()
        response.future.set_result({"results": ["A", "B"], "details": [DETAIL] * 2})
        (table,) = await collecting
    assert table.column("result").to_pylist() == ["A", "B"]
    (body,) = handle.bodies
    assert (body["messages"], body["max_tokens"]) == (
        [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "name": "ada"}]],
        4,
    )


async def test_a_batch_is_one_call_and_comes_back_with_result_columns(handle: Handle) -> None:
    stage = Generate("llm", "demo", {"column": "question"}, {"max_tokens": 4})
    batch = pa.table({"question": ["a", None, "b"], "key": [1, 2, 3]})

    async def collect() -> list[pa.Table]:
        return [table async for table in stage(batch)]

    collecting = asyncio.ensure_future(collect())
    async with asyncio.timeout(LIMIT_S):
        while not handle.responses:  # noqa: ASYNC110
            await asyncio.sleep(0)
        detail = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}
        handle.responses[0].future.set_result({"results": ["A", "B"], "details": [detail] * 2})
        (table,) = await collecting
    (body,) = handle.bodies
    assert (body["prompts"], body["max_tokens"], body["service_tier"]) == (["a", "b"], 4, "flex")
    assert table.column("key").to_pylist() == [1, 2, 3]
    assert table.column("result").to_pylist() == ["A", None, "B"]
    assert [error and error["type"] for error in table.column("error").to_pylist()] == [
        None,
        "invalid_row",
        None,
    ]


async def test_a_batch_that_fails_is_sent_row_by_row(handle: Handle) -> None:
    stage = Generate("llm", "demo")

    async def collect() -> list[pa.Table]:
        return [table async for table in stage(pa.table({"prompt": ["a", "bad", "c"]}))]

    collecting = asyncio.ensure_future(collect())
    async with asyncio.timeout(LIMIT_S):
        first = await handle.asked.get()
        first.future.set_exception(RequestError(500, "internal_error", "the engines died", final=True))
        for _ in range(3):
            response = await handle.asked.get()
            (text,) = handle.bodies[-1]["prompts"]
            if text == "bad":
                error = RequestError(500, "internal_error", "the engines died", final=True)
                response.future.set_exception(error)
            else:
                response.future.set_result({"results": [text.upper()], "details": [DETAIL]})
        (table,) = await collecting
    assert [len(body["prompts"]) for body in handle.bodies] == [3, 1, 1, 1]
    assert table.column("result").to_pylist() == ["A", None, "C"]
    (error,) = filter(None, table.column("error").to_pylist())
    assert error["message"] == "the engines died"


async def test_a_full_service_gets_the_whole_batch_again(handle: Handle) -> None:
    stage = Generate("llm", "demo")

    async def collect() -> list[pa.Table]:
        return [table async for table in stage(pa.table({"prompt": ["a", "b"]}))]

    collecting = asyncio.ensure_future(collect())
    async with asyncio.timeout(LIMIT_S):
        first = await handle.asked.get()
        first.future.set_exception(RequestError(429, "rate_limit_error", "full", retry_after_s=0.0))
        response = await handle.asked.get()
        response.future.set_result({"results": ["A", "B"], "details": [DETAIL] * 2})
        (table,) = await collecting
    assert table.column("attempts").to_pylist() == [2, 2]


def test_an_unknown_engine_is_an_error(handle: Handle) -> None:
    with pytest.raises(RunError, match="no deployment Engine:other"):
        Generate("llm", "other")
