"""Values that follow from the settings of a model."""

import inspect
from pathlib import Path
from typing import Any

import pytest

from batcher import PROFILES, DynamicBatcher, profile
from serve_app.api.protocol import JSON
from serve_app.api.routes import POOLING, SCORE
from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.models import FunctionBatcherSettings, LLMSettings
from serve_app.settings.schema import SettingsError, parse


def model(**fields: Any) -> LLMSettings:
    """Return the settings of a language model."""
    (found,) = parse({"models": [{"id": "demo", "source": "x"} | fields]}).models
    assert isinstance(found, LLMSettings)
    return found


def test_the_demo_model_is_in_the_package_and_other_sources_go_to_vllm() -> None:
    path = Path(model(source="saturate://demo").path)
    assert (path / "config.json").is_file()
    assert path.parents[1].name == "serve_app"
    assert model(source="Qwen/Qwen2.5-7B-Instruct").path == "Qwen/Qwen2.5-7B-Instruct"
    simulated = {"id": "demo", "simulate": "h100-8b"}
    (played,) = parse({"models": [simulated]}).models
    assert (played.root, played.profile, model().profile) == ("saturate://demo", "h100-8b", None)


def test_options_of_the_engine_are_the_set_ones_also_false_and_zero() -> None:
    options = {"enable_prefix_caching": False, "seed": 0, "long_prefill_token_threshold": 0}
    found = model(engine=options | {"max_model_len": 5, "block_size": None}).engine
    assert (found.options(), found.free) == (options | {"max_model_len": 5}, options)
    assert model().engine.options() == model().sampling.sampling() == {}
    assert model(sampling={"temperature": 0}).sampling.sampling() == {"temperature": 0}


def test_the_longest_context_that_fits_is_known_after_the_start() -> None:
    assert (model(engine={"max_model_len": -1}).context, model(engine={"max_model_len": 5}).context) == (
        None,
        5,
    )


@pytest.mark.parametrize(
    ("nodes", "parallel", "stages", "share"),
    [(2, 8, 2, 8), (2, 4, 4, 8), (4, 8, 4, 8), (2, 16, 1, 8), (2, 1, 2, 1)],
)
def test_each_node_has_whole_stages_or_a_part_of_one(
    nodes: int, parallel: int, stages: int, share: int
) -> None:
    engine = {"tensor_parallel_size": parallel, "pipeline_parallel_size": stages}
    assert model(nodes=nodes, engine=engine).bundles == [{"CPU": share, "GPU": share}] * nodes


@pytest.mark.parametrize(("nodes", "parallel", "stages"), [(2, 1, 1), (2, 1, 3), (2, 4, 3), (3, 8, 2)])
def test_nodes_that_would_part_a_stage_unevenly_are_refused(nodes: int, parallel: int, stages: int) -> None:
    engine = {"tensor_parallel_size": parallel, "pipeline_parallel_size": stages}
    with pytest.raises(SettingsError, match=r"nodes: \d can't have equal parts of tensor_parallel_size"):
        model(nodes=nodes, engine=engine)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"simulate": "h100-7b"}, "simulate"),
        ({"share": "gpu"}, "share"),
        ({"adapters": [{"source": "a/b"}]}, "adapters"),
        ({"adapters_folder": "/adapters"}, "adapters"),
        ({"engine": {"distributed_executor_backend": "mp"}}, "engine.distributed_executor_backend"),
    ],
)
def test_what_needs_one_machine_is_refused_on_several_nodes(fields: JSON, name: str) -> None:
    engine = {"tensor_parallel_size": 2} | fields.get("engine", {})
    with pytest.raises(SettingsError, match=f"{name}: must be left out with nodes above 1"):
        model(**fields | {"nodes": 2, "engine": engine})


def test_a_replica_on_one_node_has_no_bundles() -> None:
    assert model(engine={"tensor_parallel_size": 8}).bundles == []


