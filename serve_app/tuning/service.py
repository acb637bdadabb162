"""A running service as a measurement sees it: facts about a model, and the times of answers."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import httpx

from serve_app.api.protocol import JSON
from serve_app.api.validation import FEW, suggestion
from serve_app.client import AsyncClient, ServiceError
from serve_app.stats import SchedulerFigures
from serve_app.tuning.goals import Metric

TOKENS = range(33, 127)
"""Token ids of prompts: every vocabulary has these ids, and in few tokenizers they are special tokens."""

CONNECT_S, SILENCE_S = 30.0, 600.0
"""Seconds to get a connection, and the longest silence of an answer: the service may load the model first."""

TAIL = 4_096
"""Bytes at the end of an answer that are kept for its usage."""

USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
ERROR = re.compile(rb'data: \{"error":.*?"message": ?"([^"]*)')


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a service says about a model.

    Attributes:
        model: Id of the model.
        max_model_len: Context in tokens.
        replicas: Number of replicas.
        kv_tokens: Tokens that may be in flight on a replica.
        max_num_seqs: Requests that may run on a replica.
        in_flight: Requests that run or wait on any replica.
        submitted: Requests that the replicas have taken so far.
        max_num_batched_tokens: Most tokens in a step of the engine; None: the service doesn't say.
        load_s: Seconds that the engine took to load the model.
        sleep_s: Seconds that falling asleep took the last time; 0: the model has not slept.
        wake_s: Seconds that waking up took the last time.
        names: Ids of the replicas.
        scheduler: The scheduler of the replica that has learned from the most steps; None: vLLM's own.
    """

    model: str
    max_model_len: int
    replicas: int
    kv_tokens: int
    max_num_seqs: int
    in_flight: int
    submitted: int
    max_num_batched_tokens: int | None = None
    load_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    names: frozenset[str] = frozenset()
    scheduler: SchedulerFigures | None = None


class LoadRequest(NamedTuple):
    """A request.

    Attributes:
        path: URL path.
        body: Body.
        tokens: Most tokens of the answer.
    """

    path: str
    body: JSON
    tokens: int


