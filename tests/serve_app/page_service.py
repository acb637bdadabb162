"""A service for the tests of the page: real routes of the page, files and batches; models are played."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from batcher import BatchStats, ContinuousStats
from serve_app.api.errors import EXCEPTION_HANDLERS, RequestError
from serve_app.api.protocol import JSON
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.ingress.admin import check_admin
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.ingress.pages import page_routes, to_live_view, wants_page
from serve_app.ingress.status import own_part, with_totals
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Content, DiskContent
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.routes import BatchAPI
from serve_app.jobs.store import Store
from serve_app.rows.rows import RowAnswer, RowRequest
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.ingress import AccessSettings
from serve_app.telemetry.request_tracker import RequestTracker, TrackedRequest
from tests.ports import free_port
from tests.progress import STILL_S, wait_until

HOSTILE = '<img src=x onerror="document.title=1">'
"""A name that would run a script as markup."""

KEYS = {"ada": "sk-ada", "root": "sk-root"}

LLM = ContinuousStats(
    total_submitted=5200,
    total_completed=5000,
    total_failed=3,
    total_cancelled=17,
    total_rejected=41,
    queue_depth=12,
    queue_cost=1800,
    queue_classes={0: (9, 1300), 1: (3, 500)},
    running=48,
    running_cost=98_000,
    capacity=131_072,
    max_running=64,
    busy_time_s=300.0,
    wait_p50_s=0.012,
    wait_p99_s=1.4,
    run_p50_s=0.9,
    run_p99_s=4.2,
    ttft_p50_s=0.11,
    ttft_p99_s=0.48,
    output_tokens=100_000,
)
FUNCTION = BatchStats(
    total_completed=900, total_batches=100, avg_batch_size=9.0, padding_ratio=0.11, busy_time_s=20.0
)

LLM_ROUTES = ["/generate", "/v1/chat/completions", "/v1/completions"]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "demo": {"routes": LLM_ROUTES, "max_model_len": 2048},
    "thinker": {"routes": LLM_ROUTES},
    "minilm": {"routes": ["/process", "/v1/embeddings"], "kind": "function"},
    "reranker": {"routes": ["/v1/rerank", "/v1/score"]},
    HOSTILE: {"routes": LLM_ROUTES},
}


class Rows:
    """In place of the engines of the rows of batches.

    Attributes:
        free: Rows are answered while it is set.
    """

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row; one that asks to fail gets a 400."""
        await self.free.wait()
        text = request.body["messages"][0]["content"]
        if text == "fail":
            return RowAnswer(400, {"error": {"message": "no", "type": "invalid_request_error"}})
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return RowAnswer(200, {"choices": [{"message": {"content": text.upper()}}], "usage": usage})

    def base_of(self, model: str) -> str:
        """Return the model."""
        return model

    async def load(self, base: str | None) -> None:
        """Return no load."""

    async def refresh(self, wake: bool = False) -> Collection[str]:
        """Learn nothing."""
        return ()


