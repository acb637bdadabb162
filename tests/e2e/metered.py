"""An application with API keys: three Ingress replicas in front of the Engines of the application `llm`.

The Engines keep to the quotas of `llm`, and to those of the keys.
"""

from typing import Any

from ray import serve
from ray.serve import Application

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import QUOTAS, engine_name
from serve_app.settings.schema import Settings, parse
from tests.e2e.guarded import ENGINES, Unprefixed

INGRESSES = 3


class Metered(Ingress):
    """An Ingress with keys in front of another application's Engines.

    Args:
        settings: Its `args`.
    """

    def __init__(self, settings: Settings) -> None:
        models = [model.id for model in settings.models]
        engines = {model: serve.get_deployment_handle(engine_name(model), ENGINES) for model in models}
        quotas = serve.get_deployment_handle(QUOTAS, ENGINES)
        super().__init__(settings, engines, quotas=quotas, engines_app=ENGINES)

    def __serve_build_asgi_app__(self) -> Any:
        return Unprefixed(super().__serve_build_asgi_app__())


def build(args: dict[str, Any]) -> Application:
    """Return the application; `args` are those of `serve_app.app.build`."""
    ingress = serve.deployment(num_replicas=INGRESSES, ray_actor_options={"num_cpus": 0})
    return ingress(serve.ingress()(Metered)).bind(parse(args))
