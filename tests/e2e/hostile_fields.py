"""Sends odd values in each field of each route to a real engine, beside neighbours; prints what they cause.

A program of its own, since it takes an engine: `python -m tests.e2e.hostile_fields VALUES`, where VALUES is
the number of values for each field, or `all`.
"""

import asyncio
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from serve_app.api.errors import RequestError
from serve_app.api.facts import read
from serve_app.api.routes import GENERATE, MOVED
from serve_app.api.scheduling import Scheduling
from serve_app.engine.deployment import Engine
from serve_app.ingress.api_document import FILE
from serve_app.settings.ingress import IngressSettings
from serve_app.wire.request import RelayRequest
from tests.e2e.admitted_work import answer, report, started
from tests.e2e.fuzz_requests import ROUTES, TELLING, bounded
from tests.e2e.hostile_requests import FAIL_IN_ENGINE, OWN, TARGETED

HEADERS = [(b"content-type", b"application/json")]
LIMITS = IngressSettings()

AT_ONCE = 6
"""Hostile requests that run at once."""

GRAMMARS = {"structured_outputs", "response_format", "text", "tools"}
"""Fields whose values in `TARGETED` take seconds to compile."""

Case = tuple[str, dict[str, Any]]

PAIR = [1e-9, 1e-9]
XARGS: list[Any] = [
    *({"saturate_goals": value} for value in (5, "ab", ["x", "y"], PAIR, [1.0], [1, 2, 3], [-1.0, -1.0])),
    *({name: value} for name in ("kv_transfer_params", "ec_transfer_params") for value in ("x", 5, ["a"])),
    {"kv_cache_report_mode": ["full"], "session_id": 7},
    {"diffusion_canvas_length": "x", "diffusion_read_only": 1, "diffusion_max_steps": "x"},
    {"ngram_size": "x", "window_size": "y", "whitelist_token_ids": 5},
    {"deep": [[1]], "n": 2**70, "nan": float("nan"), "": ""},
]
"""Values of `vllm_xargs`: all names that vLLM or the service read, with other types than theirs."""

TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": True,
    "remote_engine_id": "x",
    "remote_block_ids": [1, 2],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
CHOSEN: dict[str, list[Any]] = {
    "vllm_xargs": XARGS,
    "kv_transfer_params": [TRANSFER],
    "ec_transfer_params": [TRANSFER],
}
"""Values that each route gets in any case: vLLM may keep fields that its schema hasn't."""

TOGETHER: list[Case] = [
    *FAIL_IN_ENGINE,
    *(
        (path, {"use_beam_search": True, "n": 2, "length_penalty": value, "temperature": heat})
        for path in ("/v1/completions", "/v1/chat/completions")
        for value, heat in ((-1e308, 0.0), (1e308, 0.0), (float("nan"), 0.0), (1.0, 1e308), (1.0, 1e-308))
    ),
]
"""Values that are wrong together."""

NEIGHBOURS = [f"What is {number}+{number + 3}?" for number in range(11, 19)]


def fields_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schemas of a route's fields, of all alternatives of its body together."""
    if path in OWN:
        return dict(OWN[path].model_json_schema()["properties"])
    (content,) = document["paths"][path]["post"]["requestBody"]["content"].values()
    found: dict[str, Any] = {}
    pending = [content["schema"]]
    while pending:
        schema = pending.pop()
        if reference := schema.get("$ref"):
            pending.append(document["schemas"][reference.rpartition("/")[2]])
        pending += [each for kind in ("anyOf", "oneOf", "allOf") for each in schema.get(kind, ())]
        found |= schema.get("properties", {})
    return found


def cases(document: dict[str, Any], most: int | None) -> Iterator[Case]:
    """Yield a route and the fields that are changed in its usual body.

    Args:
        document: The operations of the engine's routes, and their schemas.
        most: Values for each field, a sample that depends on route and field alone; None: all.
    """
    yield from TOGETHER
    usual = {MOVED.get(path, path): body for path, (body, _) in ROUTES.items()}
    for path in (GENERATE, *document["paths"]):
        assert path in usual, f"{path} has no usual body in tests/e2e/fuzz_requests.py"
        for name in dict.fromkeys([*fields_of(document, path), *CHOSEN, "unknown", "saturate_goals"]):
            values = [*TELLING, *(() if most and name in GRAMMARS else TARGETED.get(name, ()))]
            if most is not None:
                values = random.Random(f"{path} {name}").sample(values, most)
            for value in (*values, *CHOSEN.get(name, ())):
                yield path, {name: value}


