"""vLLM's compiler of grammars, as a process of its own makes it; see `serve_app.engine.grammars`."""

import json
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import StructuredOutputsParams

from serve_app.engine.grammars import Compiler
from serve_app.engine.vllm.seams import StructuredOutputManager, StructuredOutputRequest


def compiler(config: VllmConfig) -> Compiler:
    """Return what compiles a grammar as the engine of a config does.

    An engine compiles all grammars with the backend of its first one, which is the warm-up's.
    """
    manager = StructuredOutputManager(config)

    def prepared(kind: str, value: Any) -> tuple[StructuredOutputRequest, SamplingParams, Exception | None]:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: value}))
        refusal = None
        try:
            params._validate_structured_outputs(
                config.model_config, config.structured_outputs_config, manager.tokenizer
            )
        except (ValueError, VLLMClientError) as error:
            refusal = error
        asked = StructuredOutputRequest.from_sampling_params(params)
        assert asked is not None
        return asked, params, refusal

    def compile_grammar(kind: str, text: str) -> None:
        if manager.backend is None:
            asked, params, _ = prepared("choice", ["a", "b"])
            request = SimpleNamespace(
                request_id="first", sampling_params=params, structured_output_request=asked
            )
            manager.grammar_init(request)
            assert manager.backend is not None
        asked, _, refusal = prepared(kind, json.loads(text) if kind == "choice" else text)
        grammar = manager.backend.compile_grammar(*asked.structured_output_key)
        if refusal is not None:
            # With "auto" vLLM asks its other backends too; this one's reason, if it has one, comes first.
            raise refusal
        mask = manager.backend.allocate_token_bitmask(1)
        grammar.fill_bitmask(mask, 0)
        if not mask.any():
            raise ValueError("no text matches it, as where a rule leads to itself alone")

    compile_grammar("regex", "a")
    return compile_grammar
