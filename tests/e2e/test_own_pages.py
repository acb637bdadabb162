"""Clients of a service whose HAProxy or Ingress replicas are away: turned away, or told to come back."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.e2e.fault_injection import LIMIT_S, wait_until_whole
from tests.e2e.service import Service
from tests.e2e.services import wait_until
from tests.e2e.test_faults import INGRESS, PROXY

STREAMED = "/v1/completions"
CALLS = {
    "/v1/models": None,
    "/v1/chat/completions": {
        "model": "demo",
        "messages": [{"role": "user", "content": "2+2?"}],
        "max_tokens": 2,
    },
    STREAMED: {
        "model": "demo",
        "prompt": "2+2?",
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
    },
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 2},
}


def outcome(url: str, path: str, body: object) -> str:
    """Return what a client of its own connection gets."""
    try:
        answer = httpx.request("POST" if body else "GET", url + path, json=body, timeout=LIMIT_S)
    except httpx.TransportError as error:
        return type(error).__name__
    if answer.status_code == 200:
        # A stream that breaks off is an error of the transport.
        assert path != STREAMED or answer.text.endswith("data: [DONE]\n\n")
        return "200"
    return f"{answer.status_code}, after {int(answer.headers['retry-after'])} s"


@contextmanager
def calling(url: str, path: str, body: object, seen: Counter[str]) -> Iterator[None]:
    """Call a route again and again, until the end."""
    ended = threading.Event()

    def call() -> None:
        while not ended.is_set():
            try:
                seen[outcome(url, path, body)] += 1
            except Exception as error:
                seen[f"another page: {error!r}"] += 1
            ended.wait(0.02)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("victim", [PROXY, INGRESS])
def test_every_client_is_told_to_come_back(service: Service, victim: str) -> None:
    wait_until_whole(service)
    seen: dict[str, Counter[str]] = {path: Counter() for path in CALLS}
    with ExitStack() as callers:
        for path, body in CALLS.items():
            callers.enter_context(calling(service.url, path, body, seen[path]))
        wait_until(lambda: all(outcomes["200"] for outcomes in seen.values()), LIMIT_S)
        before = set(service.pids(victim))
        service.kill(victim)
        # Old processes of HAProxy, of before a change, are not replaced.
        count = 1 if victim == PROXY else len(before)
        wait_until(lambda: not before & (now := set(service.pids(victim))) and len(now) >= count, LIMIT_S)
        wait_until_whole(service)
    print(victim, seen)
    refused = {"ConnectError", "ReadError", "WriteError", "RemoteProtocolError"}
    told = {f"503, after {seconds} s" for seconds in range(1, 6)}
    for path, outcomes in seen.items():
        assert set(outcomes) <= {"200"} | refused | told, (path, outcomes)