class Run:
    """Hostile requests and their neighbours, in one engine.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._usual = {MOVED.get(path, path): body for path, (body, _) in ROUTES.items()}
        self.faults: list[str] = []
        self.wrong: list[str] = []
        self.statuses: dict[str, int] = {}
        self.beside = 0
        self.transfers: dict[str, list[str]] = {}
        self._done = False

    async def hostile(self, path: str, fields: dict[str, Any]) -> None:
        """Send a request; note a fault of the service."""
        text = json.dumps(bounded(self._usual[path] | fields)).encode(errors="surrogatepass")
        try:
            facts, text = read(text, path, LIMITS)
        except RequestError as error:
            # The Ingress refuses it. An Engine may not rely on that: an older Ingress may know no such rule.
            self._count(error.status)
            return
        request = RelayRequest("POST", path, b"", HEADERS, text, facts=facts)
        try:
            status, answered = await answer(self._engine, request)
        except TimeoutError:
            status, answered = 504, b"no answer"
        self._count(status)
        if any(value is TRANSFER for value in fields.values()):
            self.transfers.setdefault(path, []).append(f"{status} {answered.decode()[:200]}")
        if status >= 500 or b"internal_error" in answered or b"InternalServerError" in answered:
            self.faults.append(f"{path} {str(fields)[:200]}: {status} {answered[:300]!r}")

    def _count(self, status: int) -> None:
        self.statuses[str(status)] = self.statuses.get(str(status), 0) + 1

    async def neighbour(self, prompt: str, priority: int) -> str:
        """Return the answer to a prompt."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        text = json.dumps(body).encode()
        facts, text = read(text, "/v1/completions", LIMITS)
        scheduling = Scheduling(priority)
        request = RelayRequest("POST", "/v1/completions", b"", HEADERS, text, scheduling, facts=facts)
        status, answered = await answer(self._engine, request)
        return str(json.loads(answered)["choices"][0]["text"]) if status == 200 else str(answered[:300])

    async def neighbours(self, alone: dict[str, str], priority: int) -> None:
        """Ask until all hostile requests are answered; note answers that differ from those alone."""
        for prompt in itertools.cycle(NEIGHBOURS):
            if self._done or self._engine._engine.died:
                return
            text = await self.neighbour(prompt, priority)
            self.beside += 1
            if text != alone[prompt]:
                self.wrong.append(f"{prompt} (priority {priority}): {text!r}, alone {alone[prompt]!r}")

    async def all(self, asked: list[Case]) -> None:
        """Send all requests, a few at once, with live neighbours and rows beside them."""
        alone = {prompt: await self.neighbour(prompt, 0) for prompt in NEIGHBOURS}
        pending = iter(asked)

        async def some() -> None:
            for path, fields in pending:
                if self._engine._engine.died:
                    return
                await self.hostile(path, fields)

        self._done = False
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(self.neighbours(alone, priority)) for priority in (0, 1)]
            await asyncio.gather(*(some() for _ in range(AT_ONCE)))
            self._done = True
            await asyncio.gather(*beside)


def memory(field: str) -> dict[int, int]:
    """Return the bytes of this process and each of its children.

    Args:
        field: VmRSS: now; VmHWM: at most, since `forget_most`.
    """
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(FileNotFoundError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            found[process.pid] = sum(
                int(kb) << 10 for kb in re.findall(rf"^{field}:\s+(\d+)", status, re.MULTILINE)
            )
    return found


def forget_most() -> None:
    """Let the most memory of each process count from now on."""
    for pid in memory("VmRSS"):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


async def run() -> dict[str, Any]:
    """Return what the requests have caused."""
    engine = await started()
    try:
        run = Run(engine)
        most = None if sys.argv[1] == "all" else int(sys.argv[1])
        document = json.loads(FILE.read_text())["vllm"]
        paths = {path: found for path, found in document["paths"].items() if path in engine._routes}
        asked = list(cases(document | {"paths": paths}, most))
        forget_most()
        before = memory("VmRSS")
        # With goals, the scheduler reads what is told it; without, only what a client has written.
        await run.all(asked[::2])
        await engine.reconfigure({"batcher": {"goals": {"ttft_p99_s": 1.0, "tpot_p99_s": 0.05}}})
        await run.all(asked[1::2])
        return {
            "died": engine._engine.died,
            "asked": len(asked),
            "statuses": run.statuses,
            "faults": run.faults,
            "wrong": run.wrong,
            "transfers": run.transfers,
            "neighbours": run.beside,
            "left": engine._engine.batcher.stats.running,
            "memory": [most - before[pid] for pid, most in memory("VmHWM").items() if pid in before],
        }
    finally:
        await engine.__del__()


if __name__ == "__main__":
    report(run)
