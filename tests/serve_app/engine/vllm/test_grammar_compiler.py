"""vLLM's compiler of grammars: what the engine of the demo model takes, and the reasons of its refusals."""

import json
from collections.abc import Iterator

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output import (
    backend_guidance,
    backend_lm_format_enforcer,
    backend_outlines,
    backend_xgrammar,
)

from serve_app.engine.grammars import Compiler
from serve_app.engine.vllm.grammar_compiler import compiler
from serve_app.engine.vllm.options import vllm_args
from serve_app.engine.vllm.workarounds import validate_no_grammars
from serve_app.settings.models import LLMSettings


@pytest.fixture(scope="module")
def compiles() -> Compiler:
    settings = LLMSettings.model_validate({"id": "demo", "simulate": "h100-7b"})
    return compiler(AsyncEngineArgs.from_cli_args(vllm_args(settings)).create_engine_config())


def tag(schema: object) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    return json.dumps({"type": "structural_tag", "format": content})


TUPLE = {"type": "array", "items": [{"type": "string"}]}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json", json.dumps({"type": "object", "properties": {"é": {"enum": ["模"]}}}), ""),
        ("json", json.dumps({"type": "object", "properties": {"child": {"$ref": "#"}}}), ""),
        ("json", json.dumps({"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]}), ""),
        ("regex", "[a-z]+", ""),
        ("grammar", 'root ::= "a" root | "b"', ""),
        ("grammar", 'root ::= ""', ""),
        ("grammar", 'start: "a" | "b"', ""),
        ("choice", '["a", "\\"", "\\ud83d\\ude00"]', ""),
        ("structural_tag", tag({"type": "string"}), ""),
        ("json", json.dumps(TUPLE), "items must be a boolean or an object"),
        ("json", '{"type": "string", "pattern": "("}', "parenthesis"),
        ("json", '{"$ref": "#"}', "itself"),
        ("json", "{", "JSON"),
        ("regex", "(?=a)b", "Lookahead"),
        ("regex", "\0", "null characters"),
        ("grammar", "root ::= (", "EBNF parser error"),
        ("grammar", "start: x", "unknown name 'x'"),
        ("grammar", "root ::= root", "no text matches it"),
        ("structural_tag", "{}", "format"),
        ("structural_tag", tag(TUPLE), "items must be a boolean or an object"),
    ],
)
def test_a_grammar_compiles_or_fails_with_a_reason(
    compiles: Compiler, kind: str, text: str, reason: str
) -> None:
    if reason:
        with pytest.raises(Exception, match=reason):
            compiles(kind, text)
    else:
        compiles(kind, text)


MODULES = (backend_guidance, backend_lm_format_enforcer, backend_outlines, backend_xgrammar)


@pytest.fixture
def validators() -> Iterator[None]:
    """Give vLLM's own validators back."""
    kept = [dict(vars(module)) for module in MODULES]
    yield
    for module, names in zip(MODULES, kept, strict=True):
        vars(module).update(names)


@pytest.mark.usefixtures("validators")
def test_a_server_that_validates_no_grammars_parses_none() -> None:
    def validate(**outputs: object) -> StructuredOutputsParams:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**outputs))
        backend_xgrammar.validate_xgrammar_grammar(params)
        assert params.structured_outputs is not None
        return params.structured_outputs

    with pytest.raises(VLLMValidationError, match="regex"):
        validate(regex="(")
    choice = validate(choice=["a"])
    validate_no_grammars()
    assert validate(regex="(").regex == "("
    assert validate(choice=["a"]) == choice
    with pytest.raises(VLLMValidationError, match="structural tag"):
        validate(structural_tag="{}")
