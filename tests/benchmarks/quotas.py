"""CPU that quotas cost the Ingress: ``python -m tests.benchmarks.quotas``.

One process plays the client and the engine, and runs the Ingress with and without quotas in turns. The quota
has a limit of each kind, none of which is reached, so that leases cover all requests.
"""

import asyncio
import gc
import json
import statistics
import time
from typing import Any
from unittest import mock

from ray import serve
from starlette.types import ASGIApp, Message, Scope

from serve_app.auth import bind_check
from serve_app.ingress import deployment
from serve_app.ingress.status import Health
from serve_app.relay.frame import pack
from serve_app.relay.usage import RequestUsage
from serve_app.settings.schema import parse
from tests.serve_app.ingress.engine_doubles import CHAT, PLAIN, Engine, answer
from tests.serve_app.quotas.fleet import QuotasHandle

ROUNDS, REQUESTS = 21, 500
MANY = 1 << 40
QUOTA = {"tokens_per_minute": MANY, "requests_per_minute": MANY, "max_concurrency": MANY}
BODY = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 64}
).encode()
HEADERS = [(b"content-type", b"application/json"), (b"host", b"saturate")]


def ingress(*, quotas: bool) -> tuple[ASGIApp, Engine]:
    """Return an Ingress and the engine behind it."""
    usage = {"quotas": {"folder": "/nowhere", "tenants": {"default": QUOTA}}} if quotas else {}
    model = {"id": "demo", "source": "x", "engine": {"max_model_len": 4096}}
    settings = parse({"models": [model], "usage": usage})
    used = RequestUsage(prompt_tokens=64, output_tokens=64)
    engine = Engine(answer(pack(head=PLAIN, body=b"{}", usage=used)), stats=[{"max_model_len": 4096}])
    handles: Any = {"demo": engine}
    handle = QuotasHandle(settings.usage.quotas) if settings.usage.quotas else None
    return deployment.Ingress(settings, handles, quotas=handle).__serve_build_asgi_app__(), engine


async def request(app: ASGIApp) -> None:
    """Send one request and read its answer."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": HEADERS,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    body: list[Message] = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    await app(scope, receive, send)


async def cpu_us(app: ASGIApp, engine: Engine, requests: int = REQUESTS) -> float:
    """Return the CPU time of a request, in microseconds."""
    began = time.process_time()
    for _ in range(requests):
        await request(app)
    spent = time.process_time() - began
    engine.requests.clear()
    engine.answers.clear()
    return spent / requests * 1e6


async def measure() -> None:
    """Print the cost of a request without and with quotas, and of the pairs' differences."""
    sites = [ingress(quotas=False), ingress(quotas=True)]
    # As Ray Serve does it in a replica.
    gc.collect()
    gc.freeze()
    for site in sites:
        await cpu_us(*site)
    pairs = [[await cpu_us(*site) for site in sites] for _ in range(ROUNDS)]
    without, limited = (statistics.median(column) for column in zip(*pairs, strict=True))
    quarters = statistics.quantiles([after - before for before, after in pairs], n=4)
    print(f"without quotas {without:.0f} us, with {limited:.0f} us")
    print(
        f"difference {quarters[1]:.1f} us, quartiles {quarters[0]:.1f} to {quarters[2]:.1f} ({ROUNDS} pairs)"
    )


def main() -> None:
    """Run the measurement."""

    async def running(self: Health, model: str) -> int:
        return 1

    context = mock.Mock(app_name="llm", replica_tag="ingress")
    with (
        mock.patch.object(serve, "get_replica_context", return_value=context),
        mock.patch.object(Health, "running", running),
        # It would start Ray, whose threads take time of their own.
        mock.patch.object(bind_check, "serve_host", return_value="127.0.0.1"),
    ):
        asyncio.run(measure())


if __name__ == "__main__":
    main()
