"""Lengths of calls in the ledger: a sample for load tests, without content."""

import random
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from serve_app.ledger.rows import Row
from serve_app.relay.usage import Tokens

MOST = 10_000
"""Calls of a model that are kept, each as likely as any other."""

LIVE = frozenset({"http", "handle"})
"""Sources of live traffic."""

LISTS = frozenset({"/generate", "generate"})
"""Endpoints whose calls are lists: the ledger has the sums of their prompts."""


class CallLengths:
    """A sample of the calls of each model that were live traffic and got an answer, at most 10,000.

    A model is what clients name: an adapter counts as one.

    Args:
        since: Only calls that ended from this time on; None: all.
        seed: Of the random numbers.

    Attributes:
        columns: Columns of tables that it takes.
        wrong: Lines that could not be read.
    """

    columns = frozenset(
        {"time", "model", "adapter", "endpoint", "source", "outcome"}
        | {"prompt_tokens", "cached_tokens", "output_tokens"}
    )

    def __init__(self, since: datetime | None = None, seed: int = 0) -> None:
        self._since = since
        self._numbers = random.Random(seed)
        self._kept: dict[str, list[Tokens]] = {}
        self._seen: dict[str, int] = {}
        self.wrong = 0

    def wants(self, day: str) -> bool:
        """Return whether rows of a day may be of the wanted time."""
        return self._since is None or day >= self._since.date().isoformat()

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, those that fit."""
        for row in rows:
            if self._since is not None and row.time < self._since:
                continue
            if row.source in LIVE and row.outcome == "ok" and row.endpoint not in LISTS:
                tokens = Tokens(row.prompt_tokens, row.cached_tokens, row.output_tokens)
                self._add(row.adapter or row.model, tokens)

    def add_table(self, table: Any, day: str) -> None:
        """Add rows of an Arrow table, those that fit.

        Args:
            table: The table.
            day: The day of all rows.
        """
        self.add(Row(call="", **values) for values in table.select(sorted(self.columns)).to_pylist())

    def of(self, model: str) -> Sequence[Tokens]:
        """Return the tokens of a model's calls; empty: there are none."""
        return self._kept.get(model, ())

    @property
    def models(self) -> list[str]:
        """The models that have calls."""
        return sorted(self._kept)

    def _add(self, model: str, tokens: Tokens) -> None:
        # A function has no tokens, and an embedding no answer.
        if tokens.prompt < 1 or tokens.output < 1:
            return
        kept = self._kept.setdefault(model, [])
        seen = self._seen[model] = self._seen.get(model, 0) + 1
        if len(kept) < MOST:
            kept.append(tokens)
        elif (place := self._numbers.randrange(seen)) < MOST:
            kept[place] = tokens
