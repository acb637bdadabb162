"""Tens of thousands of requests that a fuzzer made: no 5xx, no hang, no growth, and the engine serves on.

`SATURATE_FUZZ_REQUESTS=50000 pytest -s tests/e2e/test_fuzz.py` is the long form, with new requests each time;
the short one always sends the same.
"""

import asyncio
import collections
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from serve_app.api.protocol import GenerateRequest, ProcessRequest
from tests.e2e.service import Service
from tests.e2e.shots import Shot, dump, shots
from tests.e2e.test_service import wait_until_idle

REQUESTS = int(os.environ.get("SATURATE_FUZZ_REQUESTS", "1000"))
LONG = "SATURATE_FUZZ_REQUESTS" in os.environ
VOLLEY = 10
"""Requests that are sent at once."""

LIMIT_S = 60.0
MAY_GROW = 256 << 20
"""Bytes by which all processes of the service together may grow, caches and Python's own heaps included."""

SERVER_ERROR = re.compile(rb'^data: .*"code": ?5\d\d', re.MULTILINE)

quick = settings(
    max_examples=max(1, REQUESTS // VOLLEY),
    deadline=None,
    database=None,
    derandomize=not LONG,
    # What fails is one request of a volley, which the message shows: there is nothing to make smaller.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Gun:
    """Sends requests, a volley at a time, and keeps count of the answers.

    Attributes:
        statuses: Answers by status.
    """

    def __init__(self, service: Service) -> None:
        self.statuses: collections.Counter[int] = collections.Counter()
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(base_url=service.url, timeout=LIMIT_S)

    def fire(self, volley: list[Shot]) -> None:
        """Send requests at once; fail if one is answered 5xx, or not at all."""
        for shot, answer in zip(volley, self._runner.run(self._send(volley)), strict=True):
            self.statuses[answer.status_code] += 1
            assert answer.status_code < 500, (shot, answer.text)
            # A stream has its status before it fails.
            assert not SERVER_ERROR.search(answer.content), (shot, answer.text)

    async def _send(self, volley: list[Shot]) -> list[httpx.Response]:
        return await asyncio.gather(*map(self._send_one, volley))

    async def _send_one(self, shot: Shot) -> httpx.Response:
        headers = [(name.encode(), value) for name, value in shot.headers]
        return await self._client.request(shot.method, shot.path, content=shot.body, headers=headers)

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()


@pytest.fixture(scope="module")
def gun(service: Service) -> Iterator[Gun]:
    """What this file's requests go through; the service is looked at before and after them."""
    gun = Gun(service)
    # What is loaded and cached by the first requests is no growth.
    for path, body in (
        ("/generate", {"prompts": ["What is 1+1?"] * 64}),
        ("/process", {"records": ["a"] * 64, "model": "minilm"}),
        ("/v1/completions", {"model": "demo", "prompt": "a", "max_tokens": 8, "n": 8}),
    ):
        gun.fire([Shot(path, dump(body), (("content-type", b"application/json"),))] * VOLLEY)
    before, start = service.memory(), time.monotonic()
    yield gun
    gun.close()
    with httpx.Client(base_url=service.url, timeout=LIMIT_S) as http:
        wait_until_idle(http, LIMIT_S)
        stats = http.get("/stats").json()["models"]
        for model in stats.values():
            (replica,) = model["replicas"]
            assert replica["batcher"]["queue_depth"] == 0
        answer = http.post("/generate", json={"prompts": ["What is 1+1?"], "model": "demo"})
        assert answer.json()["results"] == ["2"]
    after = service.memory()
    print(
        f"\n{gun.statuses.total()} requests in {time.monotonic() - start:.0f} s, by status: "
        f"{dict(sorted(gun.statuses.items()))}; memory {before >> 20} -> {after >> 20} MiB"
    )
    assert after - before < MAY_GROW


@pytest.mark.timeout(0)
def test_nothing_that_a_fuzzer_sends_is_a_5xx(gun: Gun) -> None:
    @quick
    @given(st.lists(shots(), min_size=VOLLEY, max_size=VOLLEY))
    def fire(volley: list[Shot]) -> None:
        gun.fire(volley)

    fire()
    # It is no fuzzer that is always refused, or never.
    assert gun.statuses[200] > REQUESTS / 100
    assert gun.statuses[400] > REQUESTS / 10


def schema() -> dict[str, Any]:
    """Return the routes in the words of OpenAPI: ours, and in the long form some of vLLM's own."""
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
    if LONG:
        command = [sys.executable, "-m", "tests.e2e.vllm_app"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        vllm = json.loads(done.stdout)["openapi"]
        # Of the others' schemas, a case takes a second to make.
        for path in ("/v1/completions", "/v1/responses", "/v1/messages", "/detokenize"):
            paths[path] = vllm["paths"][path]
        found["components"] = vllm["components"]
    return found


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
def test_nothing_that_a_schema_allows_or_forbids_is_a_5xx(
    gun: Gun, mode: schemathesis.GenerationMode
) -> None:
    content = schema()
    routes = schemathesis.openapi.from_dict(content)
    for path in content["paths"]:
        examples = max(10, REQUESTS // (50 if path in ("/generate", "/process") else 500))

        @settings(quick, max_examples=examples)
        @given(routes[path]["POST"].as_strategy(generation_mode=mode))
        def fire(case: Any) -> None:
            body = case.body if isinstance(case.body, bytes) else dump(_short(case.path, case.body))
            gun.fire([Shot(case.path, body, (("content-type", b"application/json"),))])

        fire()


def _short(path: str, body: object) -> object:
    """Let no request run for long."""
    if isinstance(body, dict):
        field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        return body | {field: 4} if isinstance(body.get(field), int | None) else body
    return None if isinstance(body, schemathesis.core.NotSet) else body
