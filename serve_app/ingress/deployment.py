"""The Ingress deployment: HTTP on one side, deployment handles on the other."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from serve_app.api.errors import EXCEPTION_HANDLERS, RequestError, path_of
from serve_app.api.facts import read
from serve_app.api.headers import KEEP_ALIVE
from serve_app.api.protocol import JSON
from serve_app.api.routes import GENERATE, MOVED, OPENAI, PROCESS, TOKENIZING
from serve_app.auth import bind_check
from serve_app.auth.key_store import KeyStore
from serve_app.ingress import batches
from serve_app.ingress.admin import Admin
from serve_app.ingress.api_document import DOCUMENT, PAGE, VERSION, APIDocument, versions
from serve_app.ingress.batches import Forward
from serve_app.ingress.body import BodyBudget, look, read_body
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.ingress.engine_call import EngineCall, EngineResponse, Engines
from serve_app.ingress.models import ServedModels
from serve_app.ingress.pages import DOCS_HEADERS, page_routes
from serve_app.ingress.status import BATCHES, QUOTAS, Health, Status, Waker, deployment_stats
from serve_app.quotas.client import Handle
from serve_app.settings.schema import Settings
from serve_app.system.cpu_scheduling import RELAY_NICE, use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.serve_logging import flush_warnings
from serve_app.telemetry.ingress import IngressTelemetry
from serve_app.telemetry.request_tracker import with_request_id
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"host"}
SECRET = {b"authorization", b"x-api-key", b"cookie"}
"""Headers that stay in the Ingress."""

LEFT_BEHIND = HOP_BY_HOP | SECRET

NOT_STORED = (
    "/v1/responses/{id}",
    "/v1/responses/{id}/{rest}",
    "/v1/chat/completions/{id}",
    "/v1/chat/completions/{id}/messages",
)
"""OpenAI's routes for answers that it has stored."""


