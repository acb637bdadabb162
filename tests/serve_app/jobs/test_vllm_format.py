"""vLLM's `run_batch` reads the same input files, and writes the same lines."""

from io import BytesIO
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.run_batch import BatchRequestInput, BatchRequestOutput

from serve_app.api.protocol import JSON
from serve_app.jobs.intake import check, read_rows
from serve_app.rows.pacing import Fixed
from serve_app.rows.rows import RowAnswer, RowRequest
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import CHAT, NOW, limits_of, row, text_of
from tests.serve_app.jobs.test_batches import running

CHAT_BODY: JSON = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ANSWER: JSON = {
    "id": "chatcmpl-1",
    "model": "demo",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, CHAT_BODY),
        ("/v1/embeddings", {"model": "demo", "input": "hi"}),
        ("/v1/rerank", {"model": "demo", "query": "a", "documents": ["b", "c"]}),
        ("/v1/score", {"model": "demo", "text_1": "a", "text_2": ["b", "c"]}),
    ],
)
def test_a_line_that_run_batch_takes_is_valid_here(url: str, body: JSON) -> None:
    line = {"custom_id": "request-1", "method": "POST", "url": url, "body": body}
    assert BatchRequestInput.model_validate(line).custom_id == "request-1"
    plan = read_rows(BytesIO(text_of(line)), limits_of())
    assert len(plan) == 1
    assert check(plan, url, {"demo"}, 1) == []


class Chat(Engine):
    """Engines that answer as vLLM does."""

    async def send(self, request: RowRequest) -> RowAnswer:
        return RowAnswer((await super().send(request)).status, ANSWER)


async def test_a_result_is_a_line_of_run_batch(tmp_path: Path) -> None:
    engine = Chat()
    engine.go.clear()
    async with running(tmp_path, engine, concurrency=Fixed(1)) as bench:
        bench.add("b", row("a"), row("not run"))
        await engine.until(lambda: engine.running == 1)
        bench.store.move("b", "cancelling", NOW)
        bench.runner.notice()
        engine.go.set()
        output, errors = bench.lines(await bench.ended("b", state="cancelled"))
    for lines, id, status in ((output, "a", 200), (errors, "not run", None)):
        line = BatchRequestOutput.model_validate(lines[id])
        assert line.custom_id == id
        assert (line.response.status_code if line.response else None) == status
    assert errors["not run"]["error"]["code"] == "batch_cancelled"
