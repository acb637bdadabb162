"""Requests of a load: their bodies, with random prompts or those of a dataset."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.api.protocol import JSON
from serve_app.relay.usage import Tokens
from serve_app.tuning.service import TOKENS
from serve_app.tuning.workload import Arrival, Lengths

Prompt = str | list[JSON]
"""A text to complete, or the messages of a chat."""

BEGINNING = "beginning"
"""Seed of the text with which prompts begin that were in the prefix cache: the same in all steps."""


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
        calls: Tokens of calls, of which each request takes those of a random one, in place of `input` and
            `output`. As many tokens of its prompt as were in the prefix cache are the beginning of one text.
        tier: The `service_tier` of the requests.
    """

    model: str
    input: Lengths
    output: Lengths
    prompts: Sequence[Prompt] = ()
    calls: Sequence[Tokens] = ()
    tier: str = "default"
    _numbers: random.Random = field(default_factory=random.Random)
    _left: list[Prompt] = field(default_factory=list)
    _beginning: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.calls:
            most = max(call.cached for call in self.calls)
            self._beginning = random.Random(BEGINNING).choices(TOKENS, k=most)

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
        twin = Requests(self.model, self.input, self.output, calls=self.calls)
        twin.begin(seed)
        at = 0.0
        while True:
            at += twin.gap() / rate
            ask = twin.next()
            yield Arrival(at, len(ask.body["prompt"]), ask.tokens)

    def next(self) -> Ask:
        """Return the next request."""
        call = self._numbers.choice(self.calls) if self.calls else None
        tokens = self.output.draw(self._numbers) if call is None else call.output
        body: JSON = {
            "model": self.model,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": self.tier,
        }
        if not self.prompts:
            if call is None:
                prompt = self._numbers.choices(TOKENS, k=self.input.draw(self._numbers))
            else:
                # The last token is always computed.
                cached = min(call.cached, call.prompt - 1)
                own = self._numbers.choices(TOKENS, k=call.prompt - cached)
                prompt = self._beginning[:cached] + own
            return Ask("/v1/completions", body | {"prompt": prompt, "ignore_eos": True}, tokens)
        if not self._left:
            self._left = self._numbers.sample(self.prompts, len(self.prompts))
        text = self._left.pop()
        if isinstance(text, str):
            return Ask("/v1/completions", body | {"prompt": text}, tokens)
        return Ask("/v1/chat/completions", body | {"messages": text}, tokens)
