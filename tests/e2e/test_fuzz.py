"""Thousands of requests of a fuzzer: no 5xx, no hang, no growth, and the engine serves on.

The short form always sends the same requests, the long one new ones each time.
"""

import asyncio
import collections
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serve_app.api.protocol import JSON, GenerateRequest, ProcessRequest
from tests.e2e.fuzz_requests import ROUTES, FuzzRequest, dump, fuzz_requests
from tests.e2e.hostile_requests import FAIL_IN_ENGINE, HostileRequests
from tests.e2e.service import Service
from tests.e2e.waiting import wait_until_idle
from tests.progress import ANSWER_S

SHORT, LONG = 200, 10_000
"""Requests of the two forms."""

AT_ONCE = 10
"""Requests that are sent at once."""

HOSTILE_SHORT, HOSTILE_LONG = 200, 5_000
"""Requests with hostile values, of the two forms."""

SEED = 17
"""Of the short form."""

PROBE_EVERY_S = 0.5
PROBE_LIMIT_S = {HOSTILE_SHORT: 5.0, HOSTILE_LONG: 2.0}
"""Seconds that a short request takes at most, whatever comes beside it.

Other work shares the machine with the short form; what it looks for takes tens of seconds.
"""

PROBE_RATIO = 10.0
"""On a machine that is so busy or slow that it is more: times that a probe takes beside harmless requests."""

HARMLESS = 100
"""Requests of that control."""

MAY_GROW = 256 << 20
"""Bytes by which all processes of the service together may grow, caches and Python's own heaps included."""

KV_CACHE_TOKENS = 131_072
"""Tokens that the demo's KV cache holds."""

SERVER_ERROR = re.compile(rb'^data: .*"code": ?5\d\d', re.MULTILINE)

every_form = pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])


