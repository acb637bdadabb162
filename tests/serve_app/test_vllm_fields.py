"""Fields of vLLM's own requests: those that can multiply work, and what each may cost, by route."""

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import vllm.tokenizers
from transformers.utils.chat_template_utils import render_jinja_template
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.pooling.classify.api_router import router as classify
from vllm.entrypoints.pooling.embed.api_router import router as embed
from vllm.entrypoints.pooling.scoring.api_router import router as scoring
from vllm.renderers import chat_utils
from vllm.renderers.hf import safe_apply_chat_template
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.api.facts import BEYOND, MEDIA, NUMBERS, TEMPLATE_ARGUMENTS
from serve_app.api.protocol import GenerateRequest, ProcessRequest, parse_generate, parse_process
from serve_app.api.routes import CLASSIFY, EMBEDDINGS, GENERATE, MOVED, OPENAI
from tests.serve_app.ingress.engine_doubles import Client, Engine, echo, health

__all__ = ["health"]

ROUTES = (*(MOVED.get(path, path) for path in OPENAI), "/tokenize", "/detokenize")

RECORDS = {
    "n",
    "prompt",
    "input",
    "messages",
    "documents",
    "queries",
    "items",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
}
"""Fields that multiply sequences. Each sequence is a record of the batcher, with its own KV cache.

tests/e2e/test_admitted_work.py compares what is admitted with what the engine runs.
"""

REVIEWED = {
    **dict.fromkeys(RECORDS, "records"),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "max_output_tokens"), "KV cache, ingress.max_tokens"
    ),
    **dict.fromkeys(("min_tokens", "thinking_token_budget", "thinking.budget_tokens"), "within max_tokens"),
    **dict.fromkeys(("best_of", "max_tool_calls"), "vLLM ignores it"),
    "prompt_embeds": "refused by vLLM unless the config allows it; ingress.max_prompts",
    "tokens": "max_tokenize_tokens",
    **dict.fromkeys(
        (
            *(f"{field}.content" for field in ("query", *RECORDS)),
            "previous_input_messages",
            "system",
            "tools",
            "tool_choice.tools",
        ),
        "ingress.max_messages",
    ),
    "chat_template_kwargs": "16,384 bytes of variables of the template, and numbers up to a million",
    "truncate_prompt_tokens": "a long text is cut before it is tokenized",
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
        "vLLM's max_logprobs, and max_answer_values",
    ),
    **dict.fromkeys(
        ("stop", "stop_sequences", "stop_token_ids", "logit_bias", "allowed_token_ids", "vllm_xargs", "seed"),
        "BOUNDS",
    ),
    "bad_words": "BOUNDS, and the engine's room for their tokens",
    **dict.fromkeys(
        (
            "structured_outputs.choice",
            "structured_outputs.json",
            "response_format",
            "response_format.json_schema",
            "response_format.structures",
            "response_format.triggers",
            "text",
            "text.format",
            "tool_choice",
            "tool_choice.function",
        ),
        "grammar_compile_cpu_s",
    ),
    **dict.fromkeys(
        (
            "repetition_detection.max_pattern_size",
            "repetition_detection.min_count",
            "repetition_detection.min_pattern_size",
        ),
        "BOUNDS",
    ),
    **dict.fromkeys(
        ("dimensions", "max_tokens_per_doc", "max_tokens_per_query", "top_n"), "within the answer"
    ),
    **dict.fromkeys(("top_k", "priority", "stream_interval", "routed_experts_prompt_start"), "a number"),
    **dict.fromkeys(
        (
            "ec_transfer_params",
            "include",
            "kv_transfer_params",
            "media_io_kwargs",
            "metadata",
            "mm_processor_kwargs",
            "prompt.variables",
            "reasoning",
            "stream_options",
            "timestamp_granularities[]",
        ),
        "options",
    ),
}
"""Fields that are a number or a list, by what bounds the work that they make.

A new one is added here after a look at what it multiplies and, if that is sequences, at their admission.
"""

