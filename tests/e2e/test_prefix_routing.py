"""Choice of the replica on the live service: prompts that share a prefix go where it is cached."""

from collections import Counter

import httpx
import pytest

from tests.e2e.service import Service
from tests.e2e.services import NODES
from tests.progress import ANSWER_S, wait_until

pytestmark = pytest.mark.long

PREFIXES = 10
REPEATS = 5


def completed(http: httpx.Client) -> Counter[str]:
    """Return the requests that each replica has completed."""
    replicas = http.get("/stats").json()["models"]["demo"]["replicas"]
    return Counter({one["replica"]: one["batcher"]["total_completed"] for one in replicas})


def cached_tokens(nodes: list[str]) -> float:
    """Return the tokens of prompts that all replicas found in their prefix caches, as last reported."""
    pages = [httpx.get(f"http://{node}/metrics", timeout=ANSWER_S).text for node in nodes]
    lines = [line for page in pages for line in page.splitlines()]
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("ray_vllm_prefix_cache_hits_total")
    )


def test_prompts_with_one_prefix_go_to_one_replica_and_find_it_cached(pair: Service) -> None:
    nodes = pair.run_python(NODES)
    before = cached_tokens(nodes)
    chosen = []
    with httpx.Client(base_url=pair.url, timeout=ANSWER_S) as http:
        for number in range(PREFIXES):
            there = completed(http)
            # A token for each character: 1,280 tokens are ten blocks of the KV cache.
            prefix = f"{100 + number} + ".ljust(16, "1") * 80
            for repeat in range(REPEATS):
                # A connection each: both Ingresses get their part.
                body = {"model": "demo", "prompt": f"{prefix}{repeat}?", "max_tokens": 2}
                response = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=ANSWER_S)
                assert response.status_code == 200, response.text
                assert response.json()["usage"]["prompt_tokens"] > 1_280
            chosen.append(completed(http) - there)
    print(chosen, flush=True)
    assert [sorted(counts.values()) for counts in chosen] == [[REPEATS]] * PREFIXES
    assert len(set().union(*chosen)) == 2, "both replicas have a part of the prefixes"
    least = PREFIXES * (REPEATS - 1) * 1_280
    wait_until(
        lambda: cached_tokens(nodes) - before >= least,
        tell=lambda: cached_tokens(nodes) - before,
        every_s=1.0,
    )
