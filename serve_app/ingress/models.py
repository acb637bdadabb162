"""The models that are served and their adapters, by name and route, their contexts, and their cards."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.api.routes import POOLING, PROCESS, SAME, listed, named
from serve_app.api.validation import suggestion
from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.models import ModelSettings
from serve_app.stats import ReplicaStats

MOST_COMPARED = 100
"""Names that an unknown one is compared with: thousands of adapters would hold the event loop."""

MAX_AGE_S = 1.0
"""Seconds for which the adapters of the replicas are used again: unknown names, which anyone can send, ask
them no more often."""

UNKNOWN_S = 5.0
"""Seconds after which a caller tries a name again that may be an adapter of a model which is starting."""


class ServedAdapter(NamedTuple):
    """An adapter that is served.

    Attributes:
        base: Id of its model.
        root: Its source, as clients see it.
    """

    base: str
    root: str


class ServedModels(Collection[str]):
    """The models of the service and their adapters; the collection of their ids.

    Args:
        models: The models, in the order of the config.
        replicas: Returns the statistics of a model's replicas, by the model's id; none: they can't be had.
        wake: Has a replica of a model started, by the model's id.
        clock: Seconds.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        replicas: Callable[[str], Awaitable[Sequence[ReplicaStats]]],
        wake: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = {model.id: model for model in models}
        self._replicas = replicas
        self._wake = wake
        self._clock = clock
        self._created = int(time.time())
        self._adapters: dict[str, ServedAdapter] = {}
        # Models of which no replica has answered: they may have adapters that the config doesn't name.
        self._unheard = {model.id: None for model in models if model.has_adapters}
        self._adapters_read_at = float("-inf")
        self._adapters_lock = asyncio.Lock()
        self._contexts: dict[str, int] = {}
        self._context_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._context_answers: Counter[str] = Counter()
        for model in models:
            adapters = adapters_by_id(model.id, model.adapters)
            self._set_adapters(model.id, {id: adapter.root for id, adapter in adapters.items()})

    def __contains__(self, name: object) -> bool:
        return name in self._models or name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter([*self._models, *self._adapters])

    def __len__(self) -> int:
        return len(self._models) + len(self._adapters)

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
            name: The name in the request; None: the only model that answers on that route.
            path: The route.
            allowed: Ids of the models that the caller may use; None: all. All other models are a 404.

        Raises:
            RequestError: 404, there is no such model; 400, it doesn't answer on that route, or several do and
                none is named.
        """
        if name is not None:
            model = self.find(name, allowed)
            if path not in model.routes:
                message = f"model: {name!r} {_describe(model)}, not {named(path)}"
                raise RequestError(400, "invalid_request_error", message, param="model")
            return name
        # Without a name, an engine answers as its model, not as an adapter.
        visible = [self._models[name] for name in self.visible(allowed) if name in self._models]
        models = [model for model in visible if path in model.routes]
        if path in POOLING:
            # Functions and pooling models go before language models, few of which can embed.
            models = [model for model in models if model.pools] or models
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
        """Return the model of a name, or the model of the adapter of that name.

        Args:
            name: The model or adapter.
            allowed: Ids of the models that the caller may use; None: all.

        Raises:
            RequestError: 404, the model doesn't exist, or the caller may not use it. The message doesn't say
                which. 503, it may be an adapter of a model in `unheard`.
        """
        if allowed is None or name in allowed:
            if name in self:
                return self._models[self.base_of(name)]
            if self._unheard:
                bases = ", ".join(self.unheard)
                message = f"The adapters of {bases} are not known yet: no replica has answered. Try again."
                raise RequestError(503, "service_unavailable", message, retry_after_s=UNKNOWN_S)
        there = self.visible(allowed)[:MOST_COMPARED]
        elsewhere = "GET /v1/models lists all that do"
        if allowed is None:
            message = f"The model {name!r} does not exist{suggestion(name, there, elsewhere, 'served here:')}"
        else:
            # As in OpenAI's API.
            known = suggestion(name, there, elsewhere, "it has access to:")
            message = f"The model {name!r} does not exist, or this API key has no access to it{known}"
        raise RequestError(404, "not_found_error", message, param="model")

    @property
    def unheard(self) -> list[str]:
        """Ids of the models whose adapters are not known yet: no replica has answered so far."""
        return list(self._unheard)

    async def learn(self, name: str | None) -> None:
        """Ask the replicas for their adapters if a name is not known, and wake the models in `unheard`."""
        if name is not None and name not in self:
            await self.refresh()
            self.wake()

    def wake(self) -> None:
        """Have a replica started of each model in `unheard`: some may be scaled to zero."""
        for base in self.unheard:
            self._wake(base)

    async def refresh(self, max_age_s: float = MAX_AGE_S) -> None:
        """Ask the replicas for their adapters, unless that is no longer ago than `max_age_s`.

        A model without replicas keeps the adapters that it had.
        """
        bases = [model.id for model in self._models.values() if model.has_adapters]
        if not bases:
            return
        async with self._adapters_lock:
            if self._clock() - self._adapters_read_at < max_age_s:
                return
            found = await asyncio.gather(*map(self._replicas, bases))
            for base, replicas in zip(bases, found, strict=True):
                if replicas:
                    adapters = [one for replica in replicas for one in replica.adapters or () if one]
                    self._set_adapters(base, {adapter.id: adapter.root for adapter in adapters})
                    self._unheard.pop(base, None)
            self._adapters_read_at = self._clock()

    def _set_adapters(self, base: str, roots: Mapping[str, str]) -> None:
        """Set the adapters of a model: their sources, as clients see them, by id."""
        others = {name: adapter for name, adapter in self._adapters.items() if adapter.base != base}
        # One assignment, since other threads read it meanwhile.
        self._adapters = others | {
            name: ServedAdapter(base, root) for name, root in roots.items() if name not in self._models
        }

    async def context(self, name: str) -> int | None:
        """Return the context length of a model; None: it is a function, or has not started yet.

        Args:
            name: The model.
        """
        if (known := self._contexts.get(name)) is not None:
            return known
        model = self.find(name)
        if not model.has_context:
            return None
        before = self._context_answers[name]
        async with self._context_locks[name]:
            # Each question goes to every replica: those that come during one share its answer.
            if self._context_answers[name] == before:
                for replica in await self._replicas(name):
                    if replica.max_model_len is not None:
                        self._contexts[name] = replica.max_model_len
                self._context_answers[name] += 1
        return self._contexts.get(name, model.context)

    def card(self, name: str, allowed: Collection[str] | None = None) -> Awaitable[JSON]:
        """Return a model or an adapter as `/v1/models` shows it: OpenAI's fields, vLLM's, and ours.

        Ours are `kind`, `routes` that it may serve, and with a simulated device `simulated`, the name of its
        profile.

        Args:
            name: The model or adapter.
            allowed: Ids of the models that the caller may use; None: all.

        Raises:
            RequestError: See `find`.
        """
        # Both are looked up at once: the adapter may be unloaded while the context is asked for.
        return self._card(name, self.find(name, allowed), self._adapters.get(name))

    async def _card(self, name: str, model: ModelSettings, adapter: ServedAdapter | None) -> JSON:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "saturate",
            "root": adapter.root if adapter else model.root,
            "parent": adapter.base if adapter else None,
            "max_model_len": await self.context(model.id),
            "permission": [],
            "kind": model.kind,
            "routes": [route for route in model.routes if route not in SAME],
            **({"simulated": model.profile} if model.profile else {}),
        }


def _describe(model: ModelSettings) -> str:
    if PROCESS in model.routes:
        paths = " and ".join(f"POST {path}" for path in model.routes)
        return f"is a function: {paths} {'serves' if len(model.routes) == 1 else 'serve'} it"
    if model.pools:
        return f"is a pooling model: POST {listed(model.routes)} serve it"
    return "is a language model: POST /generate and the OpenAI API serve it"
