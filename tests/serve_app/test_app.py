"""The application of a config's `args`, and imports of its processes."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import BuiltApplication, build_app
from ray.serve.config import RequestRouterConfig

from serve_app.app import INGRESS_RESOURCE, NEEDED, ROUTER, build, check_environment
from serve_app.engine.deployment import Engine
from serve_app.engine.function import FunctionEngine
from serve_app.settings.environment import CLIENT_HEADERS, HAPROXY, HOOK
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError, parse
from serve_app.settings.telemetry import TelemetrySettings
from serve_app.settings.usage import UsageSettings
from tests.progress import run

DEMO = {"id": "demo", "source": "saturate://demo"}
OTHER = {"id": "org/other", "source": "org/other", "engine": {"max_num_seqs": 8}}

# The module is only imported in the model's replica.
FUNCTION = {"id": "rank", "kind": "function", "target": "no.such.module:Class"}


def built(*models: object, **sections: object) -> BuiltApplication:
    """Build as Ray Serve does, without actors."""
    return build_app(build({"models": list(models), **sections}), name="llm")


def test_one_engine_per_model_behind_an_ingress() -> None:
    app = built(DEMO, OTHER)
    names = {deployment.name for deployment in app.deployments}
    assert names == {"Ingress", "Engine:demo", "Engine:org/other"}
    assert app.ingress_deployment_name == "Ingress"


def test_an_ingress_runs_on_any_node_unless_the_cluster_names_a_resource(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def options() -> dict[str, Any]:
        (ingress,) = [deployment for deployment in built(DEMO).deployments if deployment.name == "Ingress"]
        asked: dict[str, Any] = ingress.ray_actor_options or {}
        return asked

    monkeypatch.delenv(INGRESS_RESOURCE, raising=False)
    assert options()["num_cpus"] == 1
    assert not options()["resources"]
    monkeypatch.setenv(INGRESS_RESOURCE, "front")
    assert options()["resources"].keys() == {"front"}


def test_each_engine_gets_its_own_model_and_the_limit_of_prompts() -> None:
    app = built(DEMO, OTHER, ingress={"max_prompts": 7})
    arguments: dict[str, Any] = {deployment.name: deployment.init_args for deployment in app.deployments}
    assert arguments["Engine:demo"] == (
        LLMSettings(id="demo", source="saturate://demo"),
        7,
        TelemetrySettings(),
        UsageSettings(),
    )
    model, *_ = arguments["Engine:org/other"]
    assert (model.id, model.engine.max_num_seqs) == ("org/other", 8)


def test_engines_part_their_caches_by_tenant_where_keys_tell_tenants_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CLIENT_HEADERS.name, CLIENT_HEADERS.value)
    for access, parted in (
        ({}, {}),
        ({"access": {"keys_env": "KEYS"}}, {"salts": True}),
        ({"access": {"keys_env": "KEYS", "share_prefix_cache": True}}, {}),
    ):
        app = built(DEMO, FUNCTION, **access)
        arguments: dict[str, Any] = {each.name: each.init_kwargs for each in app.deployments}
        assert (arguments["Engine:demo"], arguments["Engine:rank"]) == (parted, {})


def test_quotas_are_one_deployment_that_every_replica_reaches() -> None:
    assert "Quotas" not in {deployment.name for deployment in built(DEMO).deployments}
    app = built(DEMO, FUNCTION, usage={"quotas": {"folder": "/x"}})
    deployments: dict[str, Any] = {deployment.name: deployment for deployment in app.deployments}
    assert deployments["Quotas"].ray_actor_options["num_cpus"] == 0
    for name in ("Ingress", "Engine:demo", "Engine:rank"):
        assert deployments[name].init_kwargs["quotas"].deployment_name == "Quotas"
    assert deployments["Engine:demo"].init_args[3].quotas.folder == "/x"


def test_models_that_take_turns_have_the_settings_of_their_group() -> None:
    simulated = {"source": "saturate://demo", "simulate": "h100-8b", "share": "g"}
    groups = {"g": {"max_wait_s": 20}}
    app = built({"id": "a", **simulated}, {"id": "b", **simulated}, DEMO, share_groups=groups)
    deployments: dict[str, Any] = {deployment.name: deployment for deployment in app.deployments}
    for name in ("Engine:a", "Engine:b"):
        assert deployments[name].init_kwargs["share"].max_wait_s == 20
    assert deployments["Engine:demo"].init_kwargs == {}


def test_a_replica_on_several_nodes_has_a_bundle_on_each() -> None:
    engine = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    (deployment,) = [
        one for one in built(OTHER | {"nodes": 2, "engine": engine}).deployments if one.name != "Ingress"
    ]
    config: Any = deployment._replica_config
    assert config.placement_group_bundles == [{"CPU": 8, "GPU": 8}] * 2
    assert config.placement_group_strategy == "PACK"
    # The replica is in the first bundle, and its workers have the GPUs.
    assert config.ray_actor_options["num_cpus"] == 8
    assert not config.ray_actor_options.get("num_gpus")


def test_a_function_is_a_deployment_of_its_own_class() -> None:
    app = built(DEMO, FUNCTION, ingress={"max_prompts": 7})
    classes = {deployment.name: deployment.func_or_class for deployment in app.deployments}
    assert classes["Engine:demo"] is Engine
    assert classes["Engine:rank"] is FunctionEngine
    arguments: dict[str, Any] = {deployment.name: deployment.init_args for deployment in app.deployments}
    settings, most, *_ = arguments["Engine:rank"]
    assert (settings.id, settings.target, most) == ("rank", "no.such.module:Class", 7)


def test_the_ingress_knows_every_engine_by_its_model() -> None:
    app = built(DEMO, OTHER)
    ingress = next(deployment for deployment in app.deployments if deployment.name == "Ingress")
    arguments: Any = ingress.init_args
    settings, handles = arguments
    assert [model.id for model in settings.models] == ["demo", "org/other"]
    assert {model: handle.deployment_name for model, handle in handles.items()} == {
        "demo": "Engine:demo",
        "org/other": "Engine:org/other",
    }


def test_batches_are_one_replica_that_knows_every_engine(tmp_path: Path) -> None:
    app = built(DEMO, OTHER, batches={"folder": str(tmp_path)})
    deployments = {deployment.name: deployment for deployment in app.deployments}
    assert deployments.keys() == {"Ingress", "Batches", "Engine:demo", "Engine:org/other"}
    batches: Any = deployments["Batches"]
    assert batches.num_replicas == 1
    assert batches.ray_actor_options["num_cpus"] == 0
    settings, engines, quotas = batches.init_args
    assert quotas is False
    assert settings.batches.folder == str(tmp_path)
    assert engines["demo"].deployment_name == "Engine:demo"
    arguments: Any = deployments["Ingress"].init_args
    assert arguments[2].deployment_name == "Batches"


def test_a_database_is_imported_only_where_batches_run() -> None:
    script = """
