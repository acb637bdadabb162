"""Stands for the parts of an Engine around its door: adapters, the check of grammars, vLLM's application."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from msgspec import structs

from batcher import ContinuousBatcher
from serve_app.api.errors import RequestError
from serve_app.api.facts import Facts
from serve_app.api.scheduling import Scheduling
from serve_app.engine.adapters import AdapterSlots
from serve_app.engine.answer import Answer
from serve_app.engine.door import STARTING, Door, EngineLanes
from serve_app.engine.job import Job, current
from serve_app.engine.openai import run
from serve_app.engine.replica import Replica
from serve_app.wire.frame import KEEP_ALIVE, Piece
from serve_app.wire.request import RelayRequest
from tests.batcher.virtual import now

BLOCK = 16
CONTEXT = 128
MAX_VALUES = 105
"""Most answers and logprobs in an answer."""

FACTS = Facts(size=2, prompt=10, prompts=1, answers=1, output=4, runs=True, tokens=14)
"""Facts of a short prompt: with its answer it takes one block."""

REQUEST = RelayRequest(
    # Clocks of machines differ: its age is zero, whatever the time.
    *("POST", "/v1/completions", b"", [], b"{}"),
    facts=FACTS,
    arrived_at=time.time() + 86_400.0,
)
"""A request of the smallest body."""


def new_job(request: RelayRequest = REQUEST, *, facts: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Return a job that arrives now.

    Args:
        request: Its request.
        facts: Fields of its facts.
        fields: Fields of its scheduling, and `adapter`, `body` and `resumes` of its request.
    """
    own = {name: fields.pop(name) for name in ("adapter", "body", "resumes") if name in fields}
    scheduling = Scheduling(**(request.scheduling._asdict() | fields))
    facts = (facts or {}) | ({"grammar": own["body"]} if "body" in own else {})
    request = replace(request, scheduling=scheduling, facts=structs.replace(request.facts, **facts), **own)
    return Job(request, began=now())


class PlayedAdapters:
    """Stands for the adapters of a VLLMEngine.

    Attributes:
        requests: Those that are served, by id.
        slots: Their places.
    """

    def __init__(self, slots: int = 2, served: Iterable[str] = ("demo:words", "demo:sums")) -> None:
        self.slots = AdapterSlots(slots)
        self.requests: dict[str, Any] = {id: SimpleNamespace(lora_name=id) for id in served}

    async def check(self, id: str) -> None:
        self.lora_request(id)

    def lora_request(self, id: str) -> Any:
        if id not in self.requests:
            there = ", ".join(["demo", *self.requests])
            raise RequestError(404, "not_found_error", f"no {id!r}; served here: {there}")
        return self.requests[id]

    def report(self) -> list[Any]:
        return []


class PlayedGrammars:
    """Refuses an open parenthesis."""

    async def check(self, kind: str, text: str, field: Callable[[], str]) -> None:
        if text == "(":
            raise RequestError(400, "invalid_request_error", "open", param=field())

    def stop(self) -> None:
        """Stop nothing."""


def grammar_body(seconds: float) -> bytes:
    """Return a body with a grammar whose check takes that long; a negative one is refused behind it."""
    return b'{"structured_outputs": {"regex": "%g"}}' % seconds