@pytest.mark.parametrize("name", [None, *PROFILES])
def test_settings_override_the_profile_of_a_function(name: str | None) -> None:
    batcher = FunctionBatcherSettings(profile=name, max_batch_size=100, priority_aging_s=None)
    chosen = profile(name) if name else {}
    assert batcher.arguments() == chosen | {"max_batch_size": 100, "priority_aging_s": None}


def test_the_settings_of_a_function_s_batcher_are_arguments_of_the_batcher() -> None:
    fields = set(FunctionBatcherSettings.model_fields) - {"profile"}
    assert fields <= set(inspect.signature(DynamicBatcher).parameters)


@pytest.mark.parametrize(
    ("engine", "routes"),
    [
        ({}, ()),
        ({"runner": "auto", "convert": "none"}, ()),
        ({"runner": "generate"}, ()),
        ({"runner": "pooling"}, POOLING),
        ({"convert": "embed"}, ("/v1/embeddings", *SCORE)),
        ({"runner": "pooling", "convert": "classify"}, ("/v1/classify", "/classify", *SCORE)),
    ],
)
def test_the_settings_name_the_routes_of_a_pooling_model(engine: JSON, routes: tuple[str, ...]) -> None:
    assert model(engine=engine).engine.pooling_routes == routes


# Adapters


@pytest.mark.parametrize(
    ("source", "name", "root"),
    [
        ("s3://bucket/a/words/", "words", "words"),
        ("/z/w", "w", "w"),
        ("org/x", "x", "org/x"),
        ("~/x", "x", "x"),
        ("gs://b/x", "x", "x"),
        ("az://c/x", "x", "x"),
        ("abfs://c@a/x", "x", "x"),
        ("hf://org/x", "x", "x"),
        ("https://h/x", "x", "x"),
    ],
)
def test_an_adapter_is_named_after_its_source_and_hides_its_place(source: str, name: str, root: str) -> None:
    (adapter,) = model(adapters=[{"source": source}]).adapters
    assert (list(adapters_by_id("demo", [adapter])), adapter.root) == ([f"demo:{name}"], root)
    (named,) = model(adapters=[{"source": source, "id": "y"}]).adapters
    assert list(adapters_by_id("demo", [named])) == ["y"]


def test_the_demo_adapters_are_in_the_package() -> None:
    (adapter,) = model(adapters=[{"source": "saturate://demo/letters"}]).adapters
    assert adapter.location.endswith("/serve_app/demo/adapters/letters")


@pytest.mark.parametrize(
    ("count", "fields", "slots"),
    [
        (2, {}, (2, 8)),
        (20, {}, (8, 32)),
        (100, {}, (8, 64)),
        (0, {"adapters_folder": "/kept"}, (4, 16)),
        (0, {"engine": {"enable_lora": True}}, (4, 16)),
        (2, {"engine": {"max_loras": 3, "max_cpu_loras": 5}}, (3, 5)),
    ],
)
def test_there_are_as_many_slots_as_adapters_within_bounds(
    count: int, fields: JSON, slots: tuple[int, int]
) -> None:
    found = model(adapters=[{"source": f"/a/{number}"} for number in range(count)], **fields)
    assert (found.slots, found.cpu_slots) == slots
    assert found.has_adapters


def test_an_engine_has_few_slots_and_none_without_adapters() -> None:
    assert model(adapters=[{"source": f"/a/{number}"} for number in range(9)]).slots == 8
    assert not model().has_adapters


# Turns


def test_models_of_a_group_share_its_settings() -> None:
    simulated = [{"id": f"m{number}", "simulate": "h100-8b", "share": "g"} for number in range(2)]
    group = {"sleep_level": 2, "min_turn_s": 1, "max_wait_s": 10, "self_check": True}
    settings = parse({"models": simulated, "share_groups": {"g": group}})
    assert [model.id for model in settings.sharing()["g"]] == ["m0", "m1"]
    assert settings.share_groups["g"].sleep_level == 2
    assert parse({"models": simulated}).share_groups == {}
