"""The Ray Data stage, over a fake handle."""

import asyncio

import pyarrow as pa
import pytest

from serve_app.driver.errors import DriverError
from serve_app.driver.ray_data import Generate
from tests.progress import STILL_S
from tests.serve_app.driver.handle import Handle

LIMIT_S = STILL_S


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


def test_an_unknown_engine_is_an_error(handle: Handle) -> None:
    with pytest.raises(DriverError, match="no deployment Engine:other"):
        Generate("llm", "other")
