"""The `args` of a config: every mistake is found before anything starts, and its line has path and fix."""

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.protocol import JSON
from serve_app.api.validation import FEW
from serve_app.settings.schema import Settings, SettingsError, parse

SIMULATED = {"id": "one", "simulate": "h100-8b", "share": "night"}
FULL: JSON = {
    "models": [
        {
            "id": "demo",
            "source": "saturate://demo",
            "multimodal": True,
            "engine": {
                "max_model_len": 2048,
                "block_size": 32,
                "allowed_media_domains": ["a.example"],
            },
            "batcher": {
                "policy": "max_utilization",
                "capacity_tokens": 1000,
                "goals": {"ttft_p99_s": 0.3},
                "tenant_weights": {"jo": 2.0},
            },
            "sampling": {"temperature": 0, "stop": ["x"]},
            "adapters": [{"source": "/x"}],
            "adapters_folder": "/kept",
        },
        {"id": "org/Other-1.5_b", "source": "org/other", "kind": "llm"},
        {
            "id": "rank",
            "kind": "function",
            "target": "package.module:Class",
            "options": {"device": "cpu", "llm": 1},
            "batcher": {"profile": "real_time", "max_batch_size": 8},
        },
        SIMULATED,
        SIMULATED | {"id": "two"},
    ],
    "ingress": {"max_body_bytes": 1000, "max_prompts": 7, "allow_origins": ["*"]},
    "access": {"keys_env": "KEYS", "trusted_proxies": ["10.0.0.0/8"]},
    "telemetry": {"traces": {"endpoint": "file:///spans"}},
    "batches": {"folder": "/batches"},
    "usage": {
        "ledger": {"folder": "/usage"},
        "prices": {"demo": {"input": 0.5}},
        "quotas": {"tenants": {"a": {"tokens_per_minute": 5}}},
    },
    "share_groups": {"night": {"sleep_level": 2}},
}


def steps(path: str) -> list[str | int]:
    """Return the keys and places of a path such as `models[0].engine`."""
    return [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", path)]


def at(path: str, settings: Settings) -> Any:
    """Return a part of the settings."""
    found: Any = settings
    for step in steps(path):
        found = found[step] if isinstance(step, int) or isinstance(found, dict) else getattr(found, step)
    return found


def put(changes: dict[str, Any]) -> JSON:
    """Return the full args with other values at some paths."""
    args = copy.deepcopy(FULL)
    for path, value in changes.items():
        *places, last = steps(path)
        target: Any = args
        for place in places:
            target = target.setdefault(place, {}) if isinstance(target, dict) else target[place]
        target[last] = value
    return args


def mistakes(args: Any) -> list[str]:
    """Return the lines of the error that the args cause, one for each mistake."""
    with pytest.raises(SettingsError) as caught:
        parse(args)
    head, *lines = str(caught.value).split("\n  ")
    count = len(lines)
    assert head == f"the config's args have {count} mistake{'s' if count > 1 else ''}:"
    return lines


# Allowed values


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("models[0].id", ["meta/llama-3.1-8B", "a" * 128]),
        ("models[0].engine.max_num_seqs", [1, 10**6]),
        ("models[0].engine.max_model_len", [1, -1]),
        ("models[0].engine.long_prefill_token_threshold", [0, 1]),
        ("models[0].engine.gpu_memory_utilization", [0.01, 1]),
        ("models[0].engine.allowed_media_domains", [[]]),
        ("models[0].batcher.priority_aging_s", [0.001, 60.0, 5, None]),
        ("models[0].batcher.tenant_weights", [{"jo": 0.5, "x": 1}]),
        ("models[0].batcher.goals.tpot_p99_s", [0.05]),
        ("models[0].adapters[0].id", ["demo:support"]),
        ("models[0].adapters_folder", ["/var/lib", "~/kept", "~", "s3://bucket/prefix"]),
        ("models[2].batcher.prefetch_batches", [0, 3]),
        ("models[2].batcher.batch_timeout_s", [0.0, 1]),
        ("access.keys_file", ["/etc/keys.yaml"]),
        ("batches.folder", ["~/batches"]),
        ("batches.content", ["s3://bucket/x"]),
        ("batches.database", ["postgresql://u:p@h/d", "postgres://h/d"]),
        ("batches.retention_s", [3600]),
        ("telemetry.tenants", [0, 1_000]),
        ("telemetry.traces.endpoint", ["http://c:4318/v1/traces", "https://c"]),
        ("telemetry.traces.sample_ratio", [0, 1]),
        ("usage.quotas.database", ["postgres://x", "postgresql://x/y"]),
        ("usage.prices.demo.input", [0]),
        ("usage.prices.demo.batch_discount", [0, 1]),
        ("ingress.max_bytes_in_flight", [2000]),
        ("ingress.allow_origins", [("*",), ("https://chat.example.com",)]),
    ],
)
def test_an_allowed_value_is_taken_as_it_is(path: str, values: list[Any]) -> None:
    for value in values:
        assert at(path, parse(put({path: value}))) == value


