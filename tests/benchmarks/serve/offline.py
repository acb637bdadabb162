"""`vllm.LLM.generate` on lists of prompts, as in its documentation, without a service."""

import json
import sys
import time
from collections.abc import Callable

from serve_app.api.protocol import JSON
from tests.benchmarks.serve.pipes import serve


def prepare() -> Callable[[JSON], JSON]:
    """Start the engine; return the function that answers lists of prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))

    def answer(question: JSON) -> JSON:
        params = [
            SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True) for tokens in question["tokens"]
        ]
        started = time.monotonic()
        outputs = llm.generate(question["prompts"], params, use_tqdm=False)
        ended = time.monotonic()
        tokens = [len(output.outputs[0].token_ids) for output in outputs]
        return {"started": started, "ended": ended, "tokens": tokens}

    return answer


if __name__ == "__main__":
    serve(prepare)
