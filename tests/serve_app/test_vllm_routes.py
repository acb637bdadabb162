"""Routes of vLLM's own application that clients can reach, with everything in it switched on."""

import json
import subprocess
import sys

import pytest

from tests.serve_app.ingress.engine_doubles import Client, health

__all__ = ["health"]

REACHED = {
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
}
"""Routes that are served on purpose, all by POST; a new one is added here after a look at what it does."""

ADMINISTRATIVE = {
    "/sleep",
    "/wake_up",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/tokenizer_info",
    "/metrics",
    "/collective_rpc",
    "/pause",
    "/abort_requests",
    "/server_info",
    "/update_weights",
    "/start_profile",
    "/scale_elastic_ep",
}
"""Some that have to be among those that were tried."""


@pytest.fixture(scope="module")
def routes() -> list[tuple[str, list[str]]]:
    command = [sys.executable, "-m", "tests.e2e.vllm_app"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found: list[tuple[str, list[str]]] = json.loads(done.stdout)["routes"]
    return found


async def test_only_what_clients_need_is_reached(routes: list[tuple[str, list[str]]]) -> None:
    assert {path for path, _ in routes} >= ADMINISTRATIVE | REACHED
    reached = set()
    async with Client() as client:
        for path, _ in routes:
            for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
                await client.request(method, path.replace("{", "").replace("}", ""), json={"prompts": ["x"]})
                for request in client.engine.requests:
                    reached.add((request.method, request.path))
                client.engine.requests.clear()
    assert reached == {("POST", path) for path in REACHED}
