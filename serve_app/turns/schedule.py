"""Policy of turns: which of the models that share a device is awake next. Times are passed in."""

import math
from collections.abc import Mapping
from typing import NamedTuple

WORTH = 9.0
"""Shortest turn, as a multiple of the time that the device stands still in a switch, unless a wait is due. At
9, nine tenths of the time are served."""

SLACK_S = 0.5
"""Seconds of safety before a deadline, since reports are a little old."""

NO_TIER = 1 << 30
"""Tier of a model with an empty queue: after all other tiers."""


class Waiting(NamedTuple):
    """The work of a model that isn't awake.

    Attributes:
        since: Time at which it began to wait for its turn.
        tokens: Tokens that wait.
        tier: The most urgent tier of the waiting requests; lower goes first.
        deadline: Time by which the first waiting request must have started; None: any time.
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
        tier: The most urgent tier in its queue; `NO_TIER` if the queue is empty.
        left_s: Estimated seconds until all its waiting requests have started.
    """

    since: float
    busy: bool
    tokens: int = 0
    tier: int = NO_TIER
    left_s: float = 0.0


class TurnLimits(NamedTuple):
    """Settings of a group, and the measured cost of its switches.

    Attributes:
        min_turn_s: Shortest turn in seconds, while its model has work and no wait is due.
        max_wait_s: Seconds that a model with work may wait before the switch to it begins.
        switch_s: Longest switch in seconds, from its decision until the next model is awake.
        still_s: The part of a switch in which the device does nothing.
    """

    min_turn_s: float
    max_wait_s: float
    switch_s: float = 0.0
    still_s: float = 0.0

    @property
    def round_s(self) -> float:
        """Seconds by which a turn delays the turns after it."""
        return self.switch_s + self.min_turn_s


def next_turn(
    now: float, awake: Awake | None, others: Mapping[str, Waiting], limits: TurnLimits
) -> str | None:
    """Return the model whose turn begins now; None: the awake model continues.

    In this order:

    1. If no other model waits, the awake model continues.
    2. If the awake model has no work, it gives way.
    3. If a wait is due, the awake model gives way to the model that has waited longest. If several wait, each
       must be awake for a minimum turn before the next, so the first wait is due earlier.
    4. A turn doesn't end before its minimum, or before it was worth its switch.
    5. The awake model gives way to a model whose deadline a later switch could not keep, or with a more
       urgent tier, or with more waiting tokens of the same tier.

    Of several waiting models, the most urgent by rule 5 is next, if the waits of the other models allow it.

    `max_wait_s` is kept if it is at least `(models - 1) * limits.round_s`; otherwise the models take turns in
    order of their waits.

    Args:
        now: The time.
        awake: The model that is awake; None: no model is awake.
        others: The models that wait.
        limits: The settings of the group and the cost of its switches.
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
    """Return the time by which the next switch must begin so that no model waits longer than `max_wait_s`."""
    return min(
        others[name].since + limits.max_wait_s - place * limits.round_s
        for place, name in enumerate(_by_age(others))
    )


def expected_s(
    now: float, name: str, awake: Awake | None, others: Mapping[str, Waiting], limits: TurnLimits
) -> float:
    """Return the expected seconds until a model that isn't awake has its turn.

    Args:
        now: The time.
        name: The model; if it doesn't wait, it counts as waiting from now on.
        awake: The model that is awake; None: no model is awake.
        others: The models that wait.
        limits: The settings of the group and the cost of its switches.
    """
    others = {name: Waiting(now), **others}
    start = now
    if awake is not None and awake.busy:
        own = max(now + awake.left_s, awake.since + limits.min_turn_s)
        start = max(now, min(own, latest_start(others, limits)))
    return start - now + limits.switch_s + _by_age(others).index(name) * limits.round_s


def _choose(now: float, others: Mapping[str, Waiting], limits: TurnLimits) -> str:
    """Return the most urgent model if the other models can wait for its turn; otherwise the oldest."""
    first = min(others, key=lambda name: (*_rank(now, others[name], limits), others[name].since, name))
    rest = {name: one for name, one in others.items() if name != first}
    if not rest or latest_start(rest, limits) >= now + limits.round_s:
        return first
    return _by_age(others)[0]


def _by_age(others: Mapping[str, Waiting]) -> list[str]:
    return sorted(others, key=lambda name: (others[name].since, name))


def _rank(now: float, one: Waiting, limits: TurnLimits) -> tuple[bool, int, int]:
    """Return the urgency of a waiting model; the lowest goes first.

    A deadline goes first if a switch now keeps it, and a later switch hardly would.
    """
    left = math.inf if one.deadline is None else one.deadline - now
    hurries = limits.switch_s <= left <= 2 * limits.switch_s + SLACK_S
    return (not hurries, one.tier, -one.tokens)
