"""States of a batch, and the ways between them."""

from typing import Literal, get_args

State = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]

TRANSITIONS: dict[State, frozenset[State]] = {
    "validating": frozenset({"in_progress", "cancelling", "failed"}),
    "in_progress": frozenset({"finalizing", "cancelling", "failed"}),
    "finalizing": frozenset({"completed", "expired", "failed"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
    "failed": frozenset(),
}
"""The states that may follow each state. A batch can fail late only if its content is lost."""

STATES: tuple[State, ...] = get_args(State)

ENDED = frozenset(state for state in STATES if not TRANSITIONS[state])
"""States in which nothing happens any more."""