def test_defaults() -> None:
    settings = parse({"models": [{"id": "demo", "source": "x"}]})
    assert settings.model_dump(exclude_unset=True) == {"models": [{"id": "demo", "source": "x"}]}
    assert settings.ingress.bytes_in_flight == 256 * 1024 * 1024
    usage = settings.usage
    assert not any((settings.access, settings.batches, usage.ledger, usage.quotas))
    assert settings.sharing() == {}
    telemetry = settings.telemetry
    assert (telemetry.metrics, telemetry.request_log, telemetry.traces) == (True, "json", None)


def test_a_section_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse(FULL).ingress.max_prompts = 8


# Wrong values

WHOLE = [0, -1, 1.5, 1.0, "many", "1", [1], True]
"""Values of no positive whole number."""
NUMBER = [0, -1.0, math.inf, math.nan, "1"]
"""Values of no positive number."""
NO_RANGE = "must be an address or a range"
NO_DATABASE = "must be a URL such as postgresql://"
NO_SOURCE = "s3://, s3a://, gs://, gcs://, az://, abfs://, abfss://, hf://, https://, not "


def wrong_values() -> Iterator[tuple[str, str, list[Any]]]:
    """Yield the path of a setting, words of the error if they aren't pydantic's, and wrong values."""
    engine = ["max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"]
    engine += ["tensor_parallel_size", "pipeline_parallel_size"]
    function = ["target_batch_cost", "max_batch_size", "min_batch_size", "max_queue_size", "max_queue_cost"]
    whole = {
        "models[0].engine": engine,
        "models[0].batcher": ["capacity_tokens", "max_running", "max_queue_size", "max_queue_tokens"],
        "models[2].batcher": [*function, "max_concurrent_batches"],
        "ingress": ["max_body_bytes", "max_bytes_in_flight", "max_prompts", "max_n", "max_tokens"],
        "batches": ["max_lines", "max_files", "max_rows_in_flight"],
        "usage.quotas.tenants.a": ["tokens_per_day", "max_concurrency"],
    }
    for section, keys in whole.items():
        for key in keys:
            yield f"{section}.{key}", "", WHOLE
    for path in ("models[0].batcher.priority_aging_s", "models[0].batcher.tenant_weights.jo"):
        yield path, "", NUMBER
    for path in (
        "models[0].batcher.goals.ttft_p99_s",
        "share_groups.night.min_turn_s",
        "usage.quotas.away_s",
    ):
        yield path, "", NUMBER
    yield from (
        ("models", "", [[], {"demo": {}}]),
        ("models[1]", "", ["other"]),
        ("models[0].id", "", ["", " ", "-demo", "/demo", "de mo", "demo\n", "démo", "a#b", "a" * 129, 5]),
        ("models[0].id", "", ["demo:support", None]),
        ("models[0].source", "", [""]),
        ("models[0].share", "", ["a b", "", "a/b", "a" * 65]),
        ("models[0].engine", "", [None]),
        ("models[0].engine.max_model_len", "", [1.5, "many", [1], True]),
        ("models[0].engine.max_model_len", "or -1 for the longest context that fits, not ", [0, -2]),
        ("models[0].engine.gpu_memory_utilization", "", [0, -0.1, 1.01, math.nan, "most"]),
        ("models[0].engine.dtype", "", ["int3"]),
        ("models[0].engine.max_lora_rank", "", [9]),
        ("models[0].engine.enable_lora", "", ["perhaps"]),
        ("models[0].batcher.policy", "", ["no_evict"]),
        ("models[0].batcher.goals", "must have ttft_p99_s, tpot_p99_s, or both", [{}]),
        ("models[0].sampling.temperature", "", [3]),
        ("models[0].sampling.max_tokens", "", [0]),
        ("models[0].sampling.stop", "", [5, ["x"] * 65]),
        ("models[0].adapters[0].id", "", ["a b", "", ":demo"]),
        ("models[0].adapters_folder", "must be an absolute path", ["kept", "~no user/x", ""]),
        ("models[2].target", "", [None, 5]),
        ("models[2].target", "must have the form", ["", "a", "a.b", "a:b:c", "a:b.c", "a-b:C", ":C", "a:"]),
        ("models[2].options", "", [["x"]]),
        ("models[2].embeddings", "", ["yes"]),
        ("models[2].batcher", "", [None]),
        ("models[2].batcher.profile", "must be one of ", ["fast"]),
        ("models[2].batcher.forming", "", ["random"]),
        ("models[2].batcher.on_error", "", ["ignore"]),
        ("models[2].batcher.batch_timeout_s", "", [-1]),
        ("models[2].batcher.prefetch_batches", "", [-1]),
        ("access.keys_env", "", ["no name"]),
        ("access.keys_file", "on every node that runs an Ingress", ["keys.yaml", "~/keys.yaml", ""]),
        ("access.trusted_proxies", "", ["127.0.0.1"]),
        ("access.trusted_proxies[0]", NO_RANGE, ["haproxy", "10.0.0.0/33", "10.0.0", "", "fe80::%eth0/64"]),
        ("access.trusted_proxies[0]", "the range is written 10.0.0.0/8", ["10.0.0.1/8"]),
        ("access.trusted_proxies[0]", "the range is written 2001:db8::/32", ["2001:db8::1/32"]),
        ("access.trusted_proxies[0]", "is a range of IPv4; write it as such", ["::ffff:10.0.0.0/104"]),
        ("access.trusted_proxies[0]", "must be a range of addresses in quotes", [10, None]),
        ("ingress.allow_origins[0]", "must be '*' or an origin", ["chat", "https://a/b", "ftp://x"]),
        ("telemetry.tenants", "", [-1, 1_001]),
        ("telemetry.metrics", "", ["maybe"]),
        ("telemetry.request_log", "", ["xml"]),
        ("telemetry.traces.endpoint", "must begin with http://, https:// or file://", ["c:4318", "http://"]),
        ("telemetry.traces.sample_ratio", "", [1.1, -0.1]),
        (
            "batches.folder",
            "must be an absolute path, or begin with ~/",
            ["batches", "./x", "~no user/x", ""],
        ),
        ("batches.content", "must be an absolute path", ["here", ""]),
        ("batches.database", NO_DATABASE, ["mysql://x", "redis://x", "postgresql://"]),
        ("batches.retention_s", "", [3599]),
        ("usage.ledger.folder", "must be an absolute path", ["usage"]),
        ("usage.ledger.spool", "must be an absolute path", ["x"]),
        ("usage.ledger.format", "", ["csv"]),
        ("usage.prices.demo.input", "", [-1.0, math.inf]),
        ("usage.prices.demo.batch_discount", "", [50.0, -0.1]),
        ("usage.quotas.file", "must be an absolute path", ["quotas.yaml"]),
        ("usage.quotas.database", NO_DATABASE, ["mysql://x", "redis://x:1/0"]),
        ("usage.quotas.when_away", "", ["wait"]),
        ("share_groups.night.sleep_level", "", [3]),
    )
    hosts = ["https://a.example", "a.example:80", "A.example", "*.example", "", "a/b", "-a", 5]
    yield "models[0].engine.allowed_media_domains[0]", "", hosts
    archives = ["http://169.254.169.254/latest", "file:///etc", "ftp://host/words", "zip://words.zip"]
    chained = ["zip::s3://bucket/w.zip", "s3::http://host/words", "https://host/words::s3://bucket/x"]
    others = ["reference://words", "memory://words", "s3", "S3://bucket/words", "://words", "words"]
    demo = ["saturate://demo/../x", "saturate://other/letters"]
    yield "models[0].adapters[0].source", NO_SOURCE, [*archives, *chained, *others, *demo]


