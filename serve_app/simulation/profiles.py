"""Profiles of simulated devices: the times of a model on some hardware.

A step takes the sum of `base_ms`, `per_prefill_token_ms` for each token of a prompt, `per_sequence_ms` for
each sequence and `per_kv_token_ms` for each token of context. Weights and caches have 16 bits.

`h100-7b` is measured: `saturate profile` on an H100 80GB, and `per_prefill_token_ms` from the throughput of
128 and 256 streams, since that profile had a point in which a kernel was compiled (0.0242 ms). Sleep, wake
and the pinning of the first sleep were measured on the same day; `load_s` is for random weights. `serial_ms`
is the value for which `saturate plan` has the measured median of 32 streams.

The other built-in profiles are arithmetic, from public figures and from the shares of them that `h100-7b`
reaches: 75% of the bandwidth for weights (4.55 ms of 6.09 ms), 52% for context, 68% of the peak for prompts.
The figures:

- L4: 24 GB of memory, 300 GB/s, 121 TFLOP/s (dense, 16 bits), PCIe 4.0 (NVIDIA L4 data sheet).
- H100 SXM: 80 GB of memory, 3.35 TB/s, 989 TFLOP/s (dense, 16 bits), PCIe 5.0 (NVIDIA H100 data sheet).
- Qwen2.5-7B: 7.62 B parameters, 28 layers, 4 KV heads of 128; Llama-3.1-8B: 8.03 B, 32 layers, 8 KV heads of
  128; Llama-3.1-70B: 70.6 B, 80 layers, 8 KV heads of 128 (their config.json). A token of context takes
  layers * 2 * KV heads * 128 * 2 bytes: 57,344; 131,072; 327,680.

The arithmetic:

- `base_ms`: every step reads all weights once. 15.2 GB at 300 GB/s are 51 ms on the L4; with the share of the
  H100 they would be 68 ms: so ±30%. On an H100 16.1 GB at 3.35 TB/s are 4.8 ms, with the share 6.4 ms; where
  the rest of a step stays as it is, 6.3 ms. On four H100s 141 GB at 13.4 TB/s are 10.5 ms, with the share
  14.1 ms, and 160 all-reduces of 20 µs add 3.2 ms; with 10 to 30 µs, and the rest as it is, 13.7 to 18.9 ms.
- `per_prefill_token_ms`: 2 FLOP per parameter: 0.25 ms at half the peak of the L4, 0.0237 ms at 68% of the
  H100's; for the 70B on four H100s 0.0521 ms.
- `per_kv_token_ms`: bytes of a token of context: 0.19 µs at the full bandwidth of the L4, 0.075 µs and
  0.047 µs at 52% of the H100's.
- `per_sequence_ms`: sampling and bookkeeping, 0.01 ms as measured.
- `load_s`: weights from a local disk with 2 GB/s (L4), 5 GB/s (H100). Compilation and warm-up are left out.
- `sleep_s`, `wake_s`: weights over PCIe with 20 GB/s (L4), 50 GB/s (each H100).
- `awake_gb`: 90% of the memory, `device_gb`.
- `kv_tokens`: 90% of the memory, less weights and 1 GB (L4) or 2 GB (each H100), by bytes of a token.
- `request_ms` is measured, on the simulated devices and two cores of a Xeon: a lone stream of 256 tokens has
  its first token after 127.5 ms on the L4 and 29.3 ms on the H100 (`TTFT p50` of `device-1` in
  tests/benchmarks/results/serve-l4-7b.json and serve-h100-8b.json), and the steps take 115.1 ms and 17.7 ms
  of that: 12.5 ms and 11.6 ms are the way of a request. `vllm serve` takes 4 ms less.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serve_app.api.validation import lines
from serve_app.system.yaml_text import NotYAMLError, load

BLOCK = 16
"""Tokens of a KV block, as on a GPU."""

REQUEST_MS = 12.0
"""`request_ms` where it is not measured: HTTP, the Ingress and the engine's process, on two cores."""

SERIAL_MS = 0.5
"""`serial_ms` of a learned profile: the measured value of an H100's service."""

MEASURED = "measured on an H100 80GB on 2026-11-27, Qwen2.5-7B with random weights, saturate 0.1.0, vLLM 0.32"
COMPUTED = "arithmetic from data sheets and the measured h100-7b, ±{:.0%}; `saturate profile` measures yours"
"""Values of `source` of the built-in profiles."""

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]


class Work(NamedTuple):
    """The work of a step.

    Attributes:
        prompt_tokens: Tokens of prompts that it computes.
        sequences: Sequences that it computes.
        context: Tokens of context that it reads, of all sequences together.
    """

    prompt_tokens: float
    sequences: float
    context: float


class StepLine(NamedTuple):
    """The time of a step, as a line of its work: the only formula for it. The fields are seconds.

    Attributes:
        base: Of each step.
        prompt_token: Per token of a prompt.
        sequence: Per sequence.
        context_token: Per token of context that is read.
    """

    base: float
    prompt_token: float
    sequence: float
    context_token: float

    def seconds(self, work: Work) -> float:
        """Return the seconds of a step with this work."""
        return (
            self.base
            + self.prompt_token * work.prompt_tokens
            + self.sequence * work.sequences
            + self.context_token * work.context
        )