class Ingress:
    """The HTTP front of the service: limits, routing by model, and the relay. It holds no model.

    Args:
        settings: The config's `args`.
        engines: The handle of each model's Engine, by model id.
        batch_handle: The handle of the Batches deployment; None: there is none.
        quotas: The handle of the Quotas deployment; None: there is none.
        engines_app: The Serve application of the Engines; None: the Ingress' own.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, DeploymentHandle[Any]],
        batch_handle: DeploymentHandle[Any] | None = None,
        quotas: Handle | None = None,
        engines_app: str | None = None,
    ) -> None:
        flush_warnings()
        self._settings = settings
        self._engines = dict(engines)
        context = serve.get_replica_context()
        profiles = {model.id: profile for model in settings.models if (profile := model.profile)}
        self._own = Health(context.app_name, list(self._engines), profiles)
        self._health = Health(engines_app, list(self._engines), profiles) if engines_app else self._own
        self._engines_of = {
            model: Engines(handle, partial(self._health.running, model))
            for model, handle in self._engines.items()
        }
        self._batches = None if batch_handle is None else Forward(batch_handle, self._running(BATCHES))
        self._telemetry = IngressTelemetry(settings.telemetry, context.replica_tag)
        self._bodies = BodyBudget(settings.ingress.bytes_in_flight)
        self._document = APIDocument(settings, list(self._engines))
        self._access = KeyStore(settings.access, quotas=quotas is not None) if settings.access else None
        if self._access:
            self._access.watch()
        elif warning := bind_check.warning(bind_check.serve_host(), keys=False):
            logger.warning(warning)
        others: dict[str, Callable[[], Awaitable[JSON]]] = {}
        if self._batches is not None:
            others["batches"] = self._batches.stats
        if quotas is not None:
            others["quotas"] = partial(deployment_stats, QUOTAS, quotas, self._running(QUOTAS))
        self._status = Status(self._health, self._engines, others)
        self._models = ServedModels(settings.models, self._status.replicas, Waker(self._engines).wake)
        self._admin = Admin(settings, self._access, self._engines, self._health.running, self._models)
        use_batch_scheduling(RELAY_NICE)
        collect_rarely()

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application that Serve runs in this replica."""
        app = Starlette(
            # The router tries one after the other: the most frequent ones go first. Other routes of vLLM's
            # application, its administration above all, can't be reached.
            routes=[
                *(Route(path, self._answer, methods=["POST"]) for path in OPENAI[:2]),
                Route(GENERATE, self._answer, methods=["POST"]),
                *self._status.routes(),
                Route(PROCESS, self._answer, methods=["POST"]),
                Route("/metrics", _no_metrics),
                Route(VERSION, self._versions),
                Route(DOCUMENT, self._describe),
                Route(PAGE, self._describe),
                *page_routes(),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{model:path}", self._model),
                *self._admin.routes(),
                *(Route(path, self._answer, methods=["POST"]) for path in OPENAI[2:]),
                *(Route(path, self._answer, methods=["POST"]) for path in TOKENIZING),
                *(
                    Route(path, self._forward, methods=list(methods))
                    for path, methods in batches.ROUTES.items()
                ),
                *(Route(path, _not_stored, methods=["GET", "POST", "DELETE"]) for path in NOT_STORED),
            ],
            middleware=[
                Middleware(
                    RequestMiddleware,
                    self._telemetry.tracker,
                    self._bodies,
                    access=self._access,
                    origins=self._settings.ingress.allow_origins,
                )
            ],
            exception_handlers=EXCEPTION_HANDLERS,
            lifespan=self._telemetry.lifespan,
        )
        # It would redirect to http behind a proxy that ends TLS, and the middleware has done its work.
        app.router.redirect_slashes = False
        return app

    async def check_health(self) -> None:
        """Raise if the API keys are followed no more, so that Serve replaces this replica."""
        if self._access:
            self._access.check()

    async def _versions(self, request: Request) -> Response:
        return JSONResponse(versions())

    async def _describe(self, request: Request) -> Response:
        prefix: str = request.scope.get("root_path", "")
        if path_of(request.scope) == PAGE:
            return HTMLResponse(self._document.page(prefix), headers=DOCS_HEADERS)
        return Response(self._document.text(prefix), media_type="application/json")

    def _running(self, deployment: str) -> Callable[[], Awaitable[int]]:
        return partial(self._own.running_other, deployment)

    async def _forward(self, request: Request) -> Response:
        if self._batches is None:
            raise batches.off()
        headers = [(name, value) for name, value in request.scope["headers"] if name not in LEFT_BEHIND]
        return await self._batches.answer(request, path_of(request.scope), headers)

    async def _list_models(self, request: Request) -> Response:
        await self._models.refresh()
        visible = self._models.visible(context_of(request.scope).models)
        names = [name for name in visible if self._models.base_of(name) in self._engines]
        cards = await asyncio.gather(*map(self._models.card, names))
        return JSONResponse({"object": "list", "data": cards})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        await self._models.learn(name)
        return JSONResponse(await self._models.card(name, context_of(request.scope).models))

    async def _answer(self, request: Request) -> Response:
        """Answer a request of a model's route."""
        limits = self._settings.ingress
        body = await read_body(request, limits)
        path = path_of(request.scope)
        content_type, stated = request.headers.get("content-type", ""), request.query_params.get("model", "")
        reading = partial(read, body, path, limits, content_type=content_type, model=stated)
        facts, body = await look(len(body), reading)
        path = MOVED.get(path, path)
        context = context_of(request.scope)
        await self._models.learn(facts.model)
        name = self._models.choose(facts.model, path, context.models)
        chosen = self._models.base_of(name)
        given = with_request_id(request.scope)
        scheduling = context.scheduling(given, facts.scheduling)
        adapter = "" if name == chosen else name
        facts = facts.cached_for(adapter, scheduling.tenant if self._settings.salts else "")
        headers = [(k, v) for k, v in given if k not in LEFT_BEHIND]
        headers = self._telemetry.assign(context, name, scheduling, headers)
        relayed = RelayRequest(
            request.method,
            path,
            request.scope["query_string"],
            headers,
            body,
            scheduling,
            max_tokens=limits.max_tokens,
            facts=facts,
            adapter=adapter,
            key=context.key_name,
            quota=context.caller.key.quota if context.caller else None,
        )
        keep_alive = path in {GENERATE, PROCESS} and KEEP_ALIVE in request.headers
        died = partial(self._telemetry.lost_calls.update, [chosen])
        return EngineResponse(
            EngineCall(self._engines_of[chosen].ask, relayed, died=died), keep_alive=keep_alive
        )


async def _not_stored(request: Request) -> Response:
    message = (
        f"{path_of(request.scope)}: answers are not stored here, whatever `store` says; keep the answer, and "
        "send the conversation so far with the next request"
    )
    raise RequestError(404, "not_found_error", message, param="store")


async def _no_metrics(request: Request) -> Response:
    message = (
        "GET /metrics: the service's metrics and vLLM's are on Ray's Prometheus endpoint, one per node: "
        "the metrics_export_port of `ray start`, and prom_metrics_service_discovery.json in Ray's folder"
    )
    raise RequestError(404, "not_found_error", message)
