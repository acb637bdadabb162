"""How much one replica can do: its rate at full load, and a request without neighbours."""

from serve_app.simulation.device import Step, duration_s
from serve_app.simulation.profiles import Profile
from serve_app.tuning.replica import Settings
from serve_app.tuning.workload import Workload

MOST_SHARE = 0.9
"""Share of the time of prompts and sequences up to which the time of a step is computed."""


class FitError(ValueError):
    """A request can never run; the message has the sum."""


def check_fit(profile: Profile, workload: Workload) -> None:
    """Raise a FitError if the longest request doesn't fit the context, or the KV cache."""
    prompt, answer = workload.input.most, workload.max_tokens
    for limit, name in (
        (profile.max_model_len, "max_model_len"),
        (profile.kv_tokens, "KV cache (kv_tokens)"),
    ):
        if prompt + answer > limit:
            longest = "the longest prompt" if workload.input.spread else "a prompt"
            raise FitError(
                f"{longest} of {prompt:,} tokens and max_tokens {answer:,} are {prompt + answer:,}, above "
                f"the {limit:,} of {profile.name}'s {name}; lower --input, --output or --max-tokens"
            )


def full_rate(profile: Profile, workload: Workload, settings: Settings) -> float:
    """Return the requests per second of a replica that always has work, on average.

    So many requests end in a step as begin, and each has part in as many steps as its answer has tokens. The
    number of those that run is bounded by the sequences, the KV cache, and the tokens of a step.

    Args:
        profile: The device.
        workload: The requests; their rate doesn't matter.
        settings: The settings of the replica.
    """
    prompt, output = workload.input.expected, workload.output.expected
    computed = workload.computed(round(prompt))
    running = min(settings.sequences, profile.kv_tokens / (prompt + workload.max_tokens))
    begin = min(running / output, settings.max_num_batched_tokens / (computed + output))
    decoding = begin * output
    step = _step(begin * computed, decoding, decoding * (prompt + output / 2))
    return begin / duration_s(profile, step)


def expected_latency_s(profile: Profile, workload: Workload, rate: float) -> float:
    """Return the seconds that a mean request takes beside others, as long as a replica keeps up.

    A step is as much longer than `base_ms` as the share of the time that prompts and sequences leave.

    Args:
        profile: The device.
        workload: The requests; their rate doesn't matter.
        rate: Requests per second of the replica.
    """
    prompt, output = workload.input.expected, workload.output.expected
    computed = workload.computed(round(prompt))
    own = duration_s(profile, _step(computed, output, output * (prompt + output / 2)))
    own -= profile.base_ms / 1e3
    return profile.request_ms / 1e3 + output * profile.base_ms / 1e3 / (1 - min(rate * own, MOST_SHARE)) + own


def _step(prefill: float, sequences: float, context: float) -> Step:
    """Return a mean step, whose numbers needn't be whole."""
    return Step(prefill, sequences, context)  # type: ignore[arg-type]