SWITCHES = {
    "use_beam_search": "beams are records, as `n`",
    "echo": "with logprobs: max_answer_values",
    **dict.fromkeys(("background", "watermarking"), "refused, or without effect"),
    **dict.fromkeys(("chat_template", "guided_decoding_backend"), "vLLM refuses or ignores it in a request"),
    **dict.fromkeys(("store", "previous_response_id"), "vLLM keeps no responses unless told to"),
    **dict.fromkeys(("ignore_eos", "early_stopping"), "within max_tokens"),
    "length_penalty": "BOUNDS",
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "temperature", "top_p"),
        "a number, once a step",
    ),
    **dict.fromkeys(
        ("query", "suffix", "instruction", "instructions", "hotwords"), "a text, tokenized within the context"
    ),
    **dict.fromkeys(("file", "mm_payload"), "ingress.max_body_bytes; the demo and text models refuse it"),
    **dict.fromkeys(
        (
            "include_stop_str_in_output",
            "include_reasoning",
            "enable_response_messages",
            "return_mm_kwargs",
            "return_prompt_text",
            "return_token_ids",
            "return_token_offsets",
            "return_token_strs",
            "return_tokens_as_token_ids",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stream",
            "stream_continuous_usage_stats",
            "stream_include_usage",
        ),
        "the form of the answer, no longer than its tokens and the prompt's",
    ),
    **dict.fromkeys(
        (
            "add_generation_prompt",
            "add_special_tokens",
            "cache_salt",
            "continue_final_message",
            "embed_dtype",
            "encoding_format",
            "endianness",
            "language",
            "model",
            "padding",
            "parallel_tool_calls",
            "prompt_cache_key",
            "reasoning_effort",
            "request_id",
            "service_tier",
            "session_id",
            "to_language",
            "truncation",
            "truncation_side",
            "use_activation",
            "user",
        ),
        "a choice or a name",
    ),
}
"""Other fields: switches, names, texts and fractions, by what bounds them."""


@pytest.fixture(scope="module")
def openapi() -> Any:
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate", "transcription"))
    # vLLM adds these for pooling models.
    for router in (classify, embed, scoring):
        app.include_router(router)
    return app.openapi()


def _find(schema: Any) -> Any:
    """Return what a reference names, or the schema itself."""
    while reference := schema.get("$ref"):
        root = schema["root"]
        for key in reference.removeprefix("#/").split("/"):
            root = root[key]
        schema = root | {"root": schema["root"]}
    return schema


def _variants(schema: Any) -> Iterator[Any]:
    """Yield a schema, its references resolved, or each of its alternatives."""
    schema = _find(schema)
    alternatives = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    for each in alternatives:
        yield from _variants(each | {"root": schema["root"]})
    if not alternatives:
        yield schema


def _multipliers(schema: Any, prefix: str = "") -> Iterator[str]:
    """Yield the fields of a request that are a number, a list or a map, and those of the objects in it."""
    for model in _variants(schema):
        for name, field in model.get("properties", {}).items():
            for variant in _variants(field | {"root": schema["root"]}):
                is_map = variant.get("additionalProperties") and "properties" not in variant
                if variant.get("type") in ("integer", "array") or is_map:
                    yield prefix + name
                if not prefix:
                    yield from _multipliers(variant, f"{name}.")


def test_each_field_that_can_multiply_work_was_looked_at(openapi: Any) -> None:
    found = set()
    for path in ROUTES:
        for content in openapi["paths"][path]["post"]["requestBody"]["content"].values():
            found |= set(_multipliers(content["schema"] | {"root": openapi}))
    assert found >= RECORDS | {"tokens", "repetition_detection.min_count"}
    assert found <= set(REVIEWED), "fields that nobody has looked at"


def test_each_other_field_was_looked_at(openapi: Any) -> None:
    found = set()
    for path in ROUTES:
        for content in openapi["paths"][path]["post"]["requestBody"]["content"].values():
            for model in _variants(content["schema"] | {"root": openapi}):
                for name, field in model.get("properties", {}).items():
                    kinds = {variant.get("type") for variant in _variants(field | {"root": openapi})}
                    # The parts of objects are looked at above.
                    found |= {name} if kinds - {"object", "null"} else set()
    assert found >= {"echo", "use_beam_search", "stream"}
    assert found <= REVIEWED.keys() | SWITCHES.keys(), "fields that nobody has looked at"


