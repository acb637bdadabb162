"""The Serve config of a service with one model on one machine."""

import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from serve_app.ingress.status import engine_name
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.models import BatcherSettings, LLMSettings
from serve_app.system.yaml_text import Noted, Section, render

HOST, PORT = "127.0.0.1", 8000

HOST_VARIABLE = "SATURATE_HOST"
"""Environment variable with another default of `http.host`; the container images set it to 0.0.0.0."""

ONE_PROCESS = Noted(
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "The model runs in the engine's own process. vLLM's default on a CPU is a second process; both poll each "
    "other, which takes half of two cores.",
)
"""`distributed_executor_backend` on a CPU."""


@dataclass
class ServiceParts:
    """The parts that differ between services of one model.

    Attributes:
        head: Comment at the top of the config.
        id: Name of the model for clients.
        source: Hugging Face id, directory, or saturate://demo.
        engine: Options of the engine.
        sampling: Defaults of /generate.
        folder: Name of the folder for batches.
        ingress: Options of the Ingress deployment.
        deployment: Options of the Engine deployment.
        nodes: Machines of a replica.
    """

    head: str
    id: str
    source: str
    engine: Section
    sampling: Noted
    folder: str
    ingress: Section
    deployment: Section
    nodes: int = 1


@dataclass
class ServeConfig:
    """A Serve config in the parts that `--set` names.

    Attributes:
        head: Comment at the top.
        http: `http_options`.
        args: `args` of the application, without the models.
        model: The entry of the model.
        ingress: The Ingress deployment.
        deployment: The Engine deployment.
    """

    head: str
    http: Section
    args: Section
    model: Section
    ingress: Section
    deployment: Section

    def text(self) -> str:
        """Return the config as YAML."""
        application = {
            "name": Noted("llm", "Name of the application, for deployment handles."),
            "route_prefix": Noted("/", "Path prefix of all routes."),
            "import_path": Noted(
                "serve_app.app:build", "The function that builds the application from `args`."
            ),
            "args": Noted({"models": Noted([self.model]), **self.args}),
            "deployments": Noted([self.ingress, self.deployment]),
        }
        document = {
            "http_options": Noted(self.http),
            "applications": Noted([application]),
        }
        return render(document, self.head)


def serve_config(service: ServiceParts) -> ServeConfig:
    """Return the config of a service; it shares no objects with the service.

    Args:
        service: The parts of the service.
    """
    # Without a copy, a value set in this config would change `ONE_PROCESS` in all later configs.
    service = deepcopy(service)
    model: Section = {
        **described(LLMSettings, id=service.id, source=service.source),
        **(described(LLMSettings, nodes=service.nodes) if service.nodes > 1 else {}),
        "engine": Noted(service.engine, "Options of `vllm serve`, with underscores."),
        "batcher": Noted(described(BatcherSettings, policy=..., max_queue_size=...)),
        "sampling": service.sampling,
    }
    return ServeConfig(
        service.head,
        http={
            "host": Noted(
                os.environ.get(HOST_VARIABLE) or (HOST if service.nodes == 1 else "0.0.0.0"),
                "127.0.0.1: only this machine can connect. A cluster of several machines needs 0.0.0.0.",
            ),
            "port": Noted(PORT),
        },
        args=_args(service.folder),
        model=model,
        ingress={"name": Noted("Ingress", "The HTTP front. It holds no model."), **service.ingress},
        deployment={
            "name": Noted(engine_name(service.id), "The model. The name is `Engine:` and the id from above."),
            **service.deployment,
        },
    )


def service_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a service.

    Args:
        host: Address that the service listens on.
        port: Port that the service listens on.
    """
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{near}]' if ':' in near else near}:{port}"


def described(settings: type[BaseModel], **values: Any) -> Section:
    """Return settings as a section, each with its description as the comment.

    Args:
        settings: The model class of the settings.
        values: Values by name; `...` stands for the default.
    """
    fields = settings.model_fields
    return {
        name: Noted(fields[name].default if value is ... else value, fields[name].description or "")
        for name, value in values.items()
    }


def _args(folder: str) -> Section:
    """Return the args of the application, without the models."""
    return {
        "ingress": Noted(
            described(IngressSettings, max_body_bytes=..., body_timeout_s=..., max_prompts=..., max_n=...),
            "API keys: not needed on 127.0.0.1. The file has the keys' hashes; `saturate keys new` makes an "
            "entry, and a change takes effect within seconds.\n"
            " access:\n"
            "   keys_file: /etc/saturate/keys.yaml\n"
            "Limits for HTTP requests. These are the defaults.",
        ),
        "batches": Noted(
            described(BatchesSettings, folder=f"~/.local/share/saturate/{folder}"),
            "Files and batches (/v1/files, /v1/batches), which survive a restart. Left out: no batches.",
        ),
    }
