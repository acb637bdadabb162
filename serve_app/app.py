"""Application builder: the `import_path` of every config."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.engine.deployment import Engine
from serve_app.engine.function import FunctionEngine
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import BATCHES, QUOTAS, engine_name
from serve_app.jobs.deployment import Batches
from serve_app.quotas.deployment import Quotas
from serve_app.settings.environment import CLIENT_HEADERS, HARD_STOP, HOOK, MESSAGES, TRANSPORT
from serve_app.settings.models import FunctionSettings, LLMSettings, ModelSettings
from serve_app.settings.schema import Settings, SettingsError, parse
from serve_app.settings.turns import ShareSettings
from serve_app.system import ray_seams

logger = logging.getLogger("ray.serve")

UNBOUNDED = 100_000
"""Ray Serve's limit on ongoing requests, too high to be reached: the batchers bound their queues, by tokens,
and answer a refused request with the time after which to retry."""

HEALTH_CHECK_PERIOD_S = 1
"""Seconds between health checks: a dead replica is replaced at the next check, a failing one after three."""

ROUTER = "serve_app.ingress.replica_router:EngineRouter"
"""Chooses between the replicas of a language model, in every process with a handle to the model."""

ROUTING_STATS_PERIOD_S = 2.0
"""Seconds between two reports of a replica's tokens to the processes that choose between replicas."""

GRACE_S = float(os.environ.get(HARD_STOP.name, HARD_STOP.value))
"""Seconds in which a stopping replica may finish its answers: as long as HAProxy lets them run, so that one
setting bounds the length of a stream. A replica without requests stops at once."""

DRAIN_EVERY_S = 0.5
"""Seconds between two checks of a stopping replica for requests; it stops once it has no requests."""

BATCHES_GRACE_S = 15.0
"""Seconds in which the Batches deployment stops. The next replica sends unfinished rows again."""

BATCHES_ANSWERS_IN_S = 30.0
"""Seconds in which the Batches deployment answers a health check."""

KEEPER_GRACE_S = 5.0
"""Seconds in which the Quotas deployment stops; decisions then wait for the next replica."""

KEEPER_ANSWERS_IN_S = 10.0
"""Seconds in which the Quotas deployment answers a health check."""

INGRESS_RESOURCE = "SATURATE_INGRESS_RESOURCE"
"""Environment variable with the custom resource of Ray on nodes that may run an Ingress."""

QUIET = {"enable_access_log": False}
"""Logging without Ray Serve's access log; the Ingress writes its own line, see `TelemetrySettings`."""


NEEDED = tuple(variable.name for variable in (*TRANSPORT, CLIENT_HEADERS, MESSAGES))
"""Variables that every process has where the process that starts Ray has set `HOOK`, with any value."""

FIX = (
    f"Start Ray with {HOOK.name}={HOOK.value} in its environment, on each machine, or start the service with "
    "`saturate serve CONFIG`."
)


def build(args: dict[str, Any]) -> Application:
    """Return the application of a config: one Engine per model behind an Ingress, and Batches if wanted.

    Args:
        args: See `serve_app.settings.schema.Settings`.

    Raises:
        SettingsError: The args are wrong, or need a variable that the environment lacks.
        RuntimeError: This Ray is not the version in pyproject.toml, and lacks a name.
    """
    ray_seams.check()
    settings = parse(args)
    check_environment(settings)
    ingress = serve.deployment(
        max_ongoing_requests=UNBOUNDED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # An Ingress works in short steps, so an Ingress that misses three checks hangs.
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=DRAIN_EVERY_S,
        # New replicas are ready before old ones stop: an HAProxy that is being replaced knows only old
        # replicas, and sends them the requests of its open connections.
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 1, "resources": _ingress_resources()},
        logging_config=QUIET,
    )(serve.ingress()(Ingress))
    keeper = {"grace_s": KEEPER_GRACE_S, "answers_in_s": KEEPER_ANSWERS_IN_S}
    # Two replicas would grant the same tokens, or write the same files.
    quotas = _single(Quotas, QUOTAS, settings, **keeper) if settings.usage.quotas else None
    engines = {model.id: _engine(model, settings, quotas) for model in settings.models}
    more: list[Application] = []
    if settings.batches is not None:
        batches = {"grace_s": BATCHES_GRACE_S, "answers_in_s": BATCHES_ANSWERS_IN_S}
        more = [_single(Batches, BATCHES, settings, engines, quotas is not None, **batches)]
    return ingress.bind(settings, engines, *more, **({} if quotas is None else {"quotas": quotas}))