import sys
import serve_app.app, serve_app.ingress.deployment, serve_app.jobs.deployment
serve_app.app.build({"models": [{"id": "demo", "source": "saturate://demo"}], "batches": {"folder": "/x"}})
databases = ("serve_app.jobs.", "psycopg", "sqlalchemy")
print(sorted(name for name in sys.modules if name.startswith(databases)))
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "['serve_app.jobs.deployment']\n", done.stderr


def test_saturate_batch_imports_neither_a_database_nor_ray() -> None:
    script = """
import sys
import serve_app.dataset.command, serve_app.dataset.run
print(sorted(name for name in ("psycopg", "ray", "sqlalchemy", "vllm") if name in sys.modules))
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "[]\n", done.stderr


def test_ray_serve_s_limits_are_above_the_batcher_s() -> None:
    for deployment in built(DEMO, FUNCTION).deployments:
        # The batcher's default queue, and the records that may run.
        assert deployment.max_ongoing_requests > 5_000 + 1_024
        assert deployment.max_queued_requests == -1


def test_a_stopping_replica_has_as_long_as_haproxy_lets_a_stream_run() -> None:
    script = """
from serve_app.app import build
from ray.serve._private.build_app import build_app
app = build_app(build({"models": [{"id": "demo", "source": "saturate://demo"}]}), name="llm")
print({d._deployment_config.graceful_shutdown_timeout_s for d in app.deployments})
"""
    env = os.environ | {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "777"}
    done = run([sys.executable, "-c", script], env=env)
    assert done.stdout == "{777.0}\n", done.stderr


def routers(*models: object) -> dict[str, Any]:
    """Return the router's class and arguments of each Engine."""
    return {
        deployment.name: (config.request_router_class, config.request_router_kwargs)
        for deployment in built(*models).deployments
        if (config := deployment._deployment_config.request_router_config) and deployment.name != "Ingress"
    }


