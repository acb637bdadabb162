"""The client of rows in the service: sends rows to the Engines, over deployment handles."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic_core import from_json
from ray.serve.handle import DeploymentHandle

from serve_app.api.errors import RequestError
from serve_app.api.facts import read
from serve_app.api.routes import MOVED
from serve_app.auth.key_store import KeyStore
from serve_app.engine.accounts import BY_QUOTA
from serve_app.ingress.body import look
from serve_app.ingress.engine_call import EngineCall, Engines, unavailable
from serve_app.ingress.models import ServedModels
from serve_app.ingress.status import Health, Waker, replica_stats
from serve_app.rows.pacing import EngineLoad, engine_load
from serve_app.rows.rows import QuotaError, RowAnswer, RowRequest
from serve_app.settings.schema import Settings
from serve_app.stats import ReplicaStats
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest

HEADERS = [(b"content-type", b"application/json")]

Handles = Mapping[str, DeploymentHandle[Any]]


class EngineClient:
    """Sends rows to the Engines, as the Ingress does with requests, within the same limits.

    Args:
        settings: The config's `args`.
        engines: The handle of each model's Engine, by model id.
        health: The state of the models' deployments.
        keys: The API keys, whose quotas hold for the rows of their batches; None: the service has no keys.
        clock: Monotonic clock, in seconds.

    Attributes:
        lost_calls: Calls that were lost with the process of their engine, by model.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Handles,
        health: Health,
        keys: KeyStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = settings.ingress
        self._salts = settings.salts
        self._keys = keys
        self.lost_calls: Counter[str] = Counter()
        self._handles = dict(engines)
        self._health = health
        self._asked: Counter[str] = Counter()
        self._used: set[str] = set()
        self._suspects = {model: asyncio.Lock() for model in self._handles}
        self._models = ServedModels(settings.models, self._replicas, Waker(self._handles).wake, clock)
        self._engines = {
            model: Engines(handle, partial(health.running, model)) for model, handle in self._handles.items()
        }

    @property
    def models(self) -> Collection[str]:
        """The ids of the models and adapters that are served, as they are now."""
        return self._models

    async def refresh(self, wake: bool = False) -> Collection[str]:
        """Read which adapters are served now; see `BatchClient`."""
        await self._models.refresh()
        if wake:
            self._models.wake()
        return self._models.unheard

    async def send(self, request: RowRequest) -> RowAnswer:
        """Send a row and return its answer.

        A row that loses its Engine is sent to another Engine. A row that has lost two Engines is a suspect:
        the row may be the cause, or may only have run beside the cause. Suspects of a model run one at a
        time. A suspect that loses a third Engine fails. Engines that the row lost in earlier tries count too.

        Raises:
            QuotaError: The tenant or key of the row has no quota left now.
            RequestError: The row is wrong, or no Engine could answer it.
        """
        facts, text = await look(
            len(request.text), lambda: read(request.text, request.endpoint, self._limits)
        )
        await self._models.learn(facts.model)
        served = self._models.choose(facts.model, request.endpoint, request.models)
        model = self._models.base_of(served)
        adapter = "" if served == model else served
        scheduling = request.scheduling
        key = self._keys.named(scheduling.key) if self._keys else None
        sent = RelayRequest(
            "POST",
            MOVED.get(request.endpoint, request.endpoint),
            b"",
            HEADERS,
            text,
            scheduling,
            max_tokens=self._limits.max_tokens,
            facts=facts.cached_for(adapter, scheduling.tenant if self._salts else ""),
            adapter=adapter,
            key=scheduling.key,
            quota=None if key is None else key.quota,
            source="batch",
        )
        died = partial(self.lost_calls.update, [model])
        alone = self._suspects[model]
        call = EngineCall(self._engines[model].ask, sent, died=died, alone=alone, lost=request.lost)
        self._asked[model] += 1
        self._used.add(model)
        try:
            return await answer_of(call)
        except RequestError:
            raise
        except Exception as error:
            call.log(f"batches: a row for {model} failed", error)
            raise unavailable(error) from error
        finally:
            self._asked[model] -= 1

    def base_of(self, model: str) -> str | None:
        """Return the model whose engines run a model or an adapter; None: the id isn't served now."""
        return self._models.base_of(model) if model in self._models else None

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load of the engines of a model.

        Args:
            base: The model; None: all engines that had rows since the last call with None.

        Returns:
            The load; None: unknown.
        """
        models = {base} if base else self._used | {model for model, rows in self._asked.items() if rows}
        if base is None:
            self._used.clear()
        found = await asyncio.gather(*map(self._replicas, models))
        replicas = [replica for one in found for replica in one]
        return engine_load(replicas)

    async def _replicas(self, model: str) -> list[ReplicaStats]:
        try:
            return await replica_stats(self._handles[model], partial(self._health.running, model))
        except Exception:
            # Without a load, only refusals bound the limit.
            return []


async def answer_of(call: EngineCall) -> RowAnswer:
    """Return the answer of an engine to a row.

    Raises:
        QuotaError: A quota has nothing left for the request now.
        Exception: No engine could answer the request; see `EngineCall.begin`.
    """
    try:
        head, text = await call.whole()
    finally:
        call.release()
    answer = await look(len(text), partial(parsed, head, text))
    if BY_QUOTA in head.headers:
        raise QuotaError(
            answer.status, "rate_limit_error", answer.message, retry_after_s=answer.retry_after_s
        )
    return answer


def parsed(head: Head, text: bytes) -> RowAnswer:
    """Return the answer with this head and body."""
    headers = {name.lower(): value for name, value in head.headers}
    retry_after_s = None
    with suppress(ValueError):
        retry_after_s = float(headers.get(b"retry-after", b""))
    status, body = head.status, None
    with suppress(ValueError):
        body = from_json(text)
    if not isinstance(body, dict):
        # vLLM answers some failures with plain text. The answer to a row is a JSON object.
        status = 502 if status == 200 else status
        body = RequestError(status, "internal_error", text.decode(errors="replace")[:1000]).body()
    return RowAnswer(status, body, retry_after_s, headers.get(b"x-should-retry") == b"false")
