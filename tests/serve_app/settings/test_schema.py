"""The `args` of a config: every error is found before anything starts, and has its path."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.protocol import JSON, SamplingFields
from serve_app.api.validation import FEW
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
from serve_app.settings.usage import LedgerSettings, PriceSettings, UsageSettings
from tests.serve_app.settings.helpers import function, mistakes, one, only

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


# Errors


def test_an_unknown_key_is_an_error_with_the_closest_ones() -> None:
    (line,) = mistakes(one(engine={"max_model_length": 4096}))
    assert line == "args.models[0].engine.max_model_length: unknown key; did you mean max_model_len?"


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
    assert f"  {path}.{key}: unknown key; " in message
    assert len(allowed) > FEW or f"{key}: unknown key; allowed here: {', '.join(allowed)}" in message
    # However many there are, the message stays short.
    assert len(message) < 400 + 10 * len(repr(key) + repr(value))
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
        # -1 is the longest context that fits.
        for value in (0, -2 if key == "max_model_len" else -1, 1.5, "many", [1]):
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
