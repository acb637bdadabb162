"""Files and batches of the live service, through the unmodified clients of OpenAI."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types import Batch, FileObject

from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.e2e.services import wait_until
from tests.progress import ANSWER_S, run

LIMIT_S = 90.0
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
BATCHES = "ServeReplica:llm:Batches"

NODE = os.environ.get("SATURATE_NODE_MODULES")
"""A folder `node_modules` with OpenAI's client for Node, where there is one."""


def row(custom_id: str, question: str = "What is 47+28?", **fields: Any) -> JSON:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields


def upload(client: openai.OpenAI, *rows: JSON | str) -> FileObject:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in rows)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch")


def create(client: openai.OpenAI, file: FileObject, **options: Any) -> Batch:
    values = {"endpoint": CHAT, "completion_window": "24h"} | options
    return client.batches.create(input_file_id=file.id, **values)


def ended(client: openai.OpenAI, id: str) -> Batch:
    batch = client.batches.retrieve(id)

    def over() -> bool:
        nonlocal batch
        batch = client.batches.retrieve(id)
        return batch.status in ENDED

    wait_until(over)
    return batch


def lines(client: openai.OpenAI, file: str | None) -> dict[str, JSON]:
    """Return the rows of a result file by their `custom_id`."""
    if file is None:
        return {}
    found = [json.loads(line) for line in client.files.content(file).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_batch_is_uploaded_run_and_downloaded(client: openai.OpenAI) -> None:
    file = upload(client, row("a"), row("b", "What is 12-40?"), row("refused", body={"model": "demo"}))
    batch = create(client, file, metadata={"night": "1"})
    assert batch.status == "validating"
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.metadata == {"night": "1"}
    assert batch.request_counts
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    output = lines(client, batch.output_file_id)
    texts = {id: line["response"]["body"]["choices"][0]["message"]["content"] for id, line in output.items()}
    assert texts == {"a": "75", "b": "-28"}
    errors = lines(client, batch.error_file_id)
    assert errors["refused"]["response"]["status_code"] == 400
    for id in (file.id, batch.output_file_id):
        assert id
        assert client.files.delete(id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("url", "body", "answer"),
    [
        ("/v1/completions", {"prompt": "What is 47+28?", "temperature": 0, "max_tokens": 8}, '"75"'),
        ("/v1/responses", {"input": "What is 47+28?", "temperature": 0}, '"75"'),
        ("/generate", {"prompts": ["What is 47+28?", "What is 12-40?"]}, '["75","-28"]'),
        ("/v1/embeddings", {"model": "minilm", "input": "hello"}, '"object":"embedding"'),
    ],
)
def test_every_endpoint_is_served(client: openai.OpenAI, url: str, body: JSON, answer: str) -> None:
    file = upload(client, row("a", url=url, body={"model": "demo"} | body))
    batch = ended(client, create(client, file, endpoint=url).id)
    assert batch.error_file_id is None, client.files.content(batch.error_file_id or "").text
    assert batch.output_file_id
    assert answer in client.files.content(batch.output_file_id).text


def test_bad_lines_fail_the_batch_with_their_numbers(client: openai.OpenAI) -> None:
    unknown = row("c", body={"model": "gpt-4o", "messages": []})
    batch = ended(client, create(client, upload(client, row("a"), "{", row("a"), unknown)).id)
    assert batch.status == "failed"
    assert batch.errors
    assert batch.errors.data
    assert [(error.line, error.code) for error in batch.errors.data] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "model_not_found"),
    ]


def test_a_cancelled_batch_leaves_the_engine_at_once(client: openai.OpenAI, http: httpx.Client) -> None:
    def load() -> tuple[int, int]:
        """Return the requests that run and those that wait at the engine."""
        (replica,) = http.get("/stats").json()["models"]["demo"]["replicas"]
        return replica["batcher"]["running"], replica["batcher"]["queue_depth"]

    # All of them together take the engine minutes.
    long = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1900}
    rows = [row(str(number), body=long | {"ignore_eos": True}) for number in range(2000)]
    batch = create(client, upload(client, *rows))
    wait_until(lambda: all(load()))
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    wait_until(lambda: load() == (0, 0), 10.0)
    assert batch.status == "cancelled"
    assert batch.request_counts
    assert batch.request_counts.completed + batch.request_counts.failed == 2000
    assert batch.request_counts.failed > 1900
    done = lines(client, batch.output_file_id)
    left = lines(client, batch.error_file_id)
    assert done.keys() | left.keys() == {str(number) for number in range(2000)}
    assert {line["error"]["code"] for line in left.values()} == {"batch_cancelled"}


def test_lists_have_pages(client: openai.OpenAI) -> None:
    file = upload(client, row("a"))
    made = [create(client, file).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [batch.id for batch in page.data] == made[:0:-1]
    assert page.has_more
    assert page.get_next_page().data[0].id == made[0]
    assert next(iter(client.files.list(purpose="batch", limit=1))).id == file.id
    for id in made:
        ended(client, id)


def test_a_large_file_goes_through_in_pieces(client: openai.OpenAI) -> None:
    text = "x" * 1_000_000
    rows = [json.dumps(row(str(number), note=text)) for number in range(30)]
    file = upload(client, *rows)
    assert file.bytes > 30_000_000
    assert client.files.content(file.id).text == "\n".join(rows) + "\n"
    client.files.delete(file.id)


def test_statistics_and_metrics_have_the_batches(client: openai.OpenAI, service: Service) -> None:
    ended(client, create(client, upload(client, row("a"))).id)
    stats = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["batches"]
    assert stats["rows"]["completed"] > 0
    assert stats["batches"].keys() == {"validating", "in_progress", "finalizing", "cancelling"}


def test_the_command_runs_a_file(service: Service, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(row(str(number))) + "\n" for number in range(20)))
    command = [sys.executable, "-m", "serve_app.cli", "batch", "--api", str(requests), "--url", service.url]
    printed = run(command, cwd=ROOT)
    assert printed.returncode == 0, printed.stderr
    assert "completed: 20 of 20 rows" in printed.stdout
    assert (tmp_path / "requests.output.jsonl").read_text().count('"content":"75"') == 20


@pytest.mark.skipif(
    NODE is None or shutil.which("node") is None,
    reason="needs node, and SATURATE_NODE_MODULES with `npm install openai`",
)
def test_the_client_for_node_does_the_same(service: Service, tmp_path: Path) -> None:
    assert NODE
    (tmp_path / "node_modules").symlink_to(NODE)
    script = tmp_path / "batches.mjs"
    script.write_text((Path(__file__).parent / "batches.mjs").read_text())
    done = run(["node", str(script), f"{service.url}/v1"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all is as it should be"


@pytest.mark.long
def test_a_killed_replica_goes_on(client: openai.OpenAI, service: Service) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 64}
    rows = [row(str(number), body=body | {"ignore_eos": True}) for number in range(400)]
    batch = create(client, upload(client, *rows))

    def begun() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and 0 < counts.completed < 400

    wait_until(begun)
    (pid,) = service.pids(BATCHES)
    os.kill(pid, signal.SIGKILL)
    again = client.with_options(max_retries=20)
    started = time.monotonic()
    batch = ended(again, batch.id)
    print(f"ended {time.monotonic() - started:.1f} s after the kill")
    assert batch.status == "completed"
    assert lines(again, batch.output_file_id).keys() == {str(number) for number in range(400)}
    assert batch.error_file_id is None
