"""vLLM's serving benchmark in a process of its own: loads come as lines of JSON, results go as lines of JSON.

The command `vllm bench serve` doesn't start beside the CPU build of vLLM: the function behind it is called.
Prompts are random token ids, so no tokenizer is needed here, and the service may run on another machine.
"""

import asyncio
import json
import os
import random
import signal
import sys
from typing import Any, NamedTuple

from serve_app.api.protocol import JSON
from serve_app.system.parent_death import end_with

TOKENS = range(33, 127)
"""Token ids of prompts: every vocabulary has them, and few tokenizers have special tokens among them."""

KEPT = ("duration", "ttfts", "latencies", "output_lens", "start_times", "errors")
"""Fields of vLLM's result that are passed on; all but the first have a value for each request."""

BROKEN = "an answer broke off"


class Task(NamedTuple):
    """One load.

    Attributes:
        url: Base URL of the service.
        model: The model.
        requests: Tokens of the prompt and of the answer of each request, in the order in which they are sent.
        clients: Requests that are in flight at the same time; None: `rate` has the load.
        rate: Requests per second, at random times; None: `clients` has the load.
        ramp_s: Seconds over which the clients begin, since clients that begin at once would stay in step.
        seed: Seed of the prompts; each load has another one, since a repeated prompt is in the prefix cache.
    """

    url: str
    model: str
    requests: list[tuple[int, int]]
    clients: int | None
    rate: float | None
    ramp_s: float
    seed: int


async def measure(task: Task) -> JSON:
    """Put a load on a service, and return what vLLM's benchmark has measured, in seconds.

    An answer that has fewer tokens than its request asks for is an error.
    """
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.serve import TaskType, benchmark

    numbers = random.Random(task.seed)
    clients = task.clients or 0
    samples = [
        SampleRequest(
            prompt=numbers.choices(TOKENS, k=prompt),
            prompt_len=prompt,
            expected_output_len=output,
            timestamp=task.ramp_s * min(1.0, place / max(clients, 1)),
        )
        for place, (prompt, output) in enumerate(task.requests)
    ]
    found: dict[str, Any] = await benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="vllm",
        api_url=f"{task.url}/v1/completions",
        base_url=task.url,
        model_id=task.model,
        model_name=task.model,
        tokenizer=None,
        input_requests=samples,
        logprobs=None,
        request_rate=task.rate or float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=task.clients,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": 0},
        ready_check_timeout_sec=0,
        self_timed=task.clients is not None,
    )
    wanted = (output for _, output in task.requests)
    found["errors"] = [
        error or (BROKEN if tokens < output else "")
        for error, tokens, output in zip(found["errors"], found["output_lens"], wanted, strict=True)
    ]
    return {name: found[name] for name in KEPT}


def main() -> None:
    """Measure a load for each line of standard input, until it ends."""
    end_with(int(sys.argv[1]), signal.SIGKILL)
    # vLLM prints a report of its own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = asyncio.run(measure(Task(**json.loads(line))))
        except Exception as error:
            # The command tells it.
            answer = {"failure": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


if __name__ == "__main__":
    main()