class Profile(BaseModel):
    """Times and limits of a simulated device with a model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        description="Name in `/health`, `/v1/models` and the log."
    )
    source: Annotated[str, Field(max_length=300)] = Field(
        default="", description="Where the times come from: a measurement, or an estimate."
    )
    base_ms: Positive = Field(description="Milliseconds of every step.")
    per_prefill_token_ms: NotNegative = Field(
        description="Milliseconds more for each token of a prompt in the step."
    )
    per_sequence_ms: NotNegative = Field(description="Milliseconds more for each sequence in the step.")
    per_kv_token_ms: NotNegative = Field(
        description="Milliseconds more for each token of context that the step reads."
    )
    load_s: NotNegative = Field(description="Seconds to load the weights.")
    sleep_s: NotNegative = Field(description="Seconds to fall asleep, with the weights moved to the host.")
    wake_s: NotNegative = Field(description="Seconds to wake up.")
    pin_s: NotNegative = Field(
        default=0.0, description="Seconds more that the first sleep takes, to pin the memory of the host."
    )
    kv_tokens: Count = Field(description="Tokens that fit into the KV cache.")
    max_model_len: Count = Field(description="Context of the model in tokens.")
    max_num_seqs: Count = Field(default=256, description="Maximum sequences in a step.")
    max_num_batched_tokens: Count = Field(default=8192, description="Maximum tokens in a step.")
    device_gb: Positive | None = Field(
        default=None, description="Memory of the device in GB; null: not known."
    )
    awake_gb: Positive | None = Field(
        default=None, description="Memory in GB that the model takes while it is awake, with its KV cache."
    )
    async_scheduling: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Whether the next step is scheduled while a step runs; vLLM's default on a GPU.",
    )
    request_ms: NotNegative = Field(
        default=0.0,
        description="Milliseconds that a request takes outside the engine until its first token: HTTP, keys, "
        "the tokenizer. `saturate plan` adds them; a simulated engine takes its own time for that.",
    )
    serial_ms: NotNegative = Field(
        default=0.0,
        description="The part of `request_ms` that requests take one after the other, so that the requests "
        "of a burst reach the engine one by one.",
    )

    @property
    def step(self) -> StepLine:
        """The time of a step."""
        times = self.base_ms, self.per_prefill_token_ms, self.per_sequence_ms, self.per_kv_token_ms
        return StepLine(*(each / 1e3 for each in times))

    @model_validator(mode="after")
    def _one_request_fits(self) -> "Profile":
        if self.kv_tokens < self.max_model_len:
            raise ValueError(
                f"kv_tokens: {self.kv_tokens} is below max_model_len ({self.max_model_len}); one request of "
                "that length has to fit"
            )
        return self


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            name="h100-7b",
            source=MEASURED,
            base_ms=6.091,
            per_prefill_token_ms=0.0225,
            per_sequence_ms=0.009766,
            per_kv_token_ms=3.289e-05,
            load_s=5.0,
            sleep_s=0.4,
            wake_s=0.37,
            pin_s=21.0,
            kv_tokens=262_128,
            max_model_len=32_768,
            request_ms=8.993,
            serial_ms=0.5,
        ),
        Profile(
            name="l4-7b",
            source=COMPUTED.format(0.3),
            base_ms=51.0,
            per_prefill_token_ms=0.25,
            per_sequence_ms=0.01,
            per_kv_token_ms=0.00019,
            load_s=7.6,
            sleep_s=0.8,
            wake_s=0.8,
            kv_tokens=94_000,
            device_gb=24.0,
            awake_gb=21.6,
            max_model_len=32_768,
            max_num_batched_tokens=2048,
            request_ms=REQUEST_MS,
        ),
        Profile(
            name="h100-8b",
            source=COMPUTED.format(0.1),
            base_ms=6.4,
            per_prefill_token_ms=0.0237,
            per_sequence_ms=0.01,
            per_kv_token_ms=0.000075,
            load_s=3.2,
            sleep_s=0.3,
            wake_s=0.3,
            kv_tokens=411_000,
            device_gb=80.0,
            awake_gb=72.0,
            max_model_len=131_072,
            request_ms=REQUEST_MS,
        ),
        Profile(
            name="h100-70b-tp4",
            source=COMPUTED.format(0.2),
            base_ms=17.3,
            per_prefill_token_ms=0.0521,
            per_sequence_ms=0.01,
            per_kv_token_ms=0.000047,
            load_s=28.0,
            sleep_s=0.7,
            wake_s=0.7,
            kv_tokens=424_000,
            device_gb=320.0,
            awake_gb=288.0,
            max_model_len=131_072,
            request_ms=REQUEST_MS,
        ),
    )
}
"""Built-in profiles by name: Qwen2.5-7B on an L4, Llama-3.1-8B on an H100, Llama-3.1-70B on four of them."""

OWN = "simulate"
"""Key of the profile in vLLM's `additional_config`."""


def read_profile(value: Any) -> Any:
    """Return a profile for its name or its YAML file; anything else is returned as it is.

    Args:
        value: The name of a built-in profile, or the absolute path of a YAML file with the fields of a
            `Profile`; `name` may be left out, and is the file's then.

    Raises:
        ValueError: There is no such profile, or a field of the file is wrong or missing; each is named with
            its path.
    """
    if not isinstance(value, str):
        return value
    if value in PROFILES:
        return PROFILES[value]
    path = Path(value)
    if not path.is_absolute():
        names = ", ".join(map(repr, PROFILES))
        raise ValueError(f"must be {names}, or the absolute path of a YAML file, not {value!r}")
    try:
        content = load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{value}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    except NotYAMLError as error:
        raise ValueError(f"{value}: {error}") from None
    if isinstance(content, dict):
        content = {"name": path.stem, **content}
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        raise ValueError("; ".join(f"{value}: {line}" for line in lines(error, Profile))) from None