class PageService:
    """The service, in a thread of its own. It can be stopped, and started again at its place.

    Args:
        folder: The place of files and batches; None: the service has none.
        keys: Whether it asks for one of `KEYS`.
        tenants: Tenants of the first model.
        replicas: Replicas of the first model.

    Attributes:
        asked: Each request: its method, path, and header of the key.
        bodies: The body of each chat.
        refuse: Answers that the next chats get in place of an answer.
        hold: A chat stops after its second word until this is set.
        left: Set when a client has left a chat.
    """

    def __init__(
        self, folder: Path | None = None, *, keys: bool = False, tenants: int = 2, replicas: int = 2
    ) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.bodies: list[JSON] = []
        self.refuse: list[RequestError] = []
        self.tenants = tenants
        self.replicas = replicas
        self._folder = folder
        self._port = free_port()
        self._step = 0
        self._store = self._access(keys)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server: uvicorn.Server | None = None
        self._serving: Any = None
        self._call(self._set_up())
        self.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self._port}/"

    @property
    def stats_asked(self) -> int:
        """How often the figures were asked for."""
        return sum(path == "/stats" for _, path, _ in self.asked)

    def start(self) -> None:
        """Listen."""
        config = uvicorn.Config(
            self._app, host="127.0.0.1", port=self._port, lifespan="off", log_config=None, access_log=False
        )
        self._server = server = uvicorn.Server(config)
        self._serving = asyncio.run_coroutine_threadsafe(server._serve(), self._loop)
        wait_until(lambda: server.started or self._serving.done(), every_s=0.01)

    def stop(self) -> None:
        """Listen no more, and break the connections."""
        assert self._server
        self._server.should_exit = self._server.force_exit = True
        self._serving.result(STILL_S)

    def close(self) -> None:
        """End the thread."""
        self.set_free()
        if not self._serving.done():
            self.stop()
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STILL_S)

    def hold_rows(self) -> None:
        """Answer no rows of batches."""
        self._loop.call_soon_threadsafe(self._rows.free.clear)

    def set_free(self) -> None:
        """Go on with rows and chats."""
        self._loop.call_soon_threadsafe(self._rows.free.set)
        self._loop.call_soon_threadsafe(self.hold.set)

    def hold_chats(self) -> None:
        """Answer chats with two words for now."""
        self._loop.call_soon_threadsafe(self.hold.clear)

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STILL_S)

    async def _end(self) -> None:
        if self._folder:
            self._runner.stop()
            await self._running

    @staticmethod
    def _access(keys: bool) -> KeyStore | None:
        if not keys:
            return None
        entries = [
            {"name": name, "sha256": hash_key(key.encode()), "tenant": "research", "admin": name == "root"}
            for name, key in KEYS.items()
        ]
        return KeyStore(AccessSettings(keys_env="KEYS"), environment={"KEYS": json.dumps(entries)})

    async def _set_up(self) -> None:
        self.hold = asyncio.Event()
        self.hold.set()
        self.left = threading.Event()
        self._rows = Rows()
        routes: list[BaseRoute] = [
            *page_routes(),
            Route("/v1/models", self._models),
            Route("/stats", self._stats),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/embeddings", self._embed, methods=["POST"]),
            Route("/v1/rerank", self._rerank, methods=["POST"]),
            Route("/process", self._process, methods=["POST"]),
            Route("/v1/admin/keys", self._keys),
            Route("/v1/admin/usage", self._usage),
        ]
        if self._folder:
            store = Store(self._folder)
            content = Content(self._folder, store.epoch, DiskContent(self._folder))
            settings = BatchesSettings(folder=str(self._folder))
            rules = KeyRules(set(MODELS), settings)
            runner = BatchRunner(store, content, self._rows, rules, tick_s=0.05)
            self._runner, self._running = runner, asyncio.create_task(runner.run())
            batches = BatchAPI(store, content, runner.notice, limits=lambda key: settings)
            routes.append(Mount("/", batches.app()))
        else:
            routes.append(Route("/v1/batches", self._off))
        self._app = Starlette(
            routes=routes,
            exception_handlers=EXCEPTION_HANDLERS,
            middleware=[
                Middleware(
                    RequestMiddleware, RequestTracker([], self._note), BodyBudget(1 << 30), access=self._store
                )
            ],
        )

    def _note(self, request: TrackedRequest) -> None:
        key = dict(request.scope["headers"]).get(b"authorization", b"").decode()
        self.asked.append((request.scope["method"], request.scope["path"], key))

    async def _off(self, request: Request) -> Response:
        message = "This service has no files and batches: its config has no `args.batches`"
        raise RequestError(404, "not_found_error", message)

    async def _models(self, request: Request) -> Response:
        usual = {"kind": "llm", "max_model_len": None, "parent": None}
        return JSONResponse({"data": [usual | {"id": name} | dict(more) for name, more in MODELS.items()]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.refuse:
            raise self.refuse.pop(0)
        return StreamingResponse(self._words(body), media_type="text/event-stream")

    async def _words(self, body: JSON) -> AsyncIterator[str]:
        def event(**fields: Any) -> str:
            return f"data: {json.dumps(fields)}\n\n"

        try:
            if body["model"] == "thinker":
                for text in ("Let me ", "think."):
                    yield event(choices=[{"delta": {"reasoning": text}}])
            words = f"You said <b>{body['messages'][-1]['content']}</b>, and that is fine.".split(" ")
            for place, word in enumerate(words):
                if place == 2:
                    await self.hold.wait()
                yield event(choices=[{"delta": {"content": word + " " * (place < len(words) - 1)}}])
                await asyncio.sleep(0.005)
            yield event(choices=[{"delta": {}, "finish_reason": "stop"}])
            details = {"cached_tokens": 4}
            usage = {"prompt_tokens": 14, "completion_tokens": len(words), "prompt_tokens_details": details}
            yield event(choices=[], usage=usage) + "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def _embed(self, request: Request) -> Response:
        texts = (await request.json())["input"]
        data = [{"index": place, "embedding": [0.125] * 384} for place, _ in enumerate(texts)]
        return JSONResponse({"data": data, "usage": {"prompt_tokens": 7}})

    async def _rerank(self, request: Request) -> Response:
        count = len((await request.json())["documents"])
        found = [{"index": place, "relevance_score": 0.9 - 0.5 * place} for place in range(count)]
        return JSONResponse({"results": found})

    async def _process(self, request: Request) -> Response:
        return JSONResponse({"results": (await request.json())["records"], "task_id": None})

    async def _stats(self, request: Request) -> Response:
        if wants_page(request.scope):
            return await to_live_view(request)
        self._step += 1
        health = {"asleep": {"state": "asleep"}, "new": {"state": "starting", "awaits": "an Engine replica"}}
        return JSONResponse(with_totals(own_part(self.report(), context_of(request.scope).caller), health))

    async def _keys(self, request: Request) -> Response:
        check_admin(request)
        assert self._store
        return JSONResponse({"object": "list", "data": self._store.describe(), "has_more": False})

    async def _usage(self, request: Request) -> Response:
        check_admin(request)
        numbers: JSON = {
            "calls": 12,
            "prompt_tokens": 1200,
            "cached_tokens": 300,
            "output_tokens": 4100,
            "cost": 0,
        }
        row: JSON = dict.fromkeys(request.query_params["by"].split(","), HOSTILE) | numbers
        row |= {"engine_s": 40.5, "price": "0.0061"}
        since = "2026-11-01T00:00:00+00:00"
        return JSONResponse({"since": since, "until": None, "currency": "EUR", "rows": [row], "total": row})

    def report(self) -> JSON:
        """Return the statistics, which grow with each request."""
        waves = (self._step * 7) % 11
        busy = replace(
            LLM,
            total_completed=5000 + 40 * self._step,
            output_tokens=100_000 + 2_000 * self._step,
            running=40 + waves,
            running_cost=90_000 + 2_000 * waves,
            busy_time_s=300.0 + 0.9 * self._step,
            ttft_p99_s=0.4 + 0.02 * waves,
        )
        calm = replace(busy, queue_depth=0, queue_classes={}, running=20, running_cost=41_000)
        sums = {"calls": 7, "prompt": 3_000, "cached": 1_200, "output": 40, "cost": 0}
        names = ["research", f"{HOSTILE}s", *(f"tenant-{number}" for number in range(self.tenants - 2))]
        tenants = {name: sums | {"prompt": 3_000 - place} for place, name in enumerate(names)}
        goals = {"ttft_p99_s": 0.5, "tpot_p99_s": 0.05}
        rates = {"over_s": 2.5, "requests_per_s": 40.0, "output_tokens_per_s": 2_000.0, "busy": 0.9}
        replicas = [
            {
                "replica": f"r{number:03}",
                "batcher": asdict(calm if number else busy),
                "goals": goals,
                "rates": rates,
            }
            for number in range(self.replicas)
        ]
        turn = {"replica": "t1", "turn": {"state": "asleep"}, "batcher": asdict(LLM)}
        return {
            "models": {
                "demo": {"replicas": [replicas[0] | {"usage": {"tenants": tenants}}, *replicas[1:]]},
                "minilm": {"replicas": [{"replica": "uo3am0dc", "batcher": asdict(FUNCTION)}]},
                "asleep": {"replicas": []},
                "new": {"replicas": []},
                "turns": {"replicas": [turn]},
                HOSTILE: {"replicas": [], "error": "no <i>answer"},
            },
            "batches": {
                "batches": {"in_progress": 2, "validating": 0},
                "rows": {"waiting": 1_200, "in_flight": 64, "completed": 30, "failed": 1},
                "rows_per_s": 12.5,
                "eta_s": 96.0,
                "oldest_s": 30.0,
                "late": 1,
            },
            "quotas": {
                "holders": 3,
                "limits": {
                    "key ada": {"max_concurrency": limit(8, 8, None)},
                    "tenant research": {
                        "tokens_per_day": limit(100_000, 4_000),
                        "tokens_per_minute": limit(900, 300),
                    },
                    "tenant other": {"tokens_per_minute": limit(900, 600)},
                },
            },
        }


def limit(most: int, remaining: int, ends_in_s: float | None = 40.0) -> JSON:
    """Return the state of a limit."""
    return {"limit": most, "remaining": remaining, "reserved": 0, "ends_in_s": ends_in_s}
