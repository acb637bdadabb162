"""The ledger against answers, quotas, metrics and vLLM's own counters, while replicas and engines die."""

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner

from serve_app.api.protocol import JSON
from serve_app.cli.main import saturate
from serve_app.ledger.report import LedgerFiles, ReportLine, Total
from serve_app.wire.usage import NONE, Tokens
from tests.e2e.fault_injection import CORE, all_busy, inject, wait_until_whole
from tests.e2e.load import BODY, PROMPTS
from tests.e2e.service import Service
from tests.e2e.services import FAULTS, KINDS, NODES, wait_until
from tests.e2e.test_faults import ENGINE, INGRESS
from tests.progress import ANSWER_S

LOST_S = 1.0
"""Seconds of which a crash may lose the rows."""

UNCHARGED_S = 3.0
"""Seconds of a killed Engine that its quotas or its rows may miss, and some for the look at them."""

FAULTS_S = 180.0
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
        shared: By replica, the tokens of prompts that vLLM counts for each answer, and the ledger once.
    """

    url: str
    seen: dict[str, list[tuple[float, int, int, int]]] = field(default_factory=dict)
    shared: Counter[str] = field(default_factory=Counter)

    def look(self) -> set[str]:
        """Look at all replicas; return those that answer."""
        at = time.time()
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

    def last(self, replica: str) -> tuple[int, int]:
        """Return the tokens in and out of a replica as the ledger counts them."""
        _, prompt, output, _ = self.seen[replica][-1]
        return prompt - self.shared[replica], output

    def at_least(self, replica: str) -> int:
        """Return the calls of a replica that has died whose rows have to be in the ledger."""
        seen = self.seen[replica]
        last = seen[-1][0] - LOST_S
        return max((calls for at, _, _, calls in seen if at <= last), default=0)


def folder(service: Service) -> Path:
    return Path(service.config["applications"][0]["args"]["usage"]["ledger"]["folder"])


def lines(service: Service, *by: str, since: datetime | None = None) -> dict[tuple[str, ...], ReportLine]:
    return {line.values: line for line in LedgerFiles(str(folder(service))).sums(by, since=since)}


def lines_of(service: Service, replica: str) -> dict[tuple[str, ...], ReportLine]:
    """Return the lines of a replica by tenant."""
    found = lines(service, "replica", "tenant")
    return {values[1:]: line for values, line in found.items() if values[0] == replica}


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
            body = BODY | {"prompt": PROMPTS[number % len(PROMPTS)], "stream": True}
            headers = {"x-tenant": "leavers"}
            with suppress(httpx.HTTPError):
                async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    async for _ in answer.aiter_lines():
                        if number % 3:
                            break
                        await asyncio.sleep(0.05)
                        break


def run_batch(service: Service, tenant: str = "default") -> Tokens:
    """Run a batch to its end; return what its answers say."""
    with openai.OpenAI(
        base_url=f"{service.url}/v1",
        api_key="none",
        max_retries=3,
        timeout=ANSWER_S,
        default_headers={"x-tenant": tenant},
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
        output = client.batches.retrieve(batch.id).output_file_id
        assert output
        answers = client.files.content(output).text.splitlines()
    return total(json.loads(line)["response"]["body"]["usage"] for line in answers)


def total(usages: Iterable[JSON]) -> Tokens:
    """Return the sums of what answers say."""
    sums = NONE
    for usage in usages:
        sums = sums.plus(Tokens(usage["prompt_tokens"], 0, usage.get("completion_tokens", 0)))
    return sums


def charged(service: Service, names: Iterable[str]) -> dict[str, int]:
    """Return the tokens of today that the quotas of tenants have."""
    limits = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["quotas"]["limits"]
    states = {name: limits.get(f"tenant {name}", {}).get("tokens_per_day") for name in names}
    return {name: one["limit"] - one["remaining"] if one else 0 for name, one in states.items()}


def summed(service: Service, names: Iterable[str]) -> dict[str, int]:
    """Return the tokens of today that the ledger has of tenants."""
    sums = dict.fromkeys(names, 0)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    for (day, name), line in lines(service, "day", "tenant").items():
        if day == today and name in sums:
            sums[name] += line.total.prompt_tokens + line.total.output_tokens
    return sums


def replicas_agree(service: Service, counters: Counters) -> bool:
    """Return whether the ledger has what the counters of all living replicas say, to the token."""
    return all(tokens(service, name) == counters.last(name) for name in counters.look())


async def compare(service: Service, faults: list[tuple[str, signal.Signals]], seconds: float) -> None:
    """Inject faults, and compare the ledger with the counters.

    Args:
        service: Two replicas with a ledger.
        faults: Processes and signals, one after the other.
        seconds: Time after which no further fault is injected, but each once.
    """
    counters = await asyncio.to_thread(begin, service)
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
        found_tokens, last = tokens(service, name), counters.last(name)
        print(
            f"{name}: {'dead' if name in dead else 'living'}, ledger {found_tokens}, vLLM {last}", flush=True
        )
    for name in living:
        assert tokens(service, name) == counters.last(name)
    for name in dead:
        assert lines(service, "replica")[name,].total.calls >= counters.at_least(name)

    def outcomes_of_calls() -> dict[str, int]:
        return {values[0]: line.total.calls for values, line in lines(service, "outcome").items()}

    outcomes = outcomes_of_calls()
    print(outcomes, flush=True)
    assert outcomes["ok"]
    assert outcomes["cancelled"]
    assert dead
    # An engine that dies alone leaves its replica, which writes the rows.
    assert outcomes["lost"]
    # Of the last seconds of a killed Engine, rows and charges may be missing.
    missing = 0
    for name in dead:
        since = datetime.fromtimestamp(counters.seen[name][-1][0] - UNCHARGED_S, UTC)
        if line := lines(service, "replica", since=since).get((name,)):
            missing += line.total.prompt_tokens + line.total.output_tokens

    def close() -> bool:
        quotas, ledger = charged(service, FAULTS), summed(service, FAULTS)
        return sum(abs(quotas[name] - ledger[name]) for name in FAULTS) <= missing

    await asyncio.to_thread(wait_until, close)
    print(
        f"quotas {charged(service, FAULTS)}, ledger {summed(service, FAULTS)}, missing {missing}", flush=True
    )
    assert all(charged(service, FAULTS).values())
    assert ("handles",) in lines(service, "tenant")
    assert {("http",), ("handle",), ("batch",), ("warm_up",)} <= lines(service, "source").keys()


# Every kind of request

BEAMS, STEPS = 3, 8
"""Beams of a search, and their tokens."""

ROUNDS = 20
"""Most rounds of streams until each replica has one."""

SHORT: JSON = {"model": "demo", "max_tokens": 20, "temperature": 0}

BODIES: dict[str, tuple[str, JSON]] = {
    "chats": ("/v1/chat/completions", SHORT | {"messages": [{"role": "user", "content": PROMPTS[0]}]}),
    "lists": ("/v1/completions", SHORT | {"prompt": PROMPTS[:4]}),
    # vLLM refuses several answers at temperature 0.
    "answers": ("/v1/completions", SHORT | {"prompt": PROMPTS[1], "n": 3, "temperature": 1}),
    "beams": (
        "/v1/completions",
        BODY | {"prompt": PROMPTS[2], "n": BEAMS, "use_beam_search": True, "max_tokens": STEPS},
    ),
    "vectors": ("/v1/embeddings", {"model": "minilm", "input": ["a cat", "two small cats"]}),
}


async def stream(
    client: httpx.AsyncClient, tenant: str, prompt: str, *, leaves: bool = False, **fields: int
) -> JSON:
    """Read a stream to its end; return what it says in its last event. Or leave it in its middle."""
    body = BODY | {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | fields
    usage: JSON = {}
    async with client.stream("POST", "/v1/completions", json=body, headers={"x-tenant": tenant}) as answer:
        async for line in answer.aiter_lines():
            if leaves and line.startswith("data: "):
                break
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usage = event.get("usage") or usage
    return usage


async def ask_all(client: httpx.AsyncClient) -> dict[str, Tokens]:
    """Send some requests of each kind; return what the answers say, by tenant."""

    async def ask(tenant: str) -> JSON:
        path, body = BODIES[tenant]
        answer = await client.post(path, json=body, headers={"x-tenant": tenant})
        assert answer.status_code == 200, answer.text
        usage: JSON = answer.json()["usage"]
        return usage

    told = {tenant: total(await asyncio.gather(*(ask(tenant) for _ in range(4)))) for tenant in BODIES}
    told["whole"] = total(await asyncio.gather(*(stream(client, "whole", each) for each in PROMPTS[:4])))
    await asyncio.gather(*(stream(client, "left", each, leaves=True) for each in PROMPTS[:4]))
    return told


async def kill_under_streams(service: Service, client: httpx.AsyncClient, counters: Counters) -> list[JSON]:
    """Kill a replica while nothing runs but streams, at each replica some; return what each stream says."""
    streams: list[asyncio.Task[JSON]] = []
    for _ in range(ROUNDS):
        # Long enough to run on when they are seen, and the kill comes.
        running = [asyncio.create_task(stream(client, "resumed", each, max_tokens=1_500)) for each in PROMPTS]
        streams += running
        while not any(each.done() for each in running):
            if await asyncio.to_thread(all_busy, service):
                os.kill(min(service.pids(ENGINE)), signal.SIGKILL)
                return await asyncio.gather(*streams)
        await asyncio.gather(*running)
        # A kill loses rows that are not written yet.
        await asyncio.to_thread(wait_until, lambda: settled(service, counters))
    raise AssertionError("no round had a stream at each replica")


def begin(service: Service) -> Counters:
    """Return the counters of a service that is whole and idle."""
    wait_until_whole(service)
    counters = Counters(service.url)

    def idle() -> bool:
        # Other tests have had several answers to one prompt.
        for name in counters.look():
            counters.shared[name] = counters.seen[name][-1][1] - tokens(service, name)[0]
        return all(tokens(service, name)[1] == counters.seen[name][-1][2] for name in counters.look())

    wait_until(idle)
    return counters


def metrics(service: Service) -> Counter[tuple[str, str]]:
    """Return the tokens of tenants by replica and kind, and the lost calls, as Prometheus would read them."""
    found: Counter[tuple[str, str]] = Counter()
    for node in service.run_python(NODES):
        for line in httpx.get(f"http://{node}/metrics", timeout=ANSWER_S).text.splitlines():
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if line.startswith("ray_saturate_usage_tokens_total"):
                found[labels["replica"], labels["kind"]] += int(float(line.split()[-1]))
            elif line.startswith("ray_saturate_lost_calls_total"):
                found["lost", labels["model"]] += int(float(line.split()[-1]))
    return found


def settled(service: Service, counters: Counters) -> bool:
    """Return whether ledger, metrics and vLLM's own counters of all living replicas agree, to the token."""
    living, seen = counters.look(), metrics(service)
    for name in living:
        rows = {tenant: line.total for (tenant,), line in lines_of(service, name).items()}
        output = sum(each.output_tokens for each in rows.values())
        # The warm-up has no tenant, and is in vLLM's counters alone.
        own = rows.pop("", Total())
        prompt = sum(each.prompt_tokens for each in rows.values())
        if seen[name, "prompt"] != prompt or seen[name, "output"] != output - own.output_tokens:
            return False
        # Several answers share a prompt, which vLLM counts for each of them.
        if output != counters.seen[name][-1][2]:
            return False
    return True


