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
        if tokens := question.get("tokens"):
            params = [SamplingParams(max_tokens=each, temperature=0, ignore_eos=True) for each in tokens]
        else:
            params = [SamplingParams(max_tokens=question["max_tokens"], temperature=0)] * len(
                question["prompts"]
            )
        started = time.monotonic()
        outputs = llm.generate(question["prompts"], params, use_tqdm=False)
        ended = time.monotonic()
        done = [output.outputs[0] for output in outputs]
        return {
            "started": started,
            "ended": ended,
            "tokens": [len(each.token_ids) for each in done],
            "texts": [each.text for each in done],
        }

    return answer


if __name__ == "__main__":
    serve(prepare)
