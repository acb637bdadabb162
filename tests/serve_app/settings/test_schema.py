"""The `args` of a config: every error is found before anything starts, and has its path."""

import copy
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher import PROFILES, DynamicBatcher, profile
from serve_app.api.protocol import JSON, SamplingFields
from serve_app.api.routes import POOLING, SCORE
from serve_app.settings.ingress import AccessSettings, IngressSettings
from serve_app.settings.models import (
    BatcherSettings,
    EngineSettings,
    FunctionBatcherSettings,
    FunctionSettings,
    GoalSettings,
    LLMSettings,
)
from serve_app.settings.schema import Settings, SettingsError, parse
from serve_app.settings.sources import DEMO_MODEL
from serve_app.settings.usage import LedgerSettings, PriceSettings, UsageSettings

FULL: JSON = {
    "models": [
        {
            "id": "demo",
            "source": "saturate://demo",
            "engine": {"max_model_len": 2048, "extra": {"block_size": 32}},
            "batcher": {
                "policy": "max_utilization",
                "capacity_tokens": 1000,
                "goals": {"ttft_p99_s": 0.3},
            },
            "sampling": {"temperature": 0, "stop": ["x"]},
        },
        {"id": "org/Other-1.5_b", "source": "org/other", "kind": "llm"},
        {
            "id": "rank",
            "kind": "function",
            "target": "package.module:Class",
            "options": {"device": "cpu", "llm": 1},
            "batcher": {"profile": "real_time", "max_batch_size": 8},
        },
    ],
    "ingress": {"max_body_bytes": 1000, "max_prompts": 7},
    "access": {"keys_env": "KEYS"},
    "usage": {"ledger": {"folder": "/usage"}, "prices": {"demo": {"input": 0.5}}},
}


def one(**fields: Any) -> JSON:
    return {"models": [{"id": "demo", "source": "x"} | fields]}


def function(**fields: Any) -> JSON:
    return {"models": [{"id": "rank", "kind": "function", "target": "a.b:C"} | fields]}


@pytest.mark.parametrize(
    ("access", "words"),
    [
        ({}, "args.access: give keys_file or keys_env"),
        ({"keys_file": "keys.yaml"}, "args.access.keys_file: must be an absolute path"),
        ({"keys_env": "no name"}, "args.access.keys_env: "),
        (
            {"keys_env": "KEYS", "trusted_proxies": ["127.0.0.0/8", "10.0.0.1/8"]},
            "args.access.trusted_proxies[1]: '10.0.0.1/8' has bits behind its prefix",
        ),
        ({"keys_env": "KEYS", "trusted_proxies": ["haproxy"]}, "args.access.trusted_proxies[0]: must be an"),
        ({"keys_env": "KEYS", "trusted_proxies": "127.0.0.1"}, "args.access.trusted_proxies: "),
    ],
)
def test_access_says_where_the_keys_are(access: JSON, words: str) -> None:
    (line,) = mistakes(one() | {"access": access})
    assert line.startswith(words)


def test_without_access_there_are_no_keys() -> None:
    assert parse(one()).access is None


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        ({"ledger": {"folder": "usage"}}, "args.usage.ledger.folder: must be an absolute path"),
        ({"ledger": {"folder": "/usage", "format": "csv"}}, "args.usage.ledger.format: "),
        ({"ledger": {"folder": "s3://b/x", "spool": "x"}}, "args.usage.ledger.spool: must be an absolute"),
        ({"prices": {"demo": {"input": -1.0}}}, "args.usage.prices.demo.input: "),
        ({"prices": {"demo": {}}}, "args.usage.prices.demo.input: required"),
        ({"prices": {"demo": {"input": 1.0, "batch_discount": 50.0}}}, "args.usage.prices.demo.batch_"),
    ],
)
def test_a_mistake_in_usage_is_named(usage: JSON, words: str) -> None:
    (line,) = mistakes(one() | {"usage": usage})
    assert line.startswith(words)


def test_a_service_keeps_no_ledger_unless_told() -> None:
    assert parse(one()).usage.ledger is None


def only(args: JSON) -> LLMSettings:
    """Return the one model, which is a language model."""
    (model,) = parse(args).models
    assert isinstance(model, LLMSettings)
    return model


