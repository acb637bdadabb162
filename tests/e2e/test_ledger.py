"""The ledger against vLLM's own counters, while replicas and engines die and clients leave."""

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from serve_app.api.protocol import JSON
from serve_app.cli.main import saturate
from serve_app.ledger.report import LedgerFiles, ReportLine
from tests.e2e.fault_injection import CORE, inject, wait_until_whole
from tests.e2e.load import BODY, PROMPTS
from tests.e2e.service import Service
from tests.e2e.services import MEASURED, wait_until
from tests.e2e.test_faults import ENGINE, INGRESS
from tests.progress import ANSWER_S

LOST_S = 1.0
"""Seconds of which a crash may lose the rows."""

FAULTS_S = 600.0
"""Length of the long run of faults."""

HANDLE = """
import json
from ray import serve
handle = serve.get_deployment_handle("Engine:demo", app_name="llm")
body = {"prompts": ["What is 47+28?"], "tenant": "handles", "max_tokens": 20, "ignore_eos": True}
print(json.dumps(handle.generate.remote(body).result(timeout_s=60)["usage"]))
"""


@dataclass
class Counters:
    """vLLM's own counters of each Engine replica, and its calls that have ended, as they were seen last.

    Attributes:
        seen: By replica, the time of each look, the tokens in and out, and the calls.
    """

    url: str
    seen: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)

    def look(self) -> set[str]:
        """Look at all replicas; return those that answer."""
        at = time.monotonic()
        found = httpx.get(f"{self.url}/stats", timeout=ANSWER_S).json()["models"]["demo"]["replicas"]
        for replica in found:
            usage = replica["usage"]
            calls = sum(sums["calls"] for sums in (usage["own"], *usage["tenants"].values()))
            seen = self.seen.setdefault(replica["replica"], [])
            seen.append((at, usage["engine"]["prompt"], usage["engine"]["output"], calls))
        return {replica["replica"] for replica in found}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look some times a second until the block ends."""
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.1):
                with suppress(httpx.HTTPError, KeyError, ValueError):
                    self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def at_least(self, replica: str) -> int:
        """Return the calls of a replica that has died whose rows have to be in the ledger."""
        seen = self.seen[replica]
        last = seen[-1][0] - LOST_S
        return max((calls for at, _, _, calls in seen if at <= last), default=0)


def folder(service: Service) -> Path:
    return Path(service.config["applications"][0]["args"]["usage"]["ledger"]["folder"])


def lines(service: Service, *by: str) -> dict[tuple[str, ...], ReportLine]:
    files = LedgerFiles(str(folder(service)))
    found = files.sums(by)
    assert files.wrong == 0
    return {line.values: line for line in found if "minilm" not in line.values}


def tokens(service: Service, replica: str) -> tuple[int, int]:
    """Return the tokens in and out of a replica in the ledger."""
    line = lines(service, "replica").get((replica,))
    return (line.total.prompt_tokens, line.total.output_tokens) if line else (0, 0)


async def leave_streams(url: str, stop: asyncio.Event) -> None:
    """Open streams, and leave each in its middle."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        for number in itertools.count():
            if stop.is_set():
                return
            # vLLM refuses two answers at temperature 0.
            body = BODY | {"prompt": PROMPTS[number % len(PROMPTS)], "stream": True, "n": 1 + number % 2}
            body["temperature"] = 1
            headers = {"x-tenant": "leavers"}
            with suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    async for _ in answer.aiter_lines():
                        if number % 3:
                            break
                        await asyncio.sleep(0.05)
                        break


def run_batch(service: Service) -> None:
    """Run a batch to its end."""
    with openai.OpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=3, timeout=ANSWER_S
    ) as client:
        rows = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
            | {"body": {"model": "demo", "prompt": prompt, "max_tokens": 20, "temperature": 0}}
            for number, prompt in enumerate(PROMPTS)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")


def charged(service: Service) -> dict[str, int]:
    """Return the tokens of today that the quotas of the measured tenants have."""
    limits = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["quotas"]["limits"]
    states = {name: limits[f"tenant {name}"]["tokens_per_day"] for name in MEASURED}
    return {name: one["limit"] - one["remaining"] for name, one in states.items()}


def summed(service: Service) -> dict[str, int]:
    """Return the tokens of today that the ledger has of these tenants."""
    found = lines(service, "day", "tenant")
    today = time.strftime("%Y-%m-%d", time.gmtime())
    totals = {name: found[today, name].total for name in MEASURED if (today, name) in found}
    return {
        name: totals[name].prompt_tokens + totals[name].output_tokens if name in totals else 0
        for name in MEASURED
    }


