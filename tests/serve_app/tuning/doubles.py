"""A profile with round numbers, and an engine behind HTTP in virtual time."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_app.engine.steps import StepTimes
from serve_app.simulation.profiles import Profile, Work

NUMBERS: dict[str, Any] = {
    "name": "numbers",
    "base_ms": 10.0,
    "per_prefill_token_ms": 0.05,
    "per_sequence_ms": 0.3,
    "per_kv_token_ms": 0.0005,
    "load_s": 0.0,
    "sleep_s": 0.0,
    "wake_s": 0.0,
    "kv_tokens": 60_000,
    "max_model_len": 16_000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
}


def profile(**changes: Any) -> Profile:
    """Return a profile with some numbers changed."""
    return Profile.model_validate(NUMBERS | changes)


# An engine behind HTTP


@dataclass(eq=False)
class Job:
    """A request of the engine behind HTTP."""

    prompt: int
    tokens: int
    at: float
    left: int
    made: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    waits: bool = False


class VirtualEngine(httpx.AsyncBaseTransport):
    """A service with an engine whose steps take the time of a profile on a clock of its own.

    A step is made once every client waits for it, so no time but that of the profile passes.

    Attributes:
        now: The clock.
        bodies: Bodies of the requests for answers.
        facts: The fields of `/stats` about the batcher, of those that differ.
        times: The times of steps that it has learned.
        noise: Factors of the time of steps, in turn.
    """

    def __init__(self, device: Profile, noise: Sequence[float] = (1.0,)) -> None:
        self.device = device
        self.now = 0.0
        self.bodies: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.times = StepTimes()
        self.noise = noise
        self._steps = 0
        self._jobs: list[Job] = []
        self._task: asyncio.Task[None] | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        match request.url.path:
            case "/v1/models":
                card = {"id": "m", "owned_by": "saturate", "kind": "llm", "parent": None}
                body = {"data": [card | {"max_model_len": self.device.max_model_len}]}
                return httpx.Response(200, json=body)
            case "/stats":
                return httpx.Response(200, json=self._stats())
            case _:
                body = json.loads(request.content)
                self.bodies.append(body)
                tokens = len(body["prompt"])
                at = self.now + self.device.request_ms / 1e3
                job = Job(tokens, body["max_tokens"], at, tokens)
                self._jobs.append(job)
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._run())
                return httpx.Response(200, stream=_Events(job))

    def _stats(self) -> dict[str, Any]:
        batcher = {
            "capacity": self.device.kv_tokens,
            "max_running": self.device.max_num_seqs,
            "running": 0,
            "queue_depth": 0,
            "total_submitted": len(self.bodies),
        }
        replica = {"batcher": batcher | self.facts, "load_s": 9.0}
        replica["max_num_batched_tokens"] = self.device.max_num_batched_tokens
        replica["scheduler"] = {
            "steps": self.times.steps,
            "step_error": self.times.error,
            "step_s": self.times.line._asdict(),
        }
        return {"models": {"m": {"replicas": [replica]}}}

    async def _run(self) -> None:
        while self._jobs:
            # Clients that got a token, or begin at the same time, come back within a few turns of the loop.
            for _ in range(30):
                await asyncio.sleep(0)
            if all(job.waits for job in self._jobs):
                self._step()

    def _step(self) -> None:
        device, ready = self.device, [job for job in self._jobs if job.at <= self.now]
        if not ready:
            self.now = min(job.at for job in self._jobs)
            ready = [job for job in self._jobs if job.at <= self.now]
        decoding = [job for job in ready if not job.left]
        budget = device.max_num_batched_tokens - len(decoding)
        context = sum(job.prompt + job.made for job in decoding)
        prefill, computed = 0, []
        for job in ready:
            if job.left and budget:
                chunk = min(job.left, budget)
                job.left -= chunk
                budget -= chunk
                prefill += chunk
                context += job.prompt - job.left
                computed.append(job)
        work = Work(prefill, len(decoding) + len(computed), context)
        seconds = device.step.seconds(work) * self.noise[self._steps % len(self.noise)]
        self.now += seconds
        self.times.learn(work, seconds)
        self._steps += 1
        for job in [*decoding, *(job for job in computed if not job.left)]:
            job.made += 1
            job.waits = False
            job.wake.set()
            if job.made == job.tokens:
                self._jobs.remove(job)


class _Events(httpx.AsyncByteStream):
    """Events of an answer, each once its token is made."""

    def __init__(self, job: Job) -> None:
        self._job = job

    async def __aiter__(self) -> AsyncIterator[bytes]:
        job, sent = self._job, 0
        while sent < job.tokens:
            if job.made == sent:
                job.waits = True
                job.wake.clear()
                await job.wake.wait()
            sent = job.made
            event = {"choices": [{"text": "a"}], "usage": {"completion_tokens": sent}}
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
