"""The service with a method more, for Ray's `ServeDeploymentProcessor`: it reads a stream from every call."""

from collections.abc import AsyncGenerator

from ray.serve import Application

from serve_app import app
from serve_app.api.protocol import JSON
from serve_app.engine.llm import Engine

FIELDS = {"prompts", "service_tier"}


class StreamingEngine(Engine):
    """An Engine whose answers can be had as streams of one message."""

    async def answer(self, request: JSON) -> AsyncGenerator[JSON]:
        """Yield what `generate` returns; the processor's own fields are left out."""
        yield await self.generate({name: request[name] for name in FIELDS})


def build(args: JSON) -> Application:
    """As `serve_app.app.build`, with such Engines."""
    app.Engine = StreamingEngine  # type: ignore[attr-defined]
    return app.build(args)
