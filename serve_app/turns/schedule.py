"""Policy of turns: which of the models that share a device is awake next. Times are passed in."""

import math
from collections.abc import Mapping
from typing import NamedTuple

WORTH = 9.0
"""A turn lasts so many times as long as the device stands still in a switch, unless a wait is due: then nine
tenths of the time are served."""

SLACK_S = 0.5
"""Seconds by which a deadline is met early, since reports are a little old."""

NO_TIER = 1 << 30
"""Tier of a model that has nothing in its queue: behind all others."""


class Waiting(NamedTuple):
    """The work of a model that isn't awake.

    Attributes:
        since: Time since which it waits for its turn.
        tokens: Tokens that wait.
        tier: The most urgent tier of them; lower goes first.
        deadline: Time by which the first of them must have started; None: any time.
    """

    since: float
    tokens: int = 0
    tier: int = 0
    deadline: float | None = None


class Awake(NamedTuple):
    """The work of the model that is awake.

    Attributes:
        since: Time at which its turn began.
        busy: Whether it has any work.
        tokens: Tokens that wait in its queue.
        tier: The most urgent tier of them; `NO_TIER` if there are none.
        left_s: Seconds until all that it has been given has started, by estimate.
    """

    since: float
    busy: bool
    tokens: int = 0
    tier: int = NO_TIER
    left_s: float = 0.0


class TurnLimits(NamedTuple):
    """Settings of a group, and the measured cost of its switches.

    Attributes:
        min_turn_s: Seconds of a turn, at least, while its model has work and no wait is due.
        max_wait_s: Seconds that a model with work may wait before the switch to it begins.
        switch_s: Seconds of a switch, at most: from its decision to the next model awake.
        still_s: The part of it in which the device does nothing.
    """

    min_turn_s: float
    max_wait_s: float
    switch_s: float = 0.0
    still_s: float = 0.0

    @property
    def round_s(self) -> float:
        """Seconds by which a turn moves on those behind it."""
        return self.switch_s + self.min_turn_s


def next_turn(
    now: float, awake: Awake | None, others: Mapping[str, Waiting], limits: TurnLimits
) -> str | None:
    """Return the model whose turn begins now; None: the one that is awake goes on.

    In this order:

    1. Without another model that waits, the one that is awake goes on.
    2. If it has no work, it gives way.
    3. If a wait is due, it gives way to the one that waits for longest. With several, each has to be awake
       for a minimum turn before the next: so the first is due earlier.
    4. A turn isn't ended before its minimum, nor before it was worth its switch.
    5. It gives way to a model whose deadline could not be kept later, or with a more urgent tier, or with
       more waiting tokens of the same tier.

    Of several that wait, the most urgent one by rule 5 is next, if the waits of the others allow it.

    The longest wait is kept if it is at least `(models - 1) * limits.round_s`; otherwise the models go round.

    Args:
        now: The time.
        awake: The model that is awake; None: there is none.
        others: The models that wait.
        limits: See there.
    """
    if not others:
        return None
    if awake is None or not awake.busy:
        return _choose(now, others, limits)
    lasts = now - awake.since
    earliest = _by_age(others)[0]
    if now >= others[earliest].since + limits.max_wait_s or (
        lasts >= limits.min_turn_s and now >= latest_start(others, limits)
    ):
        return earliest
    if lasts < max(limits.min_turn_s, WORTH * limits.still_s):
        return None
    name = _choose(now, others, limits)
    first = _rank(now, others[name], limits)
    return name if first < (True, awake.tier, -awake.tokens) else None


def latest_start(others: Mapping[str, Waiting], limits: TurnLimits) -> float:
    """Return the time by which the next switch must begin for all that wait to be in time."""
    return min(
        others[name].since + limits.max_wait_s - place * limits.round_s
        for place, name in enumerate(_by_age(others))
    )


def expected_s(
    now: float, name: str, awake: Awake | None, others: Mapping[str, Waiting], limits: TurnLimits
) -> float:
    """Return the seconds until a model that isn't awake has its turn, as things stand.

    Args:
        now: The time.
        name: The model; if it doesn't wait, as though its work came now.
        awake: See `next_turn`, as the others.
        others: The models that wait.
        limits: Their limits.
    """
    others = {name: Waiting(now), **others}
    start = now
    if awake is not None and awake.busy:
        own = max(now + awake.left_s, awake.since + limits.min_turn_s)
        start = max(now, min(own, latest_start(others, limits)))
    return start - now + limits.switch_s + _by_age(others).index(name) * limits.round_s


def _choose(now: float, others: Mapping[str, Waiting], limits: TurnLimits) -> str:
    """Return the most urgent model, if the others can wait for so long; otherwise the oldest."""
    first = min(others, key=lambda name: (*_rank(now, others[name], limits), others[name].since, name))
    rest = {name: one for name, one in others.items() if name != first}
    if not rest or latest_start(rest, limits) >= now + limits.round_s:
        return first
    return _by_age(others)[0]


def _by_age(others: Mapping[str, Waiting]) -> list[str]:
    return sorted(others, key=lambda name: (others[name].since, name))


def _rank(now: float, one: Waiting, limits: TurnLimits) -> tuple[bool, int, int]:
    """Return the urgency of a model that waits; the lowest goes first.

    A deadline comes first that is kept by a switch now, and hardly by a later one.
    """
    left = math.inf if one.deadline is None else one.deadline - now
    hurries = limits.switch_s <= left <= 2 * limits.switch_s + SLACK_S
    return (not hurries, one.tier, -one.tokens)
