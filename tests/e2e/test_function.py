"""A model that is a function, with a real embedding model: `/process`, `/v1/embeddings`, the handle."""

import asyncio
import base64
import struct
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.progress import ANSWER_S

CAT, KITTEN, RATES = "A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose again."

SCRIPT = """
import json, ray
from ray import serve
from serve_app.api.errors import RequestError

ray.init(address="auto", log_to_driver=False)
handle = serve.get_deployment_handle("Engine:minilm", app_name="llm")
answer = handle.process.remote(json.loads(input())).result(timeout_s=60)
refused = []
for body in ({"records": []}, {"records": ["x", 5]}, {"records": ["x"], "tenant": ""}):
    try:
        handle.process.remote(body).result(timeout_s=60)
    except RequestError as error:
        refused.append([error.status, error.param])
stats = handle.stats.remote().result(timeout_s=60)
print(json.dumps({"answer": answer, "refused": refused, "batches": stats["batcher"]["total_batches"]}))
"""


def process(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/process", json={"model": "minilm"} | body)


def batcher(http: httpx.Client) -> dict[str, float]:
    """Return the batcher's statistics of the one replica."""
    (replica,) = http.get("/stats").json()["models"]["minilm"]["replicas"]
    stats: dict[str, float] = replica["batcher"]
    return stats


def likeness(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def error(response: httpx.Response, status: int) -> tuple[str, str | None]:
    """Return message and param of an error in OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body["message"], body["param"]


def test_results_are_vectors_in_the_order_of_the_records(http: httpx.Client) -> None:
    answer = process(http, records=[CAT, RATES, KITTEN], task_id="t_1").json()
    assert set(answer) == {"results", "task_id"}
    assert answer["task_id"] == "t_1"
    cat, rates, kitten = answer["results"]
    assert len(cat) == 384
    assert likeness(cat, cat) == pytest.approx(1, abs=1e-5)
    assert likeness(cat, kitten) > 0.5 > 0.2 > likeness(cat, rates)


@pytest.mark.long
def test_as_many_vectors_as_a_list_may_have_come_back_as_numbers(service: Service) -> None:
    # About 80 MB, above the 64 MiB that a message over gRPC may have.
    body = {"model": "minilm", "input": [f"{n}" for n in range(10_000)]}
    answer = httpx.post(f"{service.url}/v1/embeddings", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200
    assert len(answer.content) > 64 << 20
    assert [len(item["embedding"]) for item in answer.json()["data"]] == [384] * 10_000


def test_order_is_kept_over_many_batches_of_mixed_lengths(http: httpx.Client) -> None:
    texts = [f"{n} " + "word " * (n * 37 % 90) for n in range(150)]
    together = process(http, records=texts).json()["results"]
    for n in (0, 1, 75, 149):
        (alone,) = process(http, records=[texts[n]]).json()["results"]
        assert likeness(alone, together[n]) == pytest.approx(1, abs=1e-4)


def test_the_model_may_be_left_out_since_it_is_the_only_function(http: httpx.Client) -> None:
    assert http.post("/process", json={"records": [CAT]}).status_code == 200


def test_a_record_that_the_function_fails_on_is_named(http: httpx.Client) -> None:
    message, param = error(process(http, records=[CAT, 5]), 422)
    assert param == "records[1]"
    assert message == "records[1]: TypeError: a record must be a text, not int"


def test_partial_returns_what_can_be_served(http: httpx.Client) -> None:
    answer = process(http, records=[None, CAT, {"x": 1}], partial=True).json()
    assert [bool(result) for result in answer["results"]] == [False, True, False]
    assert [(item["index"], item["type"]) for item in answer["errors"]] == [
        (0, "processing_error"),
        (2, "processing_error"),
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"records": []}, "records"),
        ({"records": "x"}, "records"),
        ({"records": ["x"] * 10_001}, "records"),
        ({"records": ["x"], "prompts": ["x"]}, "prompts"),
        ({"records": ["x"], "queue_timeout_s": 0}, "queue_timeout_s"),
        ({"records": ["x"], "service_tier": "best"}, "service_tier"),
        ({"records": ["x"], "model": 5}, "model"),
        ({}, "records"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, body: dict[str, object], param: str) -> None:
    message, named = error(process(http, **body), 400)
    assert named == param
    assert message


def test_no_records(http: httpx.Client) -> None:
    assert error(process(http, records=[]), 400) == ("No records provided", "records")


def test_a_model_of_the_wrong_kind_says_where_it_is_served(http: httpx.Client) -> None:
    message, param = error(http.post("/generate", json={"model": "minilm", "prompts": ["x"]}), 400)
    assert param == "model"
    assert "POST /process" in message
    message, _ = error(http.post("/process", json={"model": "demo", "records": ["x"]}), 400)
    assert "POST /generate" in message
    message, _ = error(http.post("/v1/chat/completions", json={"model": "minilm", "messages": []}), 400)
    assert "POST /v1/embeddings" in message


async def test_a_record_that_can_not_start_in_time_is_not_run(service: Service, http: httpx.Client) -> None:
    """Long texts keep the one processor busy for seconds: a record behind them can't start in time."""
    before = await asyncio.to_thread(batcher, http)
    long = ["word " * 250] * 2000
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:
        flood = asyncio.ensure_future(client.post("/process", json={"model": "minilm", "records": long}))
        while (await asyncio.to_thread(batcher, http))["queue_depth"] < 500:
            assert not flood.done()
        response = await client.post(
            "/process", json={"records": [CAT]}, headers={"x-queue-timeout-seconds": "0.2"}
        )
        message, param = error(response, 408)
        assert param == "records[0]"
        assert "in the time it allows" in message
        answer = await client.post(
            "/process", json={"records": [CAT], "queue_timeout_s": 0.2, "partial": True}
        )
        assert answer.json()["results"] == [None]
        assert answer.json()["errors"][0]["type"] == "timeout_error"
        flood.cancel()
        await asyncio.wait([flood])
        while (await asyncio.to_thread(batcher, http))["running"]:
            pass
    after = await asyncio.to_thread(batcher, http)
    ends = ("total_expired", "total_rejected")
    late = sum(after[end] - before[end] for end in ends)
    assert late == 2
    assert after["queue_depth"] == 0, "the records of the client that left are gone"


async def test_records_of_many_callers_share_batches(service: Service, http: httpx.Client) -> None:
    before = await asyncio.to_thread(batcher, http)
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def ask(n: int) -> None:
            response = await client.post("/process", json={"records": [f"text number {n}"]})
            assert len(response.json()["results"]) == 1

        await asyncio.gather(*(ask(n) for n in range(200)))
    after = await asyncio.to_thread(batcher, http)
    assert after["total_completed"] - before["total_completed"] == 200
    assert after["total_batches"] - before["total_batches"] < 100
    assert after["avg_batch_size"] > 1


# The openai client


def test_openai_embeddings(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.embeddings.create(model="minilm", input=[CAT, KITTEN, RATES])
    assert [item.index for item in answer.data] == [0, 1, 2]
    cat, kitten, rates = (item.embedding for item in answer.data)
    assert likeness(cat, kitten) > 0.5 > 0.2 > likeness(cat, rates)
    (same,) = process(http, records=[CAT]).json()["results"]
    assert cat == pytest.approx(same, abs=1e-5)
    assert answer.model == "minilm"
    # Words, a full stop and two special tokens each; "naps" is two tokens.
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 9 + 10 + 7


@pytest.mark.parametrize("format", ["float", "base64"])
def test_both_formats_are_the_same_numbers(http: httpx.Client, format: str) -> None:
    body = {"model": "minilm", "input": CAT, "encoding_format": format}
    (item,) = http.post("/v1/embeddings", json=body).json()["data"]
    vector: Any = item["embedding"]
    if format == "base64":
        vector = struct.unpack("<384f", base64.b64decode(vector))
    (same,) = process(http, records=[CAT]).json()["results"]
    assert list(vector) == pytest.approx(same, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": [1, 2]}, "input"),
        ({"input": [[1, 2]]}, "input"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"dimensions": 256}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"service_tier": "best"}, "service_tier"),
    ],
)
def test_wrong_fields_of_embeddings_are_refused(
    http: httpx.Client, change: dict[str, object], param: str
) -> None:
    response = http.post("/v1/embeddings", json={"model": "minilm", "input": CAT} | change)
    assert error(response, 400)[1] == param
    good = http.post("/v1/embeddings", json={"input": CAT, "dimensions": 384, "user": "u"})
    assert good.status_code == 200, good.text


# The handle


def test_a_script_gets_the_same_answers_as_http(service: Service, http: httpx.Client) -> None:
    body = {"records": [CAT, 5, RATES], "task_id": "t", "partial": True}
    result = service.run_python(SCRIPT, body)
    mine, theirs = result["answer"], process(http, **body).json()
    assert mine["errors"] == theirs["errors"]
    assert mine["task_id"] == "t"
    assert mine["results"][1] is None
    assert mine["results"][0] == pytest.approx(theirs["results"][0], abs=1e-5)
    assert result["refused"] == [[400, "records"], [422, "records[1]"], [400, "tenant"]]
    assert result["batches"] >= 1