def form(count: int, examples: int) -> settings:
    """Return Hypothesis' settings for a number of requests and of examples."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=count == SHORT,
        # The message shows the one request that fails: there is nothing to shrink.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class Sender:
    """Sends requests, several at a time, and counts the answers.

    Attributes:
        statuses: Answers by status.
    """

    def __init__(self, service: Service) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S)

    def send(self, requests: list[FuzzRequest]) -> None:
        """Send requests at once; fail if one is answered 5xx, or not at all."""
        for request, answer in zip(requests, self._runner.run(self._send(requests)), strict=True):
            self.statuses[answer.status_code] += 1
            assert answer.status_code < 500, (request, answer.text)
            # A stream has its status before it fails.
            assert not SERVER_ERROR.search(answer.content), (request, answer.text)

    async def _send(self, requests: list[FuzzRequest]) -> list[httpx.Response]:
        return await asyncio.gather(*map(self._send_one, requests))

    async def _send_one(self, request: FuzzRequest) -> httpx.Response:
        headers = [(name.encode(), value) for name, value in request.headers]
        return await self._client.request(request.method, request.path, content=request.body, headers=headers)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


def _json(path: str, body: JSON) -> FuzzRequest:
    return FuzzRequest(path, dump(body), (("content-type", b"application/json"),))


@pytest.fixture(scope="module")
def sender(request: pytest.FixtureRequest, service: Service) -> Iterator[Sender]:
    """The sender of this file's requests; memory and health of the service are checked after them."""
    sender = Sender(service)
    # The first requests load and fill caches, which is no growth: the KV cache takes memory as it is used.
    # The short form has too few requests to fill it.
    if any(item.get_closest_marker("long") for item in request.session.items):
        fill = {"prompts": [f"{number:02}" + "x" * 2_000 for number in range(KV_CACHE_TOKENS // 2_000)]}
        sender.send([_json("/generate", fill | {"max_tokens": 1, "model": "demo"})])
    for path, body in (
        ("/generate", {"prompts": ["What is 1+1?"] * 64}),
        ("/process", {"records": ["a"] * 64, "model": "minilm"}),
        ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 8, "n": 8}),
    ):
        sender.send([_json(path, body)] * AT_ONCE)
    before, start = service.memory(), time.monotonic()
    yield sender
    sender.close()
    with httpx.Client(base_url=service.url, timeout=ANSWER_S) as http:
        wait_until_idle(http)
        stats = http.get("/stats").json()["models"]
        for model in stats.values():
            (replica,) = model["replicas"]
            assert replica["batcher"]["queue_depth"] == 0
        answer = http.post("/generate", json={"prompts": ["What is 1+1?"], "model": "demo"})
        assert answer.json()["results"] == ["2"]
    after = service.memory()
    print(
        f"\n{sender.statuses.total()} requests in {time.monotonic() - start:.0f} s, by status: "
        f"{dict(sorted(sender.statuses.items()))}; memory {before >> 20} -> {after >> 20} MiB"
    )
    assert after - before < MAY_GROW


@pytest.mark.timeout(3600)
@every_form
def test_no_random_request_is_answered_5xx(sender: Sender, count: int) -> None:
    before = sender.statuses.copy()

    @form(count, count // AT_ONCE)
    @given(st.lists(fuzz_requests(), min_size=AT_ONCE, max_size=AT_ONCE))
    def send(requests: list[FuzzRequest]) -> None:
        sender.send(requests)

    send()
    # A fuzzer that is always refused, or never, tests little.
    found = sender.statuses - before
    assert found[200] > count / 100
    assert found[400] > count / 10


@contextmanager
def probes(service: Service) -> Iterator[list[float]]:
    """Send a short request each half second, whether or not the last was answered; yield their seconds."""
    seconds: list[float] = []
    done = threading.Event()

    async def probe(client: httpx.AsyncClient) -> None:
        start = time.monotonic()
        body = {"prompts": ["What is 1+1?"], "max_tokens": 2, "tenant": "probe", "service_tier": "priority"}
        answer = await client.post("/generate", json=body | {"model": "demo"})
        seconds.append(time.monotonic() - start)
        assert answer.status_code == 200, answer.text

    async def run() -> None:
        async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:
            sent = []
            while not done.is_set():
                sent.append(asyncio.ensure_future(probe(client)))
                await asyncio.sleep(PROBE_EVERY_S)
            await asyncio.gather(*sent)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        try:
            yield seconds
        finally:
            done.set()
        running.result()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [HOSTILE_SHORT, pytest.param(HOSTILE_LONG, marks=pytest.mark.long)])
def test_hostile_values_are_answered_and_hold_up_no_other_request(
    service: Service, sender: Sender, vllm_app: JSON, count: int
) -> None:
    seed = SEED if count == HOSTILE_SHORT else time.time_ns()
    print(f"\nseed {seed}")
    requests = islice(HostileRequests(vllm_app["openapi"], seed), count)
    with probes(service) as control:
        for _ in range(HARMLESS // AT_ONCE):
            sender.send([_json("/generate", {"prompts": ["What is 1+1?"], "model": "demo"})] * AT_ONCE)
    before = sender.statuses.copy()
    with probes(service) as seconds:
        while several := list(islice(requests, AT_ONCE)):
            sender.send(several)
    seconds.sort()
    half, late, most = (seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99, 1.0))
    found = sender.statuses - before
    print(
        f"{count} hostile requests, by status {dict(sorted(found.items()))}; "
        f"{len(seconds)} probes: p50 {half:.3f} s, p99 {late:.3f} s, at most {most:.3f} s"
    )
    assert found[200] > count / 100
    assert found[400] > count / 10
    assert most <= max(PROBE_LIMIT_S[count], PROBE_RATIO * max(control))


@pytest.mark.long
@pytest.mark.parametrize(("path", "fields"), FAIL_IN_ENGINE)
def test_a_value_that_fails_in_the_engine_is_the_request_s_fault(
    http: httpx.Client, path: str, fields: JSON
) -> None:
    assert http.post(path, json=ROUTES[path][0] | fields).status_code == 400


def schema(count: int, vllm: JSON) -> JSON:
    """Return the routes as OpenAPI has them: ours, and in the long form some of vLLM's own."""
    paths: dict[str, Any] = {}
    for path, kind in (("/generate", GenerateRequest), ("/process", ProcessRequest)):
        body = {"application/json": {"schema": kind.model_json_schema()}}
        answers = {"200": {"description": "done"}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": body}, "responses": answers}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "saturate", "version": "1"},
        "paths": paths,
    }
    if count == LONG:
        # A case of the other schemas takes a second to generate.
        for path in ("/v1/completions", "/v1/responses", "/v1/messages", "/detokenize"):
            paths[path] = vllm["paths"][path]
        found["components"] = vllm["components"]
    return found


@pytest.mark.timeout(3600)
@every_form
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_no_request_that_a_schema_allows_or_forbids_is_answered_5xx(
    sender: Sender, vllm_app: JSON, mode: schemathesis.GenerationMode, count: int
) -> None:
    content = schema(count, vllm_app["openapi"])
    routes = schemathesis.openapi.from_dict(content)
    for path in content["paths"]:
        examples = max(10, count // (50 if path in ("/generate", "/process") else 500))

        @form(count, examples)
        @given(routes[path]["POST"].as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            body = case.body if isinstance(case.body, bytes) else dump(_short(case.path, case.body))
            sender.send([FuzzRequest(case.path, body, (("content-type", b"application/json"),))])

        send()


def _short(path: str, body: object) -> object:
    """Let no request run for long."""
    if isinstance(body, dict):
        field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        return body | {field: 4} if isinstance(body.get(field), int | None) else body
    return None if isinstance(body, schemathesis.core.NotSet) else body