def mistakes(args: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse(args)
    head, *lines = str(caught.value).split("\n  ")
    count = len(lines)
    assert head == f"the config's args have {count} mistake{'s' if count > 1 else ''}:"
    return lines


# Valid settings


def test_defaults() -> None:
    settings = parse(one())
    model = only(one())
    assert model.engine.options() == {}
    assert model.batcher == BatcherSettings()
    assert model.batcher.policy == "guaranteed_no_evict"
    assert model.batcher.max_queue_size == 5_000
    assert model.sampling.sampling() == {}
    assert settings.ingress == IngressSettings(max_body_bytes=32 * 1024 * 1024, max_prompts=10_000)


def test_all_settings_are_read() -> None:
    settings = parse(FULL)
    demo, other, rank = settings.models
    assert isinstance(demo, LLMSettings)
    assert isinstance(rank, FunctionSettings)
    assert rank.target == "package.module:Class"
    assert rank.options == {"device": "cpu", "llm": 1}
    assert demo.engine.options() == {"max_model_len": 2048, "block_size": 32}
    assert demo.batcher.policy == "max_utilization"
    assert demo.batcher.capacity_tokens == 1000
    assert demo.sampling.sampling() == {"temperature": 0, "stop": ["x"]}
    assert other.id == "org/Other-1.5_b"
    assert settings.ingress.max_prompts == 7
    assert settings.ingress.max_body_bytes == 1000


def test_the_demo_model_is_a_directory_of_this_package() -> None:
    path = Path(only(one(source=DEMO_MODEL)).path)
    assert (path / "config.json").is_file()
    assert path.parents[1].name == "serve_app"


def test_any_other_source_is_passed_to_vllm() -> None:
    assert only(one(source="Qwen/Qwen2.5-7B-Instruct")).path == "Qwen/Qwen2.5-7B-Instruct"


def test_an_option_of_false_or_zero_is_an_option_that_was_set() -> None:
    model = only(one(engine={"enable_prefix_caching": False, "seed": 0, "long_prefill_token_threshold": 0}))
    assert model.engine.options() == {
        "enable_prefix_caching": False,
        "seed": 0,
        "long_prefill_token_threshold": 0,
    }


def test_settings_can_not_be_changed() -> None:
    settings = parse(FULL)
    for section in (settings, settings.ingress, settings.models[0], settings.models[0].batcher):
        field = next(iter(type(section).model_fields))
        with pytest.raises(ValueError, match="frozen"):
            setattr(section, field, None)


def test_a_model_is_a_language_model_unless_it_says_otherwise() -> None:
    models = parse(FULL).models
    assert [model.kind for model in models] == ["llm", "llm", "function"]
    assert [type(model) for model in models] == [LLMSettings, LLMSettings, FunctionSettings]


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


def test_goals_turn_ageing_off_unless_it_is_set() -> None:
    goals = {"ttft_p99_s": 0.3, "tpot_p99_s": 0.05}
    batcher = only(one(batcher={"goals": goals})).batcher
    assert batcher.goals is not None
    assert batcher.goals.model_dump() == goals
    assert batcher.aging_s is None
    assert only(one(batcher={"goals": goals, "priority_aging_s": 10.0})).batcher.aging_s == 10.0
    assert BatcherSettings().aging_s == 10.0


# Errors


def test_settings_of_a_batcher_that_contradict_each_other() -> None:
    (line,) = mistakes(function(batcher={"min_batch_size": 9, "max_batch_size": 8}))
    assert line == "args.models[0].batcher: min_batch_size must be at most max_batch_size=8, not 9"


def test_keys_of_one_kind_are_unknown_to_the_other() -> None:
    (line,) = mistakes(one(target="a:B"))
    assert line.startswith("args.models[0].target: unknown key; allowed here: id, kind, source")
    (line,) = mistakes(function(source="x"))
    assert line.startswith("args.models[0].source: unknown key; allowed here: id, kind, target")


def test_an_unknown_kind_is_an_error_with_the_known_ones() -> None:
    assert mistakes(one(kind="lm")) == ["args.models[0].kind: Input should be 'llm' or 'function', not 'lm'"]


def test_an_unknown_key_is_an_error_with_the_allowed_ones() -> None:
    (line,) = mistakes(one(engine={"max_model_length": 4096}))
    assert line.startswith("args.models[0].engine.max_model_length: unknown key; allowed here: ")
    assert line.split("allowed here: ")[1].split(", ") == list(EngineSettings.model_fields)


SECTIONS: list[tuple[str, list[str | int], list[str]]] = [
    ("args", [], list(Settings.model_fields)),
    ("args.ingress", ["ingress"], list(IngressSettings.model_fields)),
    ("args.access", ["access"], list(AccessSettings.model_fields)),
    ("args.usage", ["usage"], list(UsageSettings.model_fields)),
    ("args.usage.ledger", ["usage", "ledger"], list(LedgerSettings.model_fields)),
    ("args.usage.prices.demo", ["usage", "prices", "demo"], list(PriceSettings.model_fields)),
    ("args.models[0]", ["models", 0], list(LLMSettings.model_fields)),
    ("args.models[1]", ["models", 1], list(LLMSettings.model_fields)),
    ("args.models[2]", ["models", 2], list(FunctionSettings.model_fields)),
    ("args.models[2].batcher", ["models", 2, "batcher"], list(FunctionBatcherSettings.model_fields)),
    ("args.models[0].engine", ["models", 0, "engine"], list(EngineSettings.model_fields)),
    ("args.models[0].batcher", ["models", 0, "batcher"], list(BatcherSettings.model_fields)),
    ("args.models[0].batcher.goals", ["models", 0, "batcher", "goals"], list(GoalSettings.model_fields)),
    ("args.models[0].sampling", ["models", 0, "sampling"], list(SamplingFields.model_fields)),
]


@given(section=st.sampled_from(SECTIONS), key=st.text(), value=st.none() | st.integers() | st.text())
def test_an_unknown_key_anywhere_is_refused_with_its_path(
    section: tuple[str, list[str | int], list[str]], key: str, value: object
) -> None:
    path, place, allowed = section
    if key in allowed:
        return
    args = copy.deepcopy(FULL)
    target: Any = args
    for part in place:
        target = target[part]
    target[key] = value
    with pytest.raises(SettingsError) as caught:
        parse(args)
    message = str(caught.value)
    assert f"  {path}.{key}: unknown key; allowed here: {', '.join(allowed)}" in message
    assert "1 mistake:" in message


def bad_values() -> Iterator[tuple[str, JSON]]:
    for key in (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ):
        for value in (0, -1, 1.5, "many", [1]):
            yield f"args.models[0].engine.{key}", one(engine={key: value})
    for value in (0, -0.1, 1.01, math.nan, "most"):
        path = "args.models[0].engine.gpu_memory_utilization"
        yield path, one(engine={"gpu_memory_utilization": value})
    yield "args.models[0].engine.dtype", one(engine={"dtype": "int3"})
    yield "args.models[0].engine.enforce_eager", one(engine={"enforce_eager": "perhaps"})
    yield "args.models[0].engine", one(engine=None)
    yield "args.models[0].engine.extra", one(engine={"extra": ["x"]})
    yield "args.models[0].batcher.policy", one(batcher={"policy": "no_evict"})
    for key in ("capacity_tokens", "max_running", "max_queue_size", "max_queue_tokens"):
        for value in (0, -5, "none"):
            yield f"args.models[0].batcher.{key}", one(batcher={key: value})
    for value in (0, -1, math.inf, math.nan, "1"):
        yield "args.models[0].batcher.priority_aging_s", one(batcher={"priority_aging_s": value})
        path = "args.models[0].batcher.tenant_weights.jo"
        yield path, one(batcher={"tenant_weights": {"jo": value}})
    yield "args.models[0].kind", one(kind="lm")
    yield "args.models[0].kind", one(kind=None)
    for target in (None, 5, "", "a", "a.b", "a:b:c", "a:b.c", "a-b:C", ":C", "a:"):
        yield "args.models[0].target", function(target=target)
    yield "args.models[0].options", function(options=["x"])
    yield "args.models[0].embeddings", function(embeddings="yes")
    yield "args.models[0].batcher", function(batcher=None)
    yield "args.models[0].batcher.profile", function(batcher={"profile": "fast"})
    yield "args.models[0].batcher.forming", function(batcher={"forming": "random"})
    yield "args.models[0].batcher.on_error", function(batcher={"on_error": "ignore"})
    for key in ("target_batch_cost", "max_batch_size", "min_batch_size", "max_queue_size", "max_queue_cost"):
        for value in (0, 1.5, "many"):
            yield f"args.models[0].batcher.{key}", function(batcher={key: value})
    for key in ("batch_timeout_s", "prefetch_batches", "max_concurrent_batches"):
        yield f"args.models[0].batcher.{key}", function(batcher={key: -1})
    yield "args.models[0].sampling.temperature", one(sampling={"temperature": 3})
    yield "args.models[0].sampling.max_tokens", one(sampling={"max_tokens": 0})
    for name in ("", " ", "-demo", "/demo", "de mo", "demo\n", "démo", "a#b", "a" * 129, 5, None):
        yield "args.models[0].id", one(id=name)
    yield "args.models[0].source", one(source="")
    yield "args.ingress.max_body_bytes", one() | {"ingress": {"max_body_bytes": 0}}
    yield "args.ingress.max_bytes_in_flight", one() | {"ingress": {"max_bytes_in_flight": 0}}
    yield "args.ingress.max_prompts", one() | {"ingress": {"max_prompts": "all"}}
    yield "args.models", {"models": []}
    yield "args.models", {"models": {"demo": {}}}
    yield "args.models[1]", {"models": [{"id": "demo", "source": "x"}, "other"]}


@pytest.mark.parametrize(("path", "args"), list(bad_values()))
def test_a_bad_value_is_refused_with_its_path_and_itself(path: str, args: JSON) -> None:
    (line,) = mistakes(args)
    assert line.startswith(f"{path}: ")
    value: Any = args
    for part in path.removeprefix("args.").replace("[", ".").replace("]", "").split("."):
        value = value[int(part) if part.isdigit() else part]
    assert line.endswith(f", not {value!r}")


def test_the_error_of_a_value_has_the_range() -> None:
    (line,) = mistakes(one(engine={"gpu_memory_utilization": 1.5}))
    assert "less than or equal to 1" in line
    (line,) = mistakes(one(batcher={"policy": "x"}))
    assert "'guaranteed_no_evict' or 'max_utilization'" in line


def test_one_body_has_to_fit_into_the_bytes_in_flight() -> None:
    assert parse(one()).ingress.bytes_in_flight == 256 * 1024 * 1024
    limits = {"max_body_bytes": 100, "max_bytes_in_flight": 200}
    assert parse(one() | {"ingress": limits}).ingress.bytes_in_flight == 200
    (line,) = mistakes(one() | {"ingress": limits | {"max_bytes_in_flight": 199}})
    assert line == ("args.ingress: max_bytes_in_flight: must be at least twice max_body_bytes, which is 100")


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


@pytest.mark.parametrize(
    ("args", "path"),
    [({}, "args.models"), ({"models": [{"source": "x"}]}, "args.models[0].id")],
)
def test_a_missing_key_is_an_error_with_its_path(args: JSON, path: str) -> None:
    assert mistakes(args) == [f"{path}: required, but missing"]


@pytest.mark.parametrize("args", [None, [], "demo"])
def test_args_have_to_be_a_mapping(args: object) -> None:
    (line,) = mistakes(args)
    assert line.startswith("args: ")


def test_a_key_that_is_not_a_string_is_an_error() -> None:
    (line,) = mistakes(one() | {8000: "x"})
    assert line.startswith("args")
    assert "8000" in line


def test_all_errors_are_reported_at_once() -> None:
    lines = mistakes({"models": [{"id": "demo", "engine": {"x": 1, "max_num_seqs": 0}}], "port": 1})
    assert [line.split(": ")[0] for line in lines] == [
        "args.models[0].source",
        "args.models[0].engine.max_num_seqs",
        "args.models[0].engine.x",
        "args.port",
    ]


def test_two_models_of_one_name() -> None:
    model = {"id": "demo", "source": "x"}
    (line,) = mistakes({"models": [model, {"id": "b", "source": "y"}, model]})
    assert "the id 'demo' is used twice" in line


def test_extra_refuses_options_that_are_settings() -> None:
    (line,) = mistakes(one(engine={"extra": {"max_num_seqs": 5}}))
    assert "extra.max_num_seqs: put max_num_seqs directly under engine" in line


@pytest.mark.parametrize("key", ["model", "served_model_name", "host", "port", "uds", "api_key"])
def test_extra_refuses_options_that_saturate_sets(key: str) -> None:
    (line,) = mistakes(one(engine={"extra": {key: "x"}}))
    assert f"extra.{key}: saturate sets this itself" in line


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "args.batches.folder: required, but missing"),
        ({"folder": "batches"}, "args.batches.folder: must be an absolute path"),
        ({"content": "here"}, "args.batches.content: must be an absolute path"),
        ({"database": "mysql://x"}, "args.batches.database: must be a URL such as postgresql://"),
        (
            {"database": "postgresql://x/y", "database_env": "X"},
            "args.batches: give database or database_env",
        ),
        ({"max_lines": 0}, "args.batches.max_lines: "),
        ({"retention_s": 10}, "args.batches.retention_s: "),
        ({"max_file_bytes": 5}, "args.batches: max_line_bytes: must be at most max_file_bytes, which is 5"),
        ({"lines": 5}, "args.batches.lines: unknown key; allowed here: folder, content, database"),
    ],
)
def test_wrong_batches_are_told_with_the_fix(fields: JSON, line: str) -> None:
    (found,) = mistakes(one() | {"batches": ({"folder": "/x"} if fields else {}) | fields})
    assert found.startswith(line)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"tenants": {"a": {"tokens": 5}}},
            "args.usage.quotas.tenants.a.tokens: unknown key; allowed here: tokens_per_minute",
        ),
        (
            {"tenants": {"a": {"tokens_per_day": -5}}},
            "args.usage.quotas.tenants.a.tokens_per_day: Input should be greater than or equal to 1, not -5",
        ),
        ({"file": "quotas.yaml"}, "args.usage.quotas.file: must be an absolute path"),
        ({"database": "mysql://x"}, "args.usage.quotas.database: must be a URL such as postgresql://"),
        (
            {"database": "redis://x", "database_env": "X"},
            "args.usage.quotas: give one of folder, database and database_env",
        ),
        ({"away_s": 0}, "args.usage.quotas.away_s: "),
        ({"when_away": "wait"}, "args.usage.quotas.when_away: "),
        ({"limits": {}}, "args.usage.quotas.limits: unknown key; allowed here: tenants, file, folder"),
        ({}, "args: usage.quotas: give folder, database or database_env for their state"),
    ],
)
def test_wrong_quotas_are_told_with_the_fix(fields: JSON, line: str) -> None:
    (found,) = mistakes(one() | {"usage": {"quotas": fields}})
    assert found.startswith(line)


