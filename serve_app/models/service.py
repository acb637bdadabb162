"""The Serve config of a service with one model on one machine."""

from copy import deepcopy
from dataclasses import dataclass

from serve_app.ingress.status import engine_name
from serve_app.settings.environment import CONTROLLER, DRAINING, OFFLINE, REPLICAS, Variable
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.models import BatcherSettings
from serve_app.system.yaml_text import Item, Section, render

HOST, PORT = "127.0.0.1", 8000

ONE_PROCESS = Item(
    "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "The model runs in the engine's own process. vLLM's default on a CPU is a second process; the two poll "
    "each other, which takes half of two cores.",
)
"""`distributed_executor_backend` on a CPU."""


@dataclass
class Service:
    """What differs between the services of one model.

    Attributes:
        head: Comment at the top of the config.
        id: Name of the model for clients.
        source: Hugging Face id, directory, or saturate://demo.
        engine: Options of the engine.
        sampling: Defaults of /generate.
        offline: All its files are on this machine.
        folder: Name of the folder of its batches.
        ingress: Options of the Ingress deployment.
        deployment: Options of the Engine deployment.
    """

    head: str
    id: str
    source: str
    engine: Section
    sampling: Item
    offline: bool
    folder: str
    ingress: Section
    deployment: Section


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
        environment: Variables of the replicas.
    """

    head: str
    http: Section
    args: Section
    model: Section
    ingress: Section
    deployment: Section
    environment: Section

    def text(self) -> str:
        """Return the config as YAML."""
        application = {
            "name": Item("llm", "Name of the application, for deployment handles."),
            "route_prefix": Item("/", "Path prefix of all routes."),
            "import_path": Item(
                "serve_app.app:build", "The function that builds the application from `args`."
            ),
            "runtime_env": Item({"env_vars": Item(self.environment)}),
            "args": Item({"models": Item([self.model]), **self.args}),
            "deployments": Item([self.ingress, self.deployment]),
        }
        document = {
            "controller_options": Item({"runtime_env": Item({"env_vars": Item(_variables(CONTROLLER))})}),
            "http_options": Item(self.http),
            "applications": Item([application]),
        }
        return render(document, self.head)


def serve_config(service: Service) -> ServeConfig:
    """Return the config of a service; no part of it is shared with the service."""
    # A value that is set in a config would change `ONE_PROCESS` for all later ones.
    service = deepcopy(service)
    model: Section = {
        "id": Item(service.id, "Name of the model for clients (`model`)."),
        "source": Item(
            service.source,
            "Model to load: a Hugging Face id, a directory, or saturate://demo, the demo model.",
        ),
        "engine": Item(service.engine, "Options of `vllm serve`, with underscores."),
        "batcher": Item(_batcher()),
        "sampling": service.sampling,
    }
    return ServeConfig(
        service.head,
        http={
            "host": Item(
                HOST, "127.0.0.1: only this machine can connect. A cluster of several machines needs 0.0.0.0."
            ),
            "port": Item(PORT),
        },
        args=_args(service.folder),
        model=model,
        ingress={"name": Item("Ingress", "The HTTP front. It holds no model."), **service.ingress},
        deployment={
            "name": Item(engine_name(service.id), "The model. The name is `Engine:` and the id from above."),
            **service.deployment,
        },
        environment=_variables(REPLICAS, DRAINING, *([OFFLINE] if service.offline else [])),
    )


def _variables(*variables: Variable) -> Section:
    return {variable.name: Item(variable.value, variable.reason) for variable in variables}


def _batcher() -> Section:
    defaults = BatcherSettings()
    return {
        "policy": Item(
            defaults.policy,
            "Each request reserves KV cache for its prompt and its max_tokens. The other policy, "
            "max_utilization, reserves for flex requests what answers of their tenant have been: more of "
            "them run at once, and a few may be preempted.",
        ),
        "max_queue_size": Item(
            defaults.max_queue_size, "Most requests that wait. The next one gets a 429 with Retry-After."
        ),
    }


def _args(folder: str) -> Section:
    """Return the args beside the models."""
    limits = IngressSettings()
    return {
        "ingress": Item(
            {
                "max_body_bytes": Item(
                    limits.max_body_bytes, "Largest request body, in bytes. A larger one gets a 413."
                ),
                "body_timeout_s": Item(
                    limits.body_timeout_s, "Seconds for a request body to arrive. A slower one gets a 408."
                ),
                "max_prompts": Item(limits.max_prompts, "Most prompts or records in one call."),
                "max_n": Item(
                    limits.max_n,
                    "Most answers per prompt (`n`). A `max_tokens` beside it would limit the tokens of an "
                    "answer.",
                ),
            },
            "API keys: not needed on 127.0.0.1. The file has the keys' hashes; `saturate keys new` makes an "
            "entry, and a change takes effect within seconds.\n"
            " access:\n"
            "   keys_file: /etc/saturate/keys.yaml\n"
            "Limits for HTTP requests. These are the defaults.",
        ),
        "batches": Item(
            {
                "folder": Item(
                    f"~/.local/share/saturate/{folder}",
                    "Their folder. It is made at the start, and one service at a time uses it.",
                )
            },
            "Files and batches (/v1/files, /v1/batches), which survive a restart. Left out: there are none.",
        ),
    }
