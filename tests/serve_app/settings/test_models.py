import inspect

import pytest

from batcher import PROFILES, DynamicBatcher, profile
from serve_app.api.protocol import JSON
from serve_app.api.routes import POOLING, SCORE
from serve_app.settings.models import (
    BatcherSettings,
    EngineSettings,
    FunctionBatcherSettings,
    FunctionSettings,
)
from serve_app.settings.schema import parse
from tests.serve_app.settings.helpers import function, mistakes, one, only


def test_an_option_of_false_or_zero_is_an_option_that_was_set() -> None:
    model = only(one(engine={"enable_prefix_caching": False, "seed": 0, "long_prefill_token_threshold": 0}))
    assert model.engine.options() == {
        "enable_prefix_caching": False,
        "seed": 0,
        "long_prefill_token_threshold": 0,
    }


@pytest.mark.parametrize("name", [None, *PROFILES])
def test_settings_override_the_profile_of_a_function(name: str | None) -> None:
    batcher = FunctionBatcherSettings(profile=name, max_batch_size=100, priority_aging_s=None)
    chosen = profile(name) if name else {}
    assert batcher.arguments() == chosen | {"max_batch_size": 100, "priority_aging_s": None}


def test_every_setting_of_a_function_s_batcher_is_an_argument_of_the_batcher() -> None:
    fields = set(FunctionBatcherSettings.model_fields) - {"profile"}
    assert fields <= set(inspect.signature(DynamicBatcher).parameters)


def test_weights_and_ageing_of_both_kinds() -> None:
    fields = {"tenant_weights": {"jo": 2.0, "x": 1}, "priority_aging_s": None}
    assert only(one(batcher=fields)).batcher.tenant_weights == {"jo": 2.0, "x": 1}
    assert only(one(batcher=fields)).batcher.priority_aging_s is None
    (model,) = parse(function(batcher=fields)).models
    assert isinstance(model, FunctionSettings)
    assert model.batcher.arguments() == fields
    assert BatcherSettings().priority_aging_s == 10.0


@pytest.mark.parametrize("names", [["ttft_p99_s"], ["tpot_p99_s"], ["ttft_p99_s", "tpot_p99_s"]])
def test_a_goal_may_be_for_the_first_token_or_for_each_further_one(names: list[str]) -> None:
    batcher = only(one(batcher={"goals": dict.fromkeys(names, 0.3)})).batcher
    assert batcher.goals is not None
    assert batcher.goals.model_dump(exclude_none=True) == dict.fromkeys(names, 0.3)
    assert batcher.priority_aging_s == 10.0


def test_goals_without_a_goal_are_a_mistake() -> None:
    (line,) = mistakes(one(batcher={"goals": {}}))
    assert line.endswith("batcher.goals: must have ttft_p99_s, tpot_p99_s, or both"), line


def test_settings_of_a_batcher_that_contradict_each_other() -> None:
    (line,) = mistakes(function(batcher={"min_batch_size": 9, "max_batch_size": 8}))
    assert line == "args.models[0].batcher: min_batch_size must be at most max_batch_size=8, not 9"


def test_keys_of_one_kind_are_unknown_to_the_other() -> None:
    (line,) = mistakes(one(target="a:B"))
    assert line.startswith("args.models[0].target: unknown key; configs/reference.md has them all")
    (line,) = mistakes(function(source="x"))
    assert line.startswith("args.models[0].source: unknown key; allowed here: id, kind, target")


def test_an_unknown_kind_is_an_error_with_the_known_ones() -> None:
    assert mistakes(one(kind="lm")) == ["args.models[0].kind: Input should be 'llm' or 'function', not 'lm'"]


def test_the_error_of_a_value_has_the_range() -> None:
    (line,) = mistakes(one(engine={"gpu_memory_utilization": 1.5}))
    assert "less than or equal to 1" in line
    (line,) = mistakes(one(batcher={"policy": "x"}))
    assert "'guaranteed_no_evict' or 'max_utilization'" in line


@pytest.mark.parametrize(
    "host", ["https://a.example", "a.example:80", "A.example", "*.example", "", "a/b", 5]
)
def test_a_host_of_media_is_a_bare_name(host: object) -> None:
    engine = {"allowed_media_domains": ["images.example.com", host]}
    (line,) = mistakes(one(engine=engine, multimodal=True))
    assert line.startswith("args.models[0].engine.allowed_media_domains[1]: ")
    assert parse(one(engine={"allowed_media_domains": ["a.example"]}, multimodal=True))


def test_hosts_of_media_have_no_use_without_media() -> None:
    (line,) = mistakes(one(engine={"allowed_media_domains": ["a.example"]}))
    assert "multimodal: must be true, since engine.allowed_media_domains names hosts" in line
    assert parse(one(engine={"allowed_media_domains": []}))


@pytest.mark.parametrize("engine", [{"runner": "pooling"}, {"convert": "embed"}])
def test_a_pooling_model_samples_nothing_and_is_not_simulated(engine: JSON) -> None:
    assert parse(one(engine=engine))
    (line,) = mistakes(one(engine=engine, sampling={"temperature": 0}))
    assert "sampling: a pooling model samples nothing" in line
    (line,) = mistakes(one(engine=engine, simulate="h100-8b"))
    assert "a simulated device runs no pooling model" in line


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
def test_the_settings_say_which_routes_a_pooling_model_may_serve(
    engine: JSON, routes: tuple[str, ...]
) -> None:
    assert EngineSettings.model_validate(engine).pooling_routes == routes


@pytest.mark.parametrize(("stop", "path"), [(5, "stop"), (["x"] * 65, "stop"), (["x", 5], "stop[1]")])
def test_a_bad_stop_is_one_error_at_its_own_path(stop: object, path: str) -> None:
    (line,) = mistakes(one(sampling={"stop": stop}))
    assert line.startswith(f"args.models[0].sampling.{path}: ")


def test_a_boolean_is_no_number() -> None:
    for section, key in (
        ("engine", "max_model_len"),
        ("engine", "max_num_seqs"),
        ("batcher", "max_queue_size"),
    ):
        (line,) = mistakes(one(**{section: {key: True}}))
        assert line.startswith(f"args.models[0].{section}.{key}: ")


def test_extra_refuses_options_that_are_settings() -> None:
    (line,) = mistakes(one(engine={"extra": {"max_num_seqs": 5}}))
    assert "extra.max_num_seqs: put max_num_seqs directly under engine" in line


@pytest.mark.parametrize(
    "key", ["model", "served_model_name", "host", "port", "uds", "api_key", "ssl_keyfile"]
)
def test_extra_refuses_options_that_do_nothing_there(key: str) -> None:
    # tests/serve_app/models/test_vllm_options.py has all of them, with their reasons.
    (line,) = mistakes(one(engine={"extra": {key: "x"}}))
    assert f"args.models[0].engine: extra.{key}: " in line


def test_the_longest_context_that_fits_is_minus_one_as_in_vllm() -> None:
    model = only(one(engine={"max_model_len": -1}))
    assert (model.engine.max_model_len, model.engine.context) == (-1, None)
    for value in (0, -2):
        (line,) = mistakes(one(engine={"max_model_len": value}))
        assert line == (
            "args.models[0].engine.max_model_len: must be a number of tokens, or -1 for the longest context "
            f"that fits, not {value}"
        )
