"""Spans and request lines of the live service, and its page of live numbers."""

import json
import uuid
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.progress import wait_until

SECRET = "xyzzy"


def wait_for(find: Callable[[], list[Any]], count: int) -> list[Any]:
    """Return what is found once there is enough of it."""
    found: list[Any] = []

    def enough() -> bool:
        found[:] = find()
        return len(found) >= count

    wait_until(enough, tell=lambda: found)
    return found


def spans_of(service: Service, trace: str) -> list[dict[str, Any]]:
    """Return the spans of a trace that have been written."""
    lines = [line for file in (service.folder / "spans").iterdir() for line in file.read_text().splitlines()]
    spans = [json.loads(line) for line in lines]
    return [span for span in spans if span["context"]["trace_id"] == f"0x{trace}"]


def lines_of(service: Service, request_id: str) -> list[str]:
    """Return the lines of a request in the logs of the Ingress."""
    files = (service.log_folder() / "serve").glob("requests_*.log")
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if f'"{request_id}"' in line]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_request_is_one_trace_from_the_ingress_to_the_engine(
    service: Service, http: httpx.Client, path: str
) -> None:
    trace, sender = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    body = {"model": "demo", "max_tokens": 4, "ignore_eos": True}
    body |= {"prompts": ["What is 1+2?"]} if path == "/generate" else {"prompt": "What is 1+2?"}
    response = http.post(path, json=body, headers={"traceparent": f"00-{trace}-{sender}-01"})
    assert response.status_code == 200
    found = wait_for(lambda: spans_of(service, trace), 2)
    spans = {span["name"]: span for span in found}
    assert set(spans) == {f"POST {path}", "llm_request"}
    whole, run = spans[f"POST {path}"], spans["llm_request"]
    assert whole["parent_id"] == f"0x{sender}"
    assert run["parent_id"] == whole["context"]["span_id"]
    assert run["attributes"]["gen_ai.usage.completion_tokens"] == 4
    assert whole["attributes"]["gen_ai.usage.output_tokens"] == 4
    assert whole["attributes"]["saturate.wait_s"] < whole["attributes"]["saturate.engine_s"]
    # The same clock in both processes: nothing begins before what holds it.
    assert whole["start_time"] <= run["start_time"]
    assert run["end_time"] <= whole["end_time"]


def test_a_request_that_is_not_sampled_leaves_no_span(service: Service, http: httpx.Client) -> None:
    trace = uuid.uuid4().hex
    quiet = {"traceparent": f"00-{trace}-{'1' * 16}-00", "x-request-id": trace}
    assert http.post("/generate", json={"prompts": ["1"], "model": "demo"}, headers=quiet).is_success
    wait_for(lambda: lines_of(service, trace), 1)
    assert spans_of(service, trace) == []


def test_a_line_per_request_without_its_text(service: Service, client: openai.OpenAI) -> None:
    request_id = uuid.uuid4().hex
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": SECRET}],
        max_tokens=6,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": request_id, "x-tenant": "team"},
    )
    assert list(stream)
    (line,) = wait_for(lambda: lines_of(service, request_id), 1)
    assert SECRET not in line
    told = json.loads(line)
    assert told["output_tokens"] == 6
    assert told["prompt_tokens"] > 5
    assert 0 < told["first_s"] <= told["total_s"]
    assert (told["model"], told["tenant"], told["outcome"], told["stream"]) == ("demo", "team", "ok", True)


def test_a_request_that_is_refused_has_a_line_too(service: Service, http: httpx.Client) -> None:
    request_id = uuid.uuid4().hex
    body = {"model": "nope", "prompts": [SECRET]}
    assert http.post("/generate", json=body, headers={"x-request-id": request_id}).status_code == 404
    (line,) = wait_for(lambda: lines_of(service, request_id), 1)
    assert SECRET not in line
    assert json.loads(line)["outcome"] == "refused"


def test_a_browser_gets_the_page_and_a_program_the_numbers(http: httpx.Client) -> None:
    page = http.get("/stats", headers={"accept": "text/html,*/*"}, follow_redirects=True)
    assert page.headers["content-type"].startswith("text/html")
    assert page.url.fragment == "live"
    assert page.text == http.get("/stats.html", follow_redirects=True).text
    assert "models" in http.get("/stats").json()
