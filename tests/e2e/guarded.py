"""An application with an Ingress that asks for keys, in front of the Engines of the application `llm`.

It shares them: deployed beside `llm`, it costs one Ingress replica and restarts nothing.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import BATCHES, QUOTAS, engine_name
from serve_app.settings.schema import Settings, parse

ENGINES = "llm"
"""The application that has the Engines."""


class Unprefixed:
    """Serves an application under a prefix as if it were at the root."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if prefix := scope.get("root_path"):
            scope = {**scope, "root_path": "", "path": scope["path"].removeprefix(prefix)}
        await self._app(scope, receive, send)


class Guarded(Ingress):
    """An Ingress in front of another application's Engines.

    Args:
        settings: Its `args`.
    """

    def __init__(self, settings: Settings) -> None:
        models = [model.id for model in settings.models]
        engines = {model: serve.get_deployment_handle(engine_name(model), ENGINES) for model in models}
        batches = serve.get_deployment_handle(BATCHES, ENGINES)
        quotas = serve.get_deployment_handle(QUOTAS, ENGINES)
        super().__init__(settings, engines, batches, quotas, engines_app=ENGINES)

    def __serve_build_asgi_app__(self) -> Any:
        return Unprefixed(super().__serve_build_asgi_app__())


def build(args: dict[str, Any]) -> Application:
    """Return the application; `args` are those of `serve_app.app.build`."""
    return serve.deployment()(serve.ingress()(Guarded)).bind(parse(args))