def test_each_argument_of_the_functions_around_a_template_is_known() -> None:
    tokenizers = [
        vars(importlib.import_module(module.name))
        for module in pkgutil.iter_modules(vllm.tokenizers.__path__, "vllm.tokenizers.")
    ]
    own = [
        kind.apply_chat_template
        for names in tokenizers
        for kind in names.values()
        if isinstance(kind, type) and hasattr(kind, "apply_chat_template")
    ]
    found = {
        parameter.name
        for function in (safe_apply_chat_template, render_jinja_template, *own)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    assert found >= {"padding", "max_length", "tokenize", "model_config", "conversations"}
    # An encoder without a template reads this variable as an argument.
    assert found <= TEMPLATE_ARGUMENTS | {"reasoning_effort"}


def test_each_part_of_a_message_with_media_is_known() -> None:
    assert {*MEDIA, *BEYOND} >= chat_utils._MEDIA_CONTENT_PART_KEYS


MAX_VALUES = 200
LARGE_TEXT = "a" * (1 << 18)

NUMBERED = {
    "/v1/completions": {"prompt"},
    "/detokenize": {"tokens"},
    "/process": {"records"},
    **{path: {"input"} for path in (EMBEDDINGS, *CLASSIFY)},
}
"""Fields that are prompts in tokens, or vectors: in these alone numbers are cheap."""

TEXTS = {
    *("prompt", "prompt_embeds", "prompts", "suffix", "records", "tokens"),
    *("messages", "system", "instructions", "tools", "previous_input_messages"),
    *("input", "query", "queries", "documents", "items", "instruction"),
    *("text_1", "text_2", "data_1", "data_2"),
    *("response_format", "structured_outputs", "text", "output_config", "tool_choice"),
}
"""Fields that may be as large as a body: they are the prompt, or a grammar. A new one is added here after a
look at what bounds the work on it."""


def _fields(openapi: Any, path: str) -> set[str]:
    """Return the fields of a route, and one that it doesn't have."""
    if path in (GENERATE, "/process"):
        return {*(GenerateRequest if path == GENERATE else ProcessRequest).model_fields, "unknown"}
    found = {"unknown"}
    for content in openapi["paths"][path]["post"]["requestBody"]["content"].values():
        for model in _variants(content["schema"] | {"root": openapi}):
            found.update(model.get("properties", {}))
    return found


def _large(numbers: int) -> list[Any]:
    """Return values of too many parts, for a field in which there may be less than so many numbers."""
    return [
        [1] * numbers,
        {"a": {"b": [1] * numbers}},
        {str(key): -1.5 for key in range(MAX_VALUES)},
        [[]] * MAX_VALUES,
        [{"a": "b", "content": "c", "d": ["e"] * MAX_VALUES}],
    ]


async def test_no_field_of_any_route_holds_an_engine_up(openapi: Any) -> None:
    texts = set()
    engines = {"demo": Engine(echo), "rank": Engine(echo)}
    async with Client(engines, max_values=MAX_VALUES) as client:

        async def taken(path: str, field: str, value: Any) -> bool:
            """Return whether an engine gets a field with a value."""
            body = {"model": "rank" if path == "/process" else "demo"} | {field: value}
            response = await client.post(path, json=body)
            requests = [request for engine in engines.values() for request in engine.requests]
            assert response.status_code == (200 if requests else 400), (path, field)
            assert "serves" not in response.text
            for engine in engines.values():
                engine.requests.clear()
            return bool(requests)

        for path in (*ROUTES, GENERATE, "/process"):
            numbered = NUMBERED.get(path, set())
            for field in _fields(openapi, path):
                for large in _large(NUMBERS * MAX_VALUES + 2 if field in numbered else MAX_VALUES):
                    assert not await taken(path, field, large), (path, field)
                if await taken(path, field, LARGE_TEXT):
                    texts.add(field)
            for field in numbered:
                # The field, its list and the model are values too.
                assert await taken(path, field, [1] * (NUMBERS * (MAX_VALUES - 3)))
    assert texts == TEXTS


async def test_the_options_of_a_request_have_a_bound_together(openapi: Any) -> None:
    async with Client(max_values=MAX_VALUES) as client:
        path = "/v1/chat/completions"
        options = {name: [1] * 4 for name in ("metadata", "vllm_xargs", "unknown")}
        assert (await client.post(path, json=options)).status_code == 200
        options["kv_transfer_params"] = [1] * 12
        response = await client.post(path, json=options)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "kv_transfer_params"
        assert "more than 20 values or 262144 bytes together" in error["message"]
        # Fields without a value of their own are values too, and so are names.
        assert (await client.post(path, json={str(key): 1 for key in range(21)})).status_code == 400
        assert (await client.post(path, json={LARGE_TEXT: 1})).status_code == 400
        # NaN, which strict JSON hasn't, lets a body be parsed whole.
        for content in (
            b'{"x": NaN, "y": [%s1]}' % (b"1," * 21),
            b'{"x": NaN, "%s": 1}' % LARGE_TEXT.encode(),
        ):
            assert (await client.post(path, content=content)).status_code == 400
        assert len(client.engine.requests) == 1


async def test_null_is_a_field_that_is_not_set_on_every_route(openapi: Any) -> None:
    engines = {"demo": Engine(echo), "rank": Engine(echo)}
    async with Client(engines) as client:
        for path in (*ROUTES, GENERATE, "/process"):
            name = "rank" if path == "/process" else "demo"
            content = {"model": name} | dict.fromkeys(_fields(openapi, path) - {"model"})
            response = await client.post(path, json=content)
            assert response.status_code == 200, (path, response.text)
            assert json.loads(engines[name].requests[-1].body) == {"model": name}, path


@pytest.mark.parametrize(("parse", "needed"), [(parse_generate, "prompts"), (parse_process, "records")])
def test_null_is_a_field_that_is_not_set_in_calls_of_a_handle(parse: Any, needed: str) -> None:
    kind = GenerateRequest if parse is parse_generate else ProcessRequest
    few: Any = {needed: ["a"]}
    for body in (few, json.dumps(few).encode()):
        nulls: Any = dict.fromkeys(kind.model_fields) | few
        given = nulls if isinstance(body, dict) else json.dumps(nulls).encode()
        assert parse(given, **LIMIT[needed]) == parse(body, **LIMIT[needed])


LIMIT = {"prompts": {"max_prompts": 9}, "records": {"max_records": 9}}
