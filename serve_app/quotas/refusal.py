"""Errors of requests that their quotas don't allow."""

import math
from collections.abc import Sequence

from serve_app.api.errors import RequestError
from serve_app.quotas.lease import Lease
from serve_app.quotas.messages import LimitState

LEAST_RETRY_S = 0.1
"""Least time after which a request is told to try again, in seconds."""


def check_fits(leases: Sequence[Lease], tokens: int) -> None:
    """Raise if a request can never have its tokens.

    Raises:
        RequestError: 400, with the name of the limit.
    """
    for lease in leases:
        if not lease.is_tokens:
            continue
        name, limit = lease.smallest
        if tokens > limit:
            message = (
                f"{lease.id.subject}: {name} {limit}: this request may take {tokens} tokens, which never fit "
                "in; lower max_tokens, or send a shorter prompt"
            )
            raise RequestError(400, "invalid_request_error", message, param="max_tokens")


def refusal(lease: Lease, tokens: int, now: float) -> RequestError | None:
    """Return the error of a request that a lease doesn't allow now; None: the limits aren't known.

    Args:
        lease: The lease.
        tokens: The tokens of the request.
        now: Time on the holder's clock.
    """
    amount = tokens if lease.is_tokens else 1
    states = lease.remaining(now)
    if not states:
        return None
    # Tokens of requests in flight may come back; of the limits that leave too little, the last counts.
    short = [state for state in states if state.remaining < amount] or [
        min(states, key=lambda state: state.remaining)
    ]
    waits = [(_wait_s(lease, state, amount), state) for state in short]
    seconds, state = max(waits, key=lambda pair: pair[0])
    return limit_error(lease, state, amount, seconds)


def _wait_s(lease: Lease, state: LimitState, amount: int) -> float:
    """Return the seconds after which a request is likely to fit.

    Requests in flight give back the unused part of what they hold, evenly over their usual time; at its end
    a window has everything.
    """
    window_s = state.ends_in_s if lease.id.kind != "slots" else math.inf
    back = state.reserved * (1 - lease.used_share) if lease.is_tokens else 0.0
    if lease.id.kind == "slots":
        back = float(state.reserved)
    lacking = max(1, amount - state.remaining)
    given_back_s = lease.hold_s * lacking / back if back >= lacking else math.inf
    seconds = min(window_s, given_back_s)
    return max(LEAST_RETRY_S, seconds if math.isfinite(seconds) else lease.hold_s)


def limit_error(lease: Lease, state: LimitState, amount: int, seconds: float) -> RequestError:
    """Return the error of a request that a limit doesn't allow now: 429.

    Args:
        lease: The lease that has the limit.
        state: The limit.
        amount: The amount that the request asks for.
        seconds: The time after which to try again.
    """
    asked = f"may take {amount} tokens" if lease.is_tokens else "needs one"
    message = (
        f"{lease.id.subject}: {state.name} {state.limit}: this request {asked}, and {state.remaining} are "
        f"left. Try again in {seconds:.1f} s."
    )
    return RequestError(429, "rate_limit_error", message, retry_after_s=seconds)


def away_error(seconds: float) -> RequestError:
    """Return the error of a request while the service has not answered for some seconds: 503."""
    message = f"The quotas of this service have not answered for {seconds:g} s. Try again."
    return RequestError(503, "service_unavailable", message, retry_after_s=max(1.0, seconds))