@dataclass(slots=True)
class LoadAnswer:
    """One request, by its times in seconds on the clock.

    Attributes:
        sent_at: When the request was due; a late sender sends it later.
        tokens: Tokens of the answer; while it runs, the tokens that the request asks for.
        first_at: When the first token came; None: not yet.
        ended_at: When the last token came; None: not yet.
        failed: The answer was an error, had no token, or broke off.
    """

    sent_at: float
    tokens: int
    first_at: float | None = None
    ended_at: float | None = None
    failed: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite before."""
        return math.inf if self.first_at is None else self.first_at - self.sent_at

    def seconds(self, metric: Metric, now: float) -> tuple[float, bool] | None:
        """Return the value of a metric, and whether it is final; before the end it is a lower bound.

        None: the metric has no value: an answer with one token has no time per further token.
        """
        if self.failed:
            return math.inf, True
        begin, end, parts = self.sent_at, self.ended_at, 1
        if metric == "ttft":
            end = self.first_at
        elif metric == "tpot":
            if self.first_at is None or self.tokens < 2:
                return None
            begin, parts = self.first_at, self.tokens - 1
        return ((now if end is None else end) - begin) / parts, end is not None


class Service:
    """A service behind a URL; an asynchronous context manager.

    Attributes:
        url: Base URL, without a slash at its end.
        clock: Returns the time in seconds.

    Args:
        url: Base URL; `/v1` at its end is left out.
        api_key: Sent as a bearer token.
        clock: Returns the time in seconds.
        transport: Another transport, for tests.

    Raises:
        ServiceError: The URL is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        timeout = httpx.Timeout(CONNECT_S, read=SILENCE_S)
        self._client = AsyncClient(url, api_key, timeout=timeout, transport=transport)
        self.url = self._client.url
        self.clock = clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def find(self, model: str | None) -> str:
        """Return the id of the model to measure.

        Args:
            model: The id; None: the only language model.

        Raises:
            ServiceError: There is no service, or no such model, or several without a choice.
        """
        cards = await self._client.cards()
        names = [card.id for card in cards if card.kind == "llm" and not card.parent]
        if not names:
            raise ServiceError(f"{self.url}: it serves no language model that this key may use")
        if model is None and len(names) > 1:
            shown = ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")
            raise ServiceError(f"{self.url}: it serves several models; choose with --model: {shown}")
        if model is not None and model not in names:
            raise ServiceError(f"{self.url}: it has no model {model!r}{suggestion(model, names)}")
        return model or names[0]

    async def facts(self, model: str) -> ModelFacts:
        """Return the facts about a model.

        Raises:
            ServiceError: The service doesn't answer, or isn't saturate.
        """
        card = next((card for card in await self._client.cards() if card.id == model), None)
        report = (await self._client.stats()).models.get(model)
        if report is None or report.error or not report.replicas:
            reason = (report and report.error) or "it has no replica"
            raise ServiceError(f"{self.url}: /stats has nothing about {model}: {reason}")
        batchers = [replica.window for replica in report.replicas]
        known = [batcher for batcher in batchers if batcher is not None]
        if len(known) < len(batchers):
            raise self._client.foreign(f"/stats lacks the batcher of a replica of {model}")
        first = report.replicas[0]
        return ModelFacts(
            model=model,
            max_model_len=(card and card.max_model_len) or 0,
            replicas=len(known),
            kv_tokens=min(each.capacity for each in known),
            max_num_seqs=min(each.max_running or each.capacity for each in known),
            in_flight=sum(each.running + each.queue_depth for each in known),
            submitted=sum(each.total_submitted for each in known),
            max_num_batched_tokens=first.max_num_batched_tokens,
            load_s=first.load_s or 0.0,
            sleep_s=first.turn.sleep_s if first.turn else 0.0,
            wake_s=first.turn.wake_s if first.turn else 0.0,
            names=frozenset(replica.replica or "" for replica in report.replicas),
            scheduler=max(
                (each.scheduler for each in report.replicas if each.scheduler),
                key=lambda each: each.steps,
                default=None,
            ),
        )

    async def first_answer(self, model: str) -> None:
        """Get a short answer: a model without replicas starts a replica, and the engine compiles its kernels.

        Raises:
            ServiceError: There is no answer.
        """
        body = {"model": model, "prompt": [TOKENS[0]] * 16, "max_tokens": 2, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        await self.send(LoadRequest("/v1/completions", body, 2), LoadAnswer(self.clock(), 2))

    async def send(self, ask: LoadRequest, answer: LoadAnswer) -> None:
        """Send a request, and note the times of its answer.

        Raises:
            ServiceError: The answer is an error, has no token, or broke off; `answer.failed` is set.
        """
        try:
            async with self._client.stream(
                "POST",
                ask.path,
                json=ask.body,
                # Pieces are timed as they come, which compression would delay.
                headers={"accept-encoding": "identity"},
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise self._client.refusal(response)
                await self._read(response, answer)
        except httpx.HTTPError as error:
            answer.failed, answer.ended_at = True, self.clock()
            raise self._client.unreachable(error) from None
        except ServiceError:
            answer.failed, answer.ended_at = True, self.clock()
            raise

    async def _read(self, response: httpx.Response, answer: LoadAnswer) -> None:
        """Read an answer to its end."""
        tail = b""
        async for piece in response.aiter_raw():
            now = self.clock()
            if answer.first_at is None and b'"choices":' in piece:
                answer.first_at = now
            tail = (tail + piece)[-TAIL:]
        answer.ended_at = self.clock()
        if failure := ERROR.search(tail):
            message = failure[1].decode(errors="replace")
            raise ServiceError(f"{self.url}: an answer broke off: {message}")
        found = USAGE.findall(tail)
        answer.tokens = int(found[-1]) if found else 0
        if not answer.tokens or answer.first_at is None:
            raise ServiceError(f"{self.url}: an answer broke off, or has no token")
