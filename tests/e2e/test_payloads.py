"""Large requests pass every hop, in bounded memory."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.service import Service
from tests.progress import MOST_S

MILLION = 1_000_000
MOST_MIB = 400
"""MiB by which the replicas may grow while they serve one large request."""


def memory_mib(service: Service) -> float:
    """Return the resident memory of the replicas, those of the Ingress and of the Engines."""
    total = 0
    for process in psutil.Process(service.process.pid).children(recursive=True):
        try:
            if "ServeReplica:" in " ".join(process.cmdline()):
                total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20


@contextmanager
def bounded_memory(service: Service) -> Iterator[None]:
    """Fail if the replicas grow by more than `MOST_MIB` before the block ends."""
    before = peak = memory_mib(service)
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.1):
            peak = max(peak, memory_mib(service))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()
    assert peak - before < MOST_MIB, f"grew from {before:.0f} to {peak:.0f} MiB"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompts": ["1" * MILLION]}),
        ("/v1/completions", {"model": "demo", "prompt": "1" * MILLION}),
        ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "1" * MILLION}]}),
    ],
)
def test_a_prompt_of_a_megabyte_comes_back_as_too_long_with_its_length(
    service: Service, http: httpx.Client, path: str, body: dict[str, object]
) -> None:
    with bounded_memory(service):
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text[:1000]
    message = response.json()["error"]["message"]
    # vLLM counts the characters of a chat, with those of the template, and doesn't come to its tokens.
    assert re.search(r"\b10000\d\d (tokens|characters|input tokens)", message), message[:1000]
    assert re.search(r"\b204[78]\b", message)
    assert len(message) < 1000


@pytest.mark.long
def test_a_body_of_a_megabyte_is_served(service: Service, http: httpx.Client) -> None:
    # They share their beginning, of which the engine keeps the KV cache: the machine need not be fast.
    prompts = [f"{'once upon a time ' * 110}{number}" for number in range(560)]
    assert sum(map(len, prompts)) > MILLION
    with bounded_memory(service):
        answer = http.post("/generate", json={"prompts": prompts, "max_tokens": 1, "ignore_eos": True}).json()
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == len(answer["results"]) == len(prompts)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_thousands_of_prompts_come_back_in_order(service: Service, http: httpx.Client, count: int) -> None:
    prompts = [f"What is {number // 100}+{number % 100}?" for number in range(count)]
    with bounded_memory(service):
        response = http.post("/generate", json={"prompts": prompts, "max_tokens": 2}, timeout=MOST_S)
    results = response.json()["results"]
    assert len(results) == count
    # The first two digits of each sum; no two neighbours have the same unless in order.
    right = [result == str(number // 100 + number % 100)[:2] for number, result in enumerate(results)]
    assert sum(right) >= 0.99 * count


@pytest.mark.long
@pytest.mark.parametrize("kind", ["texts", "token ids"])
def test_ten_thousand_prompts_of_openai_s_list_come_back_in_order(
    service: Service, http: httpx.Client, kind: str
) -> None:
    """The list is longer than the queue, and as long as the config allows."""
    prompts: list[Any] = [f"What is {number // 100}+{number % 100}?" for number in range(10_000)]
    if kind == "token ids":
        vocabulary: dict[str, int] = {}
        for letter in sorted(set("".join(prompts))):
            answer = http.post("/tokenize", json={"model": "demo", "prompt": letter})
            vocabulary[letter] = answer.json()["tokens"][-1]
        prompts = [[vocabulary[letter] for letter in prompt] for prompt in prompts]
    body = {"model": "demo", "prompt": prompts, "max_tokens": 2, "temperature": 0}
    response = http.post("/v1/completions", json=body, timeout=MOST_S)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(10_000))
    if kind == "texts":
        right = [choice["text"] == str(i // 100 + i % 100)[:2] for i, choice in enumerate(choices)]
        assert sum(right) >= 9_900