@pytest.mark.parametrize(("path", "words", "values"), list(wrong_values()))
def test_a_wrong_value_is_refused_with_its_path_and_itself(path: str, words: str, values: list[Any]) -> None:
    for value in values:
        (line,) = mistakes(put({path: value}))
        assert line.startswith(f"args.{path}: ")
        assert words in line if words else line.endswith(f", not {value!r}")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"models[0].kind": "lm"}, ".models[0].kind: Input should be 'llm' or 'function', not 'lm'"),
        ({"models[1].target": "a:B"}, ".models[1].target: unknown key; `saturate schema` has them all"),
        ({"models[2].source": "x"}, ".models[2].source: unknown key; allowed here: id, kind, target"),
        ({"models[0].id": "rank"}, ": models: the id 'rank' is used twice"),
        ({"models[1].adapters": [{"source": "/a", "id": "demo"}]}, ": models: the id 'demo' is used twice"),
        (
            {"models[0].adapters": [{"source": "/a/x"}, {"source": "/b/x"}]},
            ".models[0]: adapters[1].id: 'demo:x' is used twice",
        ),
        ({"models[0].engine.enable_lora": False}, ".models[0]: engine.enable_lora: must be true"),
        (
            {"models[0].engine.worker_extension_cls": "a.B"},
            ".models[0]: engine.worker_extension_cls: an engine with adapters",
        ),
        # tests/serve_app/engine/vllm/test_parser.py has all options that do nothing here.
        ({"models[0].engine.port": 5}, ".models[0].engine: port: "),
        (
            {"models[0].multimodal": False},
            ".models[0]: multimodal: must be true, since engine.allowed_media_domains names hosts",
        ),
        ({"models[0].engine.runner": "pooling"}, ".models[0]: sampling: a pooling model samples nothing"),
        ({"models[0].engine.convert": "embed"}, ".models[0]: sampling: a pooling model samples nothing"),
        (
            {"models[3].engine.runner": "pooling"},
            ".models[3]: engine.runner: a simulated device runs no pooling model",
        ),
        ({"models[0].sampling.stop": ["x", 5]}, ".models[0].sampling.stop[1]: "),
        (
            {"models[2].batcher.min_batch_size": 9},
            ".models[2].batcher: min_batch_size must be at most max_batch_size=8, not 9",
        ),
        ({"access": {}}, ".access: give keys_file or keys_env"),
        (
            {"ingress.max_bytes_in_flight": 1999},
            ".ingress: max_bytes_in_flight: must be at least twice max_body_bytes, which is 1000",
        ),
        (
            {"batches.database": "postgresql://x/y", "batches.database_env": "X"},
            ".batches: give database or database_env",
        ),
        (
            {"batches.max_file_bytes": 5},
            ".batches: max_line_bytes: must be at most max_file_bytes, which is 5",
        ),
        (
            {"batches.max_tenant_bytes": 5},
            ".batches: max_file_bytes: must be at most max_tenant_bytes, which is 5",
        ),
        ({"batches.max_batches": 9}, ".batches: max_open_batches: must be at most max_batches, which is 9"),
        (
            {"usage.quotas.database": "postgresql://x", "usage.quotas.database_env": "X"},
            ".usage.quotas: give one of folder, database and database_env",
        ),
        ({"share_groups.other": {}}, ": share_groups.other: no model has share: other"),
        (
            {"models[0].share": "night", "models[0].simulate": "h100-8b"}
            | {"share_groups.night": {"min_turn_s": 6, "max_wait_s": 11}},
            ": share_groups.night.max_wait_s: with min_turn_s 6 each of 3 models may wait 12 s",
        ),
        (
            {"models[1].share": "night"},
            ": share: models of 'night' are on simulated devices and on real ones",
        ),
        (
            {f"models[{place}].share": "day" for place in (0, 1)}
            | {f"models[{place}].engine.gpu_memory_utilization": 0.985 for place in (0, 1)},
            ": share: the group 'day' doesn't fit its device: demo "
            "takes 0.985 awake, and 1 others 0.02 asleep; "
            "that is 1.005 of 1",
        ),
        (
            {"models": [{"id": f"m{place}", "source": "x", "share": "night"} for place in range(6)]},
            ": share: the group 'night' doesn't fit its device: m0 "
            "takes 0.92 awake, and 5 others 0.1 asleep; that is 1.02 of 1",
        ),
        (
            {"models": [SIMULATED | {"id": f"m{place}"} for place in range(7)]},
            ": share: the group 'night' doesn't fit its device: m0 "
            "takes 72 GB awake, and 6 others 9.6 GB asleep; "
            "that is 81.6 of 80 GB",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], line: str) -> None:
    (found,) = mistakes(put(changes))
    assert found.startswith(f"args{line}")


