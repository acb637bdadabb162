"""The service with a streaming method, which Ray's `ServeDeploymentProcessor` needs."""

from collections.abc import AsyncGenerator

from ray.serve import Application

from serve_app import app
from serve_app.api.protocol import JSON
from serve_app.engine.deployment import Engine

FIELDS = {"prompts", "service_tier"}


class StreamingEngine(Engine):
    """An Engine that also answers with a stream of one message."""

    async def answer(self, request: JSON) -> AsyncGenerator[JSON]:
        """Yield the answer of `generate`, without the processor's own fields in the request."""
        yield await self.generate({name: request[name] for name in FIELDS})


def build(args: JSON) -> Application:
    """Return the application of a config, with such Engines; see `serve_app.app.build`."""
    app.Engine = StreamingEngine  # type: ignore[attr-defined]
    return app.build(args)
