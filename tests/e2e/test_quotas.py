"""Quotas on a live service: many requests through three Ingress replicas, and a service that is killed."""

import asyncio
import copy
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import yaml

from serve_app.auth.keys import hash_key, new_key
from tests.e2e.service import ROOT, Service
from tests.e2e.services import COUNTED, is_healthy, is_settled, wait_until
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

T = TypeVar("T")

PREFIX = "/metered"
LIMIT = COUNTED["tokens_per_minute"]
"""Tokens of a minute."""

KEYS = {name: new_key() for name in ("counted", "free")}
CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 1+1? " * 100}],
    "temperature": 0,
    "max_tokens": 16,
}


@pytest.fixture(scope="module")
def metered(service: Service, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of three Ingress replicas with keys, in front of the Engines of the shared service."""
    folder: Path = tmp_path_factory.mktemp("quotas")
    entries = [{"name": name, "sha256": hash_key(key.encode()), "tenant": name} for name, key in KEYS.items()]
    (folder / "keys.yaml").write_text(yaml.safe_dump(entries))
    config = copy.deepcopy(service.config)
    (app,) = config["applications"]
    other = copy.deepcopy(app) | {"name": "metered", "route_prefix": PREFIX}
    other["import_path"] = "tests.e2e.metered:build"
    other["runtime_env"]["env_vars"]["PYTHONPATH"] = str(ROOT)
    other["args"].pop("batches", None)
    other["args"]["access"] = {"keys_file": str(folder / "keys.yaml")}
    other["deployments"] = []
    config["applications"].append(other)
    service.deploy(config)
    url = service.url + PREFIX
    # One Ingress replica answers before the others run.
    wait_until(lambda: is_healthy(url) and is_settled(service, "metered"))
    return url


def headers_of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def wait_for_minute(least_s: float) -> None:
    """Return when the current minute has that many seconds left."""
    if 60 - time.time() % 60 < least_s:
        wait_until(lambda: time.time() % 60 < 2)


def within_a_minute(act: Callable[[], T]) -> T:
    """Act within one minute, at whose end the whole limit remains again; return the result."""
    while True:
        wait_for_minute(20)
        minute = time.time() // 60
        found = act()
        if (now := time.time() // 60) == minute:
            return found
        # Its use of the next minute must not count.
        wait_until(partial(lambda spoilt: time.time() // 60 > spoilt, now))


def test_answers_have_openai_s_headers(metered: str) -> None:
    answer = within_a_minute(
        lambda: httpx.post(
            f"{metered}/v1/chat/completions", json=CHAT, headers=headers_of("counted"), timeout=ANSWER_S
        )
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ratelimit-limit-tokens"] == str(LIMIT)
    assert 0 < int(answer.headers["x-ratelimit-remaining-tokens"]) < LIMIT
    free = httpx.post(
        f"{metered}/v1/chat/completions", json=CHAT, headers=headers_of("free"), timeout=ANSWER_S
    )
    assert "x-ratelimit-limit-tokens" not in free.headers


async def test_100_concurrent_requests_never_pass_the_limit_and_use_it_up(metered: str) -> None:
    wait_for_minute(59)
    over_at = time.time() // 60 * 60 + 60
    used = answered = refused = 0

    async def worker(client: httpx.AsyncClient) -> None:
        nonlocal used, answered, refused
        while time.time() < over_at - 5:
            answer = await client.post(f"{metered}/v1/chat/completions", json=CHAT)
            if answer.status_code == 429:
                refused += 1
                await asyncio.sleep(min(1.0, float(answer.headers["retry-after"])))
                continue
            assert answer.status_code == 200, answer.text
            # A request may wait for a second: one that ends later may be of the next minute.
            if time.time() < over_at:
                answered += 1
                used += answer.json()["usage"]["total_tokens"]

    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(headers=headers_of("counted"), timeout=ANSWER_S, limits=limits) as client:
        await asyncio.gather(*(worker(client) for _ in range(100)))
    print(f"limit {LIMIT}, used {used} ({used / LIMIT:.2%}), answered {answered}, refused {refused}")
    assert refused
    assert 0.98 * LIMIT <= used <= LIMIT


def test_a_killed_service_of_quotas_keeps_its_sums(metered: str, service: Service) -> None:
    wait_for_minute(50)
    used, left = 0, LIMIT
    begun = time.time() // 60

    def ask() -> bool:
        nonlocal used, left
        answer = httpx.post(
            f"{metered}/v1/chat/completions", json=CHAT, headers=headers_of("counted"), timeout=ANSWER_S
        )
        if answer.status_code != 200:
            return False
        used += answer.json()["usage"]["total_tokens"]
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        return True

    for _ in range(20):
        assert ask()
    (pid,) = _pids_of("ServeReplica:llm:Quotas")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ask() and _pids_of("ServeReplica:llm:Quotas") not in ([], [pid]))
    # Until the new process answers, Engines serve from what they have ahead, and know no newer sums.
    wait_until(lambda: ask() and left <= LIMIT - used)
    assert time.time() // 60 == begun, "the minute is over: nothing was seen"
    assert left > 0


def _pids_of(name: str) -> list[int]:
    """Return the processes of a replica, by the name that Ray gives them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if name.encode() in line:
                found.append(int(folder.name))
    return found