def test_quotas_need_a_place_for_their_state() -> None:
    without = {key: value for key, value in FULL.items() if key != "batches"}
    assert mistakes(without) == ["args: usage.quotas: give folder, database or database_env for their state"]


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({}, "models"),
        ({"models": [{"source": "x"}]}, "models[0].id"),
        ({"models": [{"id": "x"}]}, "models[0].source"),
        (put({"telemetry.traces": {}}), "telemetry.traces.endpoint"),
        (put({"batches": {}}), "batches.folder"),
        (put({"usage.prices.demo": {}}), "usage.prices.demo.input"),
    ],
)
def test_a_missing_key_is_named(args: JSON, path: str) -> None:
    assert mistakes(args) == [f"args.{path}: required, but missing"]


@pytest.mark.parametrize("args", [None, [], "demo", FULL | {8000: "x"}])
def test_args_are_a_mapping_with_texts_as_keys(args: object) -> None:
    (line,) = mistakes(args)
    assert line.startswith("args")


SECTIONS = ["", "ingress", "access", "telemetry", "telemetry.traces", "batches", "usage", "usage.ledger"]
SECTIONS += ["usage.quotas", "usage.quotas.tenants.a", "usage.prices.demo", "share_groups.night"]
SECTIONS += [f"models[{place}]" for place in range(3)] + ["models[2].batcher"]
SECTIONS += [f"models[0].{key}" for key in ("batcher", "batcher.goals", "sampling", "adapters[0]")]


