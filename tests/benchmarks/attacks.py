"""One tenant's probe beside another's attack: ``python -m tests.benchmarks.attacks --help``.

A probe is a chat of eight tokens on a connection of its own, each half a second. It runs alone first, then
beside each attack, which comes from another process, another key and other addresses of loopback. A probe
without an answer within two seconds, or with another status than 200, is a defect.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from batcher.stats import percentiles
from serve_app.auth.keys import hash_key, new_key
from tests.benchmarks import command
from tests.benchmarks.measuring import progress
from tests.benchmarks.report import machine, versions
from tests.e2e.service import Service
from tests.e2e.services import local

EVERY_S, WITHIN_S = 0.5, 2.0
PATIENCE_S = 120.0
CONNECTIONS, SOURCES = 4_200, 42


@dataclass(frozen=True)
class Target:
    """The service, as an attack needs it.

    Attributes:
        port: Its HTTP port on loopback.
        statistics: The port of HAProxy's statistics.
        key: The attacker's API key.
        engines: Ids of the processes `VLLM::EngineCore`.
        seconds: How long to attack.
    """

    port: int
    statistics: int
    key: str
    engines: tuple[int, ...]
    seconds: float


Attack = Callable[[Target], Coroutine[Any, Any, Counter[str]]]
"""Attacks for a time; returns how many of each end its requests had."""


@dataclass
class Seen:
    """The probes of one run.

    Attributes:
        seconds: Time of each answer of status 200.
        failures: The other ends, by name.
    """

    seconds: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        """Whether every probe had its answer in time."""
        return not self.failures and max(self.seconds, default=PATIENCE_S) <= WITHIN_S

    def row(self) -> dict[str, Any]:
        """Return the figures, in milliseconds."""
        p50, p99, most = (round(1000 * at) for at in percentiles(self.seconds, (0.5, 0.99, 1.0)))
        return {
            "probes": len(self.seconds) + self.failures.total(),
            "p50_ms": p50,
            "p99_ms": p99,
            "max_ms": most,
            "failed": dict(self.failures),
        }


async def probe(port: int, key: str, seconds: float) -> Seen:
    """Send probes for a time, each when it is due, and return what came of them."""
    seen = Seen()
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 47+28?"}], "max_tokens": 8}

    async def one() -> None:
        began = time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                answer = await client.post(
                    f"http://127.0.0.1:{port}/v1/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {key}"},
                )
        except httpx.HTTPError as error:
            seen.failures[type(error).__name__] += 1
            return
        if answer.status_code == 200:
            seen.seconds.append(time.monotonic() - began)
        else:
            seen.failures[f"status {answer.status_code}"] += 1

    probes = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        probes.append(asyncio.create_task(one()))
        await asyncio.sleep(EVERY_S)
    await asyncio.gather(*probes)
    return seen


async def send(target: Target, path: str, body: bytes, answers: Counter[str]) -> None:
    """Send a request of the attacker and count its answer."""
    headers = {"authorization": f"Bearer {target.key}", "content-type": "application/json"}
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.66")
    async with httpx.AsyncClient(timeout=PATIENCE_S, transport=transport) as client:
        try:
            answer = await client.post(f"http://127.0.0.1:{target.port}{path}", content=body, headers=headers)
        except httpx.HTTPError as error:
            answers[type(error).__name__] += 1
            return
    answers[f"status {answer.status_code}"] += 1


def posts(path: str, copies: int, **body: Any) -> Attack:
    """Return an attack by equal requests that are sent at once.

    Args:
        path: The route.
        copies: The number of requests.
        body: The fields of the body, beside the model.
    """

    async def attack(target: Target) -> Counter[str]:
        content, answers = json.dumps({"model": "demo", **body}).encode(), Counter[str]()
        await asyncio.gather(*(send(target, path, content, answers) for _ in range(copies)))
        return answers

    return attack


def chat(words: str) -> list[dict[str, str]]:
    """Return a chat of one message."""
    return [{"role": "user", "content": words}]


def connections(statistics: bool, first: bytes) -> Attack:
    """Return an attack by connections that stay.

    Args:
        statistics: Whether they go to HAProxy's statistics, else to the service.
        first: What each sends.
    """

    async def attack(target: Target) -> Counter[str]:
        answers, held = Counter[str](), list[socket.socket]()
        port = target.statistics if statistics else target.port
        ends = time.monotonic() + target.seconds
        for number in range(CONNECTIONS):
            one = socket.socket()
            one.settimeout(1.0)
            one.bind((f"127.0.1.{number % SOURCES + 1}", 0))
            try:
                one.connect(("127.0.0.1", port))
                one.sendall(first)
                answers["connected"] += 1
            except OSError as error:
                answers[type(error).__name__] += 1
            held.append(one)
            if time.monotonic() > ends:
                break
        await asyncio.sleep(max(0.0, ends - time.monotonic()))
        for one in held:
            one.close()
        return answers

    return attack


async def death(target: Target) -> Counter[str]:
    """Kill the only engine."""
    for pid in target.engines:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(target.seconds)
    return Counter({"killed": len(target.engines)})


NUMBERS = {"prompt": "a", "max_tokens": 1, "vllm_xargs": {"a": [1] * 4_900_000}}
"""Ten megabytes of numbers that nothing reads."""

REPETITIONS = {
    "prompt": "a",
    "max_tokens": 1950,
    "structured_outputs": {"regex": "a{950}ba{950}"},
    "repetition_detection": {"max_pattern_size": 1000, "min_pattern_size": 480, "min_count": 2},
}
"""A detector compares long answers with themselves, almost to the end, at each token."""

PADDING = {"tokenize": True, "return_dict": True, "padding": "max_length", "max_length": 10_000_000}
"""Arguments of the function that applies a chat template: a gigabyte, and not the end of the machine."""

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

ATTACKS: dict[str, Attack] = {
    "goals of the scheduler that are no numbers": posts(
        COMPLETIONS, 2, prompt="a", max_tokens=1, vllm_xargs={"saturate_goals": 5}
    ),
    "goals of the scheduler that stop all rows": posts(
        COMPLETIONS, 2, prompt="a", max_tokens=100, vllm_xargs={"saturate_goals": [1e-9, 1e-9]}
    ),
    "a chat padded to 10 million tokens": posts(CHATS, 1, messages=chat("a"), chat_template_kwargs=PADDING),
    "logprobs of 60 prompts": posts(
        COMPLETIONS, 1, prompt=["a+b " * 375] * 60, prompt_logprobs=20, max_tokens=1
    ),
    "32 answers with logprobs": posts(
        CHATS, 1, messages=chat("a"), n=32, max_tokens=300, logprobs=True, top_logprobs=20, ignore_eos=True
    ),
    "10,000 prompts with two answers each": posts(COMPLETIONS, 1, prompt=["a"] * 10_000, n=2, max_tokens=1),
    "1 body of 10 MB of numbers": posts(COMPLETIONS, 1, **NUMBERS),
    "3 bodies of 10 MB of numbers": posts(COMPLETIONS, 3, **NUMBERS),
    "15 bodies of 10 MB of numbers": posts(COMPLETIONS, 15, **NUMBERS),
    "16 streams with repetition_detection": posts(COMPLETIONS, 16, **REPETITIONS),
    "4,200 heads half sent": connections(False, b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"),
    "4,200 idle connections": connections(False, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"),
    "4,200 idle connections to the statistics": connections(True, b""),
    "the only engine killed": death,
}
"""The attacks by name; the last one leaves probes that wait for another engine."""


def run_attack(name: str, target: Target, answers: Any) -> None:
    """Run an attack in a process of its own."""
    answers.put(dict(asyncio.run(ATTACKS[name](target))))


def statistics_port(service: Service) -> int:
    """Return the port of HAProxy's statistics."""
    return int(service.env["RAY_SERVE_HAPROXY_STATS_PORT"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command.parser("tests.benchmarks.attacks", (__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--only", metavar="WORDS", default="", help="attacks whose name has these words")
    parser.add_argument("--seconds", type=command.above_0, default=40.0, help="seconds of each attack")
    options = parser.parse_args(arguments)
    names = [name for name in ATTACKS if options.only in name]
    if not names:
        parser.error(f"--only {options.only!r} names none of: {', '.join(ATTACKS)}")
    keys = {name: new_key() for name in ("probe", "attacker")}
    content, app, _ = local()
    entries = [{"name": name, "sha256": hash_key(key.encode()), "tenant": name} for name, key in keys.items()]
    found: dict[str, Any] = {"machine": machine(), "versions": versions(), "rows": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "keys.yaml")
        path.write_text(yaml.safe_dump(entries))
        app["args"]["access"] = {"keys_file": str(path)}
        progress("starting the service")
        service = Service(content, Path(folder))
        try:
            bad = [
                name
                for name in ["", *names]
                if not measure(service, name, keys, options.seconds, found["rows"])
            ]
        finally:
            service.stop()
    print(json.dumps(found, indent=2))
    return bool(bad)


def measure(service: Service, name: str, keys: dict[str, str], seconds: float, rows: dict[str, Any]) -> bool:
    """Probe beside an attack, or alone; return whether the probes held."""
    port = int(service.url.rpartition(":")[2])
    target = Target(
        port, statistics_port(service), keys["attacker"], tuple(service.pids("VLLM::EngineCore")), seconds
    )
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    attacker = spawn.Process(target=run_attack, args=(name, target, answers))
    if name:
        attacker.start()
    seen = asyncio.run(probe(port, keys["probe"], seconds))
    row = seen.row()
    if name:
        row["attack"] = answers.get(timeout=PATIENCE_S * 2)
        attacker.join()
    rows[name or "alone"] = row
    progress(f"{name or 'alone'}: {json.dumps(row)}")
    # A lone engine that was killed comes back in its own time; the probes wait, and none may fail.
    return not seen.failures if name == "the only engine killed" else seen.good


if __name__ == "__main__":
    sys.exit(main())