def test_language_models_have_our_router_and_functions_have_ray_serve_s() -> None:
    assert routers(DEMO, OTHER | {"routing": "least_loaded"}, FUNCTION) == {
        "Engine:demo": (ROUTER, {"prefixes": True}),
        "Engine:org/other": (ROUTER, {"prefixes": False}),
        "Engine:rank": (RequestRouterConfig().request_router_class, {}),
    }


def test_an_unknown_routing_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match=r"models\[0\]\.routing.*'prefix' or 'least_loaded'"):
        built(DEMO | {"routing": "random"})


def test_wrong_args_fail_at_once() -> None:
    with pytest.raises(SettingsError, match=r"args\.models\[0\]\.batcher\.x: unknown key"):
        built(DEMO | {"batcher": {"x": 1}})


def test_neither_the_app_nor_the_ingress_imports_torch_or_vllm() -> None:
    """The check runs in a process of its own, since this one may have imported them."""
    script = """
import sys
import serve_app.app, serve_app.ingress.deployment, serve_app.engine.deployment, serve_app.engine.function
import serve_app.demo.minilm
embedder = {"id": "minilm", "kind": "function", "target": "serve_app.demo.minilm:MiniLM"}
serve_app.app.build({"models": [{"id": "demo", "source": "saturate://demo"}, embedder]})
heavy = {"torch", "vllm", "transformers", "tokenizers"}
print(sorted({name.partition(".")[0] for name in sys.modules} & heavy))
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "[]\n", done.stderr


def test_the_batcher_imports_nothing_of_the_rest() -> None:
    script = """
import sys
import batcher
rest = {"ray", "vllm", "starlette", "pydantic", "serve_app", "torch"}
print(sorted({name.partition(".")[0] for name in sys.modules} & rest))
"""
    done = run([sys.executable, "-c", script])
    assert done.stdout == "[]\n", done.stderr


# The check at the start of an application

GUARDED = {"models": [DEMO], "access": {"keys_env": "KEYS"}}
WHOLE = dict.fromkeys(NEEDED, "any")


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in WHOLE.items() if name not in names}


@pytest.mark.parametrize(
    ("args", "environment", "warned"),
    [
        (GUARDED, WHOLE | {HAPROXY.name: "0"}, []),
        ({"models": [DEMO]}, {}, NEEDED),
        # Without HAProxy the keys hold.
        (GUARDED, without(HAPROXY.name), [HAPROXY.name]),
    ],
)
def test_missing_variables_are_one_warning_with_the_fix(
    args: Any, environment: dict[str, str], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    check_environment(parse(args), environment)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(warned)
    if warned:
        assert f"lacks {', '.join(warned)}. " in said[0]
        assert f"{HOOK.name}={HOOK.value}" in said[0]


def test_api_keys_are_refused_where_a_client_could_claim_any_address() -> None:
    callback = CLIENT_HEADERS.name
    with pytest.raises(SettingsError, match=rf"^access: .*{callback}.*{HOOK.name}"):
        check_environment(parse(GUARDED), without(callback))
