"""An application with quotas: three Ingress replicas in front of the Engines of the application `llm`."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import engine_name
from serve_app.quotas.deployment import Quotas
from serve_app.settings.schema import Settings, parse
from tests.e2e.guarded import ENGINES, Unprefixed

INGRESSES = 3


class Metered(Ingress):
    """An Ingress with quotas in front of another application's Engines.

    Args:
        settings: Its `args`.
        quotas: The deployment that keeps the quotas.
    """

    def __init__(self, settings: Settings, quotas: DeploymentHandle[Any]) -> None:
        models = [model.id for model in settings.models]
        engines = {model: serve.get_deployment_handle(engine_name(model), ENGINES) for model in models}
        super().__init__(settings, engines, quotas=quotas, engines_app=ENGINES)

    def __serve_build_asgi_app__(self) -> Any:
        return Unprefixed(super().__serve_build_asgi_app__())


def build(args: dict[str, Any]) -> Application:
    """Return the application; `args` are those of `serve_app.app.build`."""
    settings = parse(args)
    quotas = serve.deployment(name="Quotas", ray_actor_options={"num_cpus": 0})(Quotas).bind(settings)
    ingress = serve.deployment(num_replicas=INGRESSES, ray_actor_options={"num_cpus": 0})
    return ingress(serve.ingress()(Metered)).bind(settings, quotas)