@pytest.mark.long
async def test_ledger_answers_quotas_and_metrics_agree_through_the_death_of_a_replica(pair: Service) -> None:
    counters = await asyncio.to_thread(begin, pair)
    lost = metrics(pair)["lost", "demo"]
    async with httpx.AsyncClient(base_url=pair.url, timeout=ANSWER_S) as client:
        told = await ask_all(client)
        # The rows of these calls are written, and their charges reported.
        await asyncio.to_thread(wait_until, lambda: settled(pair, counters))
        await asyncio.to_thread(wait_until, lambda: charged(pair, KINDS) == summed(pair, KINDS))
        streams = await kill_under_streams(pair, client, counters)
        await asyncio.to_thread(wait_until_whole, pair)
        for tenant, more in (await ask_all(client)).items():
            told[tenant] = told[tenant].plus(more)
    told["rows"] = await asyncio.to_thread(run_batch, pair, "rows")
    await asyncio.to_thread(wait_until, lambda: settled(pair, counters))
    sums = {name: line.total for (name,), line in lines(pair, "tenant").items() if name in KINDS}
    found = {name: Tokens(each.prompt_tokens, 0, each.output_tokens) for name, each in sums.items()}
    print(f"answers {told}\nledger {found}", flush=True)
    # All beams begin with one sample, which the answer has once for each.
    told["beams"] = told["beams"]._replace(output=told["beams"].output - (BEAMS - 1) * sums["beams"].calls)
    # The records of a function have a cost, which its answer calls prompt tokens.
    assert sums["vectors"].cost == told.pop("vectors").prompt
    # A stream that goes on has its tokens so far as its prompt. The call that was lost has no row.
    assert sum(found["resumed"]) == sum(total(streams))
    assert (sums["resumed"].calls, sums["left"].calls) == (len(streams), 8)
    assert {name: found[name] for name in told} == told
    assert (
        0 < await asyncio.to_thread(wait_until, lambda: metrics(pair)["lost", "demo"] - lost) < len(streams)
    )
    # The amounts that the killed Engine held are free after 30 s.
    await asyncio.to_thread(wait_until, lambda: charged(pair, KINDS) == summed(pair, KINDS))


@pytest.mark.long
@pytest.mark.timeout(12 * FAULTS_S)
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