def test_quotas_are_kept_beside_the_batches_or_in_a_place_of_their_own() -> None:
    quotas = {"tenants": {"a": {"tokens_per_minute": 5}}}
    assert parse(one() | {"usage": {"quotas": quotas}, "batches": {"folder": "/x"}}).usage.quotas
    assert parse(one() | {"usage": {"quotas": quotas | {"database": "redis://x:1/0"}}}).usage.quotas


def test_batches_may_be_in_a_home() -> None:
    settings = parse(one() | {"batches": {"folder": "~/x", "content": "s3://bucket/x"}})
    assert settings.batches
    assert settings.batches.folder == "~/x"


def sharing(*models: JSON, **group: object) -> JSON:
    """Return args of models that share a device, two simulated ones unless they are given."""
    given = models or ({"simulate": "h100-8b"}, {"simulate": "h100-8b"})
    made = [{"id": f"m{n}", "source": "s", "share": "g", **model} for n, model in enumerate(given)]
    return {"models": made, **({"share_groups": {"g": group}} if group else {})}


def test_models_of_a_group_share_its_settings() -> None:
    settings = parse(sharing(sleep_level=2, min_turn_s=1, max_wait_s=10, self_check=True))
    assert [model.id for model in settings.sharing()["g"]] == ["m0", "m1"]
    assert settings.share_groups["g"].sleep_level == 2
    assert parse(sharing()).share_groups == {}
    assert parse({"models": [{"id": "a", "source": "s"}]}).sharing() == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (sharing(sleep_level=3), "share_groups.g.sleep_level"),
        (sharing(min_turn_s=0), "share_groups.g.min_turn_s"),
        ({**sharing(), "share_groups": {"other": {}}}, "share_groups.other: no model has share: other"),
        (sharing({"share": "a b"}), "models[0].share"),
        (
            sharing({}, {}, {}, min_turn_s=6, max_wait_s=10),
            "share_groups.g.max_wait_s: with min_turn_s 6 each of 3 models may wait 12 s",
        ),
        (sharing({"simulate": "h100-8b"}, {}), "on simulated devices and on real ones"),
        (
            sharing(*[{"engine": {"gpu_memory_utilization": 0.95}}] * 4),
            "m0 takes 0.95 awake, and 3 others 0.06 asleep; that is 1.01 of 1",
        ),
        (sharing(*[{}] * 6), "m0 takes 0.92 awake, and 5 others 0.1 asleep; that is 1.02 of 1"),
        (
            sharing(*[{"simulate": "h100-8b"}] * 7),
            "m0 takes 72 GB awake, and 6 others 9.6 GB asleep; that is 81.6 of 80 GB",
        ),
    ],
)
def test_a_group_that_can_not_work_is_refused(args: JSON, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(args)
    assert message in str(error.value)
