"""vLLM's `run_batch` reads the same input files, and writes the same lines."""

from io import BytesIO

import pytest
from pydantic_core import to_json
from vllm.entrypoints.launchers.run_batch import BatchRequestInput, BatchRequestOutput

from serve_app.api.protocol import JSON
from serve_app.jobs.intake import check, read_rows
from serve_app.jobs.lines import EXPIRED, answered, unrun
from serve_app.rows.rows import Row
from tests.serve_app.jobs.helpers import CHAT, limits_of, row, text_of

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


def test_a_result_is_a_line_of_run_batch() -> None:
    sent = Row(1, to_json(row("a")))
    for result, status in ((answered("batch_1", sent, 200, ANSWER), 200), (unrun("b", sent, EXPIRED), None)):
        line = BatchRequestOutput.model_validate_json(result.text)
        assert line.custom_id == "a"
        assert (line.response.status_code if line.response else None) == status