@dataclass
class Site:
    """A door with all that stands around it.

    Attributes:
        door: The door.
        batcher: Its order of what the engine runs.
        texts: Its order of jobs that run no model.
        adapters: Its adapters.
        checked: The times of the grammars that were checked.
        checking: The tenants of the jobs whose grammars are being checked.
        lanes: The needs of `batcher`.
        refusal: Refuses all jobs; None: it doesn't.
    """

    door: Door
    batcher: ContinuousBatcher
    texts: ContinuousBatcher
    adapters: PlayedAdapters
    lanes: EngineLanes
    refusal: RequestError | None = None
    checked: list[float] = field(default_factory=list)
    checking: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def placed(
        self, job: Job, prompt_tokens: int = BLOCK, max_tokens: int = 0, n: int = 1
    ) -> AsyncIterator[None]:
        """Hold a job from its admission to its end, as an Engine does."""
        try:
            await self.door.admit(job)
            await self.check(job)
            async with self.door.place(job, prompt_tokens, max_tokens, n):
                yield
        finally:
            if job.slot is not None and not job.placed:
                job.slot.release()

    async def check(self, job: Job) -> None:
        """Check the grammar of a job, as vLLM's client does before it asks for a place.

        Raises:
            RequestError: 400.
        """
        if not job.facts.grammar:
            return
        seconds, tenant = float(json.loads(job.request.body)["structured_outputs"]["regex"]), job.share
        if seconds in self.checked and seconds >= 0:
            return
        assert tenant not in self.checking, "a job waits in its slot for the grammar of another"
        self.checking.append(tenant)
        try:
            await asyncio.sleep(abs(seconds))
        finally:
            self.checking.remove(tenant)
        self.checked.append(seconds)
        if seconds < 0:
            raise RequestError(400, "invalid_request_error", "takes too long")

    async def run(self, job: Job, seconds: float = 1.0, **place: int) -> None:
        """Admit a job and run it for a time."""
        async with self.placed(job, **place):
            await asyncio.sleep(seconds)

    def check_free(self) -> None:
        """Check that nothing is held: no place, no cost, no adapter, no need."""
        stats = self.batcher.stats
        assert (stats.running, stats.running_cost, stats.queue_depth, stats.outside) == (0, 0, 0, 0)
        assert (self.texts.stats.running, self.texts.stats.queue_depth) == (0, 0)
        slots = self.adapters.slots
        needs = [
            *[f"grammar {tenant}" for tenant in ("default", "acme", "t")],
            *[f"adapter new-{number}" for number in range(slots.count)],
        ]
        for need in needs:
            assert self.lanes.take(need), need
        for need in needs:
            self.lanes.give(need)


@asynccontextmanager
async def opened(
    *, capacity: int = 1024, adapters: PlayedAdapters | None = None, **options: Any
) -> AsyncIterator[Site]:
    """Open a door.

    Args:
        capacity: Tokens that run at once.
        adapters: The adapters.
        options: Further arguments of the batcher.
    """
    adapters = adapters or PlayedAdapters()
    slots = adapters.slots
    lanes = EngineLanes(slots)
    most: dict[str, Any] = {"capacity": capacity, "oversize": "alone", "lanes": lanes, "clock": now} | options
    few: dict[str, Any] = {"capacity": 1, "max_running": STARTING, "lanes": EngineLanes(slots)}
    few["clock"] = most["clock"]
    async with ContinuousBatcher(**most) as batcher, ContinuousBatcher(**few) as texts:
        slots.on_change = batcher.reopen
        owner: Any = adapters
        door = Door(batcher, texts, owner, context=CONTEXT, blocks=blocks, max_values=MAX_VALUES)
        site = Site(door, batcher, texts, adapters, lanes)
        door.unfit = lambda: site.refusal
        yield site


def blocks(tokens: int) -> int:
    """Return tokens in whole blocks."""
    return -(-tokens // BLOCK) * BLOCK


@dataclass
class PlayedEngine:
    """Stands for a VLLMEngine."""

    door: Any = None
    generate: Any = None
    died: bool = False
    max_tokenize_tokens: int = 1_000
    default_output: int = 4
    max_model_len: int = CONTEXT
    max_num_batched_tokens: int = 2048
    load_s: float = 7.0
    adapters: PlayedAdapters = field(default_factory=PlayedAdapters)


class PlayedReplica(Replica):
    """A replica whose jobs are past their door: vLLM's application, or its double, answers.

    Args:
        app: The application.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.engine = PlayedEngine()

    async def answer(self, job: Job) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer to a job, without keep-alives."""
        answer = Answer(
            job.request, job.usage, refusal=lambda: self._refusal(job), lost=lambda: self.engine.died
        )
        async with aclosing(answer.pieces(self._make(job, answer))) as pieces:
            async for piece in pieces:
                if piece is not KEEP_ALIVE:
                    yield piece

    async def _answer(self, job: Job, answer: Answer) -> None:
        await run(self._app, job, answer)

    def _limited(self, job: Job) -> bool:
        return False

    def _refusal(self, job: Job) -> RequestError | None:
        return job.failure


def failing(status: int = 500, *, seen: Callable[[Job], object] = lambda job: None) -> Any:
    """Return an application that answers with an error.

    Args:
        status: Its status.
        seen: Called with the job.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        job = current()
        assert job is not None
        seen(job)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "oh"}}'})

    return app
