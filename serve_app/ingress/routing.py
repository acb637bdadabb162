"""Routing of a request to a model, by its name and route."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.routes import EMBEDDINGS, POOLING, PROCESS, TOKENIZING, listed, named
from serve_app.api.validation import suggestion
from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.models import FunctionSettings, ModelSettings

MOST_COMPARED = 100
"""Names that an unknown one is compared with: thousands of adapters would hold the event loop."""


class Adapter(NamedTuple):
    """An adapter that is served.

    Attributes:
        base: Id of its model.
        root: Its source, as clients see it.
    """

    base: str
    root: str


class Routing(Collection[str]):
    """The models of the service and their adapters, and the routes that each one answers.

    It is the collection of their ids.

    Args:
        models: The models, in the order of the config.
    """

    def __init__(self, models: Sequence[ModelSettings]) -> None:
        self._models = {model.id: model for model in models}
        self._adapters: dict[str, Adapter] = {}
        for model in models:
            if not isinstance(model, FunctionSettings):
                adapters = adapters_by_id(model.id, model.adapters)
                self.set_adapters(model.id, {id: adapter.root for id, adapter in adapters.items()})

    def __contains__(self, name: object) -> bool:
        return name in self._models or name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter([*self._models, *self._adapters])

    def __len__(self) -> int:
        return len(self._models) + len(self._adapters)

    def set_adapters(self, base: str, roots: Mapping[str, str]) -> None:
        """Set the adapters of a model.

        Args:
            base: Id of the model.
            roots: Their sources, as clients see them, by id.
        """
        others = {name: adapter for name, adapter in self._adapters.items() if adapter.base != base}
        # One assignment, since other threads read it meanwhile.
        self._adapters = others | {
            name: Adapter(base, root) for name, root in roots.items() if name not in self._models
        }

    def adapter(self, name: str) -> Adapter | None:
        """Return the adapter of that id; None: there is none."""
        return self._adapters.get(name)

    def base_of(self, name: str) -> str:
        """Return the id of the model that runs a model or an adapter."""
        adapter = self._adapters.get(name)
        return adapter.base if adapter else name

    def visible(self, allowed: Collection[str] | None) -> list[str]:
        """Return the ids of the models and adapters that a caller may use.

        Args:
            allowed: The ids that its key allows; None: all.
        """
        return [name for name in self if allowed is None or name in allowed]

    def choose(self, name: str | None, path: str, allowed: Collection[str] | None = None) -> str:
        """Return the id of the model or adapter that answers a request.

        Args:
            name: The one that the request names; None: the only one that answers on that route.
            path: The route.
            allowed: Ids of the models that the caller may use; None: all. To it, there are no others.

        Raises:
            RequestError: 404, there is no such model; 400, it doesn't answer on that route, or several do and
                none is named.
        """
        if name is not None:
            model = self.find(name, allowed)
            if not _serves(model, path):
                message = f"model: {name!r} {_describe(model)}, not {named(path)}"
                raise RequestError(400, "invalid_request_error", message, param="model")
            return name
        # Without a name, an engine answers as its model, not as an adapter.
        visible = [self._models[name] for name in self.visible(allowed) if name in self._models]
        models = [model for model in visible if _serves(model, path)]
        if path in POOLING:
            # Functions and pooling models go before language models, few of which can embed.
            models = [model for model in models if _pools(model)] or models
        if len(models) == 1:
            return models[0].id
        if models:
            names = ", ".join(model.id for model in models)
            message = f"model: required, since several are served: {names}"
        else:
            there = "; ".join(f"{model.id!r} {_describe(model)}" for model in visible)
            message = f"No model answers {named(path)} here: {there or 'this API key has access to none'}"
        raise RequestError(400, "invalid_request_error", message, param="model")

    def find(self, name: str, allowed: Collection[str] | None = None) -> ModelSettings:
        """Return the model of that name, or the one of the adapter of that name.

        Args:
            name: The model or adapter.
            allowed: Ids of the models that the caller may use; None: all.

        Raises:
            RequestError: 404, there is none, or the caller may not use it. The message doesn't say which.
        """
        if name in self and (allowed is None or name in allowed):
            return self._models[self.base_of(name)]
        there = self.visible(allowed)[:MOST_COMPARED]
        elsewhere = "GET /v1/models lists those that do"
        if allowed is None:
            message = f"The model {name!r} does not exist{suggestion(name, there, elsewhere, 'served here:')}"
        else:
            # As in OpenAI's API.
            known = suggestion(name, there, elsewhere, "it has access to:")
            message = f"The model {name!r} does not exist, or this API key has no access to it{known}"
        raise RequestError(404, "not_found_error", message, param="model")


def card(
    model: ModelSettings,
    created: int,
    max_model_len: int | None,
    id: str = "",
    adapter: Adapter | None = None,
) -> JSON:
    """Return a model or an adapter as `/v1/models` shows it: OpenAI's fields, those that vLLM adds, and ours.

    Ours are `kind`, and with a simulated device `simulated`, the name of its profile.

    Args:
        model: The model.
        created: When this service started, in seconds since the epoch.
        max_model_len: Tokens of its context; None: it has none, or hasn't started.
        id: Id of the adapter.
        adapter: The adapter of the model; None: it is the model itself.
    """
    root = model.target if isinstance(model, FunctionSettings) else model.source
    return {
        "id": id if adapter else model.id,
        "object": "model",
        "created": created,
        "owned_by": "saturate",
        "root": adapter.root if adapter else root,
        "parent": adapter.base if adapter else None,
        "max_model_len": max_model_len,
        "permission": [],
        "kind": model.kind,
        **({"simulated": profile} if (profile := simulated(model)) else {}),
    }


def simulated(model: ModelSettings) -> str | None:
    """Return the profile of a model's simulated device by its name; None: the model runs."""
    if isinstance(model, FunctionSettings) or model.simulate is None:
        return None
    return model.simulate.name


def _serves(model: ModelSettings, path: str) -> bool:
    if isinstance(model, FunctionSettings):
        return path == PROCESS or (path == EMBEDDINGS and model.embeddings)
    if path == PROCESS:
        return False
    if pooled := model.engine.pooling_routes:
        # vLLM knows better which of them the model serves.
        return path in pooled or path in TOKENIZING
    return model.engine.runner != "generate" or path not in POOLING


def _pools(model: ModelSettings) -> bool:
    return isinstance(model, FunctionSettings) or bool(model.engine.pooling_routes)


def _describe(model: ModelSettings) -> str:
    if not isinstance(model, FunctionSettings):
        if pooled := model.engine.pooling_routes:
            return f"is a pooling model: POST {listed(pooled)} serve it"
        return "is a language model: POST /generate and the OpenAI API serve it"
    if model.embeddings:
        return "is a function: POST /process and POST /v1/embeddings serve it"
    return "is a function: POST /process serves it"