def replicas_agree(service: Service, counters: Counters) -> bool:
    """Return whether the ledger has what the counters of all living replicas say, to the token."""
    return all(tokens(service, name) == counters.seen[name][-1][1:3] for name in counters.look())


async def compare(service: Service, faults: list[tuple[str, signal.Signals]], seconds: float) -> None:
    """Inject faults, and compare the ledger with the counters.

    Args:
        service: Two replicas with a ledger.
        faults: Processes and signals, one after the other.
        seconds: Time after which no further fault is injected, but each once.
    """
    await asyncio.to_thread(wait_until_whole, service)
    counters = Counters(service.url)
    counters.look()
    stop = asyncio.Event()
    leaving = asyncio.create_task(leave_streams(service.url, stop))
    began = time.monotonic()
    try:
        with counters.watched():
            for number, (victim, sends) in enumerate(itertools.cycle(faults)):
                found = await inject(service, victim, sends)
                print(f"{victim}: {found.load.summary()}", flush=True)
                if number + 1 >= len(faults) and time.monotonic() - began >= seconds:
                    break
            await asyncio.to_thread(service.run_python, HANDLE)
            await asyncio.to_thread(run_batch, service)
    finally:
        stop.set()
        await leaving
    # All calls have ended; the last round is half a second away.
    await asyncio.to_thread(wait_until, lambda: replicas_agree(service, counters))
    living = counters.look()
    dead = counters.seen.keys() - living
    assert living
    for name in sorted(counters.seen):
        found_tokens, last = tokens(service, name), counters.seen[name][-1][1:3]
        print(
            f"{name}: {'dead' if name in dead else 'living'}, ledger {found_tokens}, vLLM {last}", flush=True
        )
    for name in living:
        assert tokens(service, name) == counters.seen[name][-1][1:3]
    for name in dead:
        assert lines(service, "replica")[name,].total.calls >= counters.at_least(name)

    def outcomes_of_calls() -> dict[str, int]:
        return {values[0]: line.total.calls for values, line in lines(service, "outcome").items()}

    outcomes = outcomes_of_calls()
    print(outcomes, flush=True)
    assert outcomes["ok"]
    assert outcomes["cancelled"]
    assert dead
    assert outcomes["lost"]
    # A process that has died is settled for by another one, by the rows that it has written.
    await asyncio.to_thread(wait_until, lambda: charged(service) == summed(service))
    print(f"quotas {charged(service)}, ledger {summed(service)}", flush=True)
    assert all(charged(service).values())
    assert ("handles",) in lines(service, "tenant")
    assert {("http",), ("handle",), ("batch",), ("warm_up",)} <= lines(service, "source").keys()


@pytest.mark.long
async def test_the_ledger_is_what_vllm_counts_through_the_death_of_a_replica(pair: Service) -> None:
    await compare(pair, [(ENGINE, signal.SIGKILL)], 0.0)


@pytest.mark.long
@pytest.mark.timeout(6 * FAULTS_S)
async def test_the_ledger_is_what_vllm_counts_through_minutes_of_faults(pair: Service) -> None:
    faults = [
        (ENGINE, signal.SIGKILL),
        (INGRESS, signal.SIGKILL),
        (CORE, signal.SIGKILL),
        (CORE, signal.SIGSTOP),
    ]
    await compare(pair, faults, FAULTS_S)


def test_the_command_sums_up_the_tenants_of_a_service(service: Service) -> None:
    headers = {"x-tenant": "table", "x-request-id": "ledger-1"}
    body = {"model": "demo", "prompt": "What is 47+28?", "max_tokens": 4, "ignore_eos": True}
    usage: JSON = httpx.post(
        f"{service.url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S
    ).json()["usage"]

    def found() -> list[Any]:
        arguments = ["usage", str(folder(service)), "--format", "json"]
        rows = json.loads(CliRunner().invoke(saturate, arguments).stdout)["rows"]
        return [row for row in rows if row["tenant"] == "table"]

    # A look at the ledger while the call runs finds its tokens so far.
    wait_until(lambda: ("table", "ok") in lines(service, "tenant", "outcome"))
    (row,) = found()
    assert (row["calls"], row["prompt_tokens"], row["output_tokens"]) == (
        1,
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
