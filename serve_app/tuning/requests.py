"""Requests of a load: their bodies, with random prompts or those of a dataset."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.api.protocol import JSON
from serve_app.tuning.service import TOKENS
from serve_app.tuning.workload import Arrival, Lengths

Prompt = str | list[JSON]
"""A text to complete, or the messages of a chat."""


class Ask(NamedTuple):
    """A request.

    Attributes:
        path: Its path.
        body: Its body.
        tokens: Most tokens of its answer.
    """

    path: str
    body: JSON
    tokens: int


@dataclass(slots=True)
class Requests:
    """Makes requests, the same for a seed.

    Attributes:
        model: The model.
        input: Tokens of a prompt; of a dataset it is not used.
        output: Tokens of an answer: each is as long as it asks for, but of a dataset it may end before.
        prompts: Prompts of a dataset, taken in random order, again and again; empty: random token ids, of
            which no beginning is in the prefix cache.
        tier: The `service_tier` of the requests.
    """

    model: str
    input: Lengths
    output: Lengths
    prompts: Sequence[Prompt] = ()
    tier: str = "default"
    _numbers: random.Random = field(default_factory=random.Random)
    _left: list[Prompt] = field(default_factory=list)

    def begin(self, seed: int) -> None:
        """Begin with the requests of a seed."""
        self._numbers = random.Random(seed)
        self._left = []

    def gap(self) -> float:
        """Return the time to the next request, as a multiple of the mean."""
        return self._numbers.expovariate(1.0)

    def arrivals(self, rate: float, seed: int) -> Iterator[Arrival]:
        """Yield the requests that an open loop sends with a seed, without end; none of these changes.

        Args:
            rate: Requests per second.
            seed: The seed.

        Raises:
            ValueError: The prompts are those of a dataset, whose lengths in tokens only the service knows.
        """
        if self.prompts:
            raise ValueError("the lengths of a dataset's prompts aren't known; take random prompts (input)")
        twin = Requests(self.model, self.input, self.output)
        twin.begin(seed)
        at = 0.0
        while True:
            at += twin.gap() / rate
            ask = twin.next()
            yield Arrival(at, len(ask.body["prompt"]), ask.tokens)

    def next(self) -> Ask:
        """Return the next request."""
        tokens = self.output.draw(self._numbers)
        body: JSON = {
            "model": self.model,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": self.tier,
        }
        if not self.prompts:
            prompt = self._numbers.choices(TOKENS, k=self.input.draw(self._numbers))
            return Ask("/v1/completions", body | {"prompt": prompt, "ignore_eos": True}, tokens)
        if not self._left:
            self._left = self._numbers.sample(self.prompts, len(self.prompts))
        text = self._left.pop()
        if isinstance(text, str):
            return Ask("/v1/completions", body | {"prompt": text}, tokens)
        return Ask("/v1/chat/completions", body | {"messages": text}, tokens)