FIELDS = {path: list(type(at(path, parse(FULL))).model_fields) for path in SECTIONS}


@given(path=st.sampled_from(SECTIONS), key=st.text(), value=st.none() | st.integers() | st.text())
def test_an_unknown_key_anywhere_is_refused_with_its_path(path: str, key: str, value: object) -> None:
    allowed = FIELDS[path]
    if key in allowed:
        return
    args = put({})
    section: Any = args
    for step in steps(path):
        section = section[step]
    section[key] = value
    with pytest.raises(SettingsError) as caught:
        parse(args)
    message = str(caught.value)
    where = f"args.{path}.{key}" if path else f"args.{key}"
    assert f"  {where}: unknown key; " in message
    if len(allowed) <= FEW and "did you mean" not in message:
        assert f"allowed here: {', '.join(allowed)}" in message
    # The message stays short, however many keys there are.
    assert len(message) < 400 + 10 * len(repr(key) + repr(value))
    assert "1 mistake:" in message


def test_the_closest_keys_are_named() -> None:
    (line,) = mistakes(put({"batches.lines": 5}))
    assert line == "args.batches.lines: unknown key; did you mean max_lines?"


def test_all_mistakes_are_reported_at_once() -> None:
    lines = mistakes({"models": [{"id": "demo", "engine": {"max_num_seqs": 0}}], "port": 1})
    assert [line.split(": ")[0] for line in lines] == [
        "args.models[0].source",
        "args.models[0].engine.max_num_seqs",
        "args.port",
    ]


def test_the_sections_of_the_full_args_are_all_sections() -> None:
    assert set(FULL) == set(Settings.model_fields)
