"""A child that answers as vLLM's benchmark does, without a service and at once: `python FILE PARENT`.

With n requests in flight each request takes 0.1 s to its first token and n * 10 ms for each further token. A
rate of r requests per second has r requests in flight. The model's name says what goes wrong.
"""

import json
import sys
from typing import Any


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a load."""
    requests = task["requests"]
    load = task["clients"] or task["rate"]
    if task["model"] == "fails" and load > 1:
        return {"failure": "ValueError: no"}
    pace = 0.01 * load
    latencies = [0.1 + pace * (output - 1) for _, output in requests]
    # As many requests as the load has clients begin at the same time.
    starts = [1.0 + number // load * latencies[0] for number in range(len(requests))]
    refused = task["model"] == "refuses" or (task["model"] == "full" and load > 4)
    return {
        "duration": 1.0,
        "ttfts": [0.0 if refused else 0.1 for _ in requests],
        "latencies": [0.0] * len(requests) if refused else latencies,
        "output_lens": [0 if refused else output for _, output in requests],
        "start_times": starts,
        "errors": ["a stack\nToo Many Requests" if refused else "" for _ in requests],
    }


for line in sys.stdin:
    task = json.loads(line)
    if task["model"] == "dies":
        sys.exit(7)
    sys.stdout.write(json.dumps(answer(task)) + "\n")
    sys.stdout.flush()