def _ingress_resources() -> dict[str, float]:
    """Return the resources that an Ingress replica requires, too small to limit the number of replicas."""
    name = os.environ.get(INGRESS_RESOURCE)
    return {name: 0.001} if name else {}


def _single(kind: type[Any], name: str, *args: Any, grace_s: float, answers_in_s: float) -> Application:
    """Return a deployment of one replica, which keeps the state that all other replicas share.

    Args:
        kind: Its class.
        name: Its name.
        args: Arguments of the class.
        grace_s: Seconds in which it stops.
        answers_in_s: Seconds in which it answers a health check.
    """
    deployment = serve.deployment(
        num_replicas=1,
        max_ongoing_requests=UNBOUNDED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=answers_in_s,
        graceful_shutdown_timeout_s=grace_s,
        graceful_shutdown_wait_loop_s=DRAIN_EVERY_S,
        # It mostly waits, and takes no core from a model.
        ray_actor_options={"num_cpus": 0, "resources": _ingress_resources()},
        logging_config=QUIET,
    )(kind)
    return deployment.options(name=name).bind(*args)


def _engine(model: ModelSettings, settings: Settings, quotas: Application | None) -> Application:
    kind: type[Any] = FunctionEngine
    router: dict[str, Any] = {}
    if not isinstance(model, FunctionSettings):
        kind = Engine
        router = {
            "request_router_class": ROUTER,
            "request_router_kwargs": {"prefixes": model.routing == "prefix"},
            "request_routing_stats_period_s": ROUTING_STATS_PERIOD_S,
        }
    deployment = serve.deployment(
        max_ongoing_requests=UNBOUNDED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # A burst may keep a replica from answering a health check for a while.
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=GRACE_S,
        graceful_shutdown_wait_loop_s=DRAIN_EVERY_S,
        logging_config=QUIET,
        request_router_config=RequestRouterConfig(**router),
    )(kind)
    more: dict[str, Any] = {} if quotas is None else {"quotas": quotas}
    if kind is Engine and settings.salts:
        more["salts"] = True
    if isinstance(model, LLMSettings) and model.bundles:
        # As few nodes as possible: Ray never splits a bundle. The replica is in the first one.
        deployment = deployment.options(
            placement_group_bundles=model.bundles,
            placement_group_strategy="PACK",
            ray_actor_options={"num_cpus": model.bundles[0]["CPU"]},
        )
    if model.share is not None:
        more["share"] = settings.share_groups.get(model.share, ShareSettings())
    return deployment.options(name=engine_name(model.id)).bind(
        model, settings.ingress.max_prompts, settings.telemetry, settings.usage, **more
    )


def check_environment(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning if Ray was started without the environment of this service.

    Args:
        settings: The args of the config.
        environment: The environment of the replicas.

    Raises:
        SettingsError: The service requires API keys, and couldn't trust the address of a client.
    """
    missing = [name for name in NEEDED if name not in environment]
    if not missing:
        return
    lacks = f"the environment of the replicas lacks {', '.join(missing)}"
    if settings.access and CLIENT_HEADERS.name in missing:
        raise SettingsError(
            f"access: {lacks}. Without {CLIENT_HEADERS.name} a client could claim any address, and "
            f"`allow_from` of an API key would not hold. {FIX}"
        )
    logger.warning(
        "This service runs, but %s. HTTP goes through Ray Serve's own proxy, which trusts headers of clients "
        "and does not send a request to another Ingress replica when one dies. %s",
        lacks,
        FIX,
    )
