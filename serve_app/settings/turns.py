"""Settings of models that take turns."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from serve_app.api.protocol import Flag
from serve_app.settings.fields import Seconds, Strict
from serve_app.settings.models import LLMSettings

ASLEEP = 0.02
"""Share of a device's memory that a sleeping model keeps: the contexts of its processes, and its graphs."""

UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""


class ShareSettings(Strict):
    """Turns of the models of a group."""

    sleep_level: Literal[1, 2] = Field(
        default=1,
        description=(
            "vLLM's sleep level: 1 keeps the weights of a sleeping model in the host's memory, 2 loads them "
            "again for each turn."
        ),
    )
    min_turn_s: Seconds = Field(
        default=5.0,
        description=(
            "Shortest turn in seconds, while its model has work and no other model has waited for "
            "`max_wait_s`."
        ),
    )
    max_wait_s: Seconds = Field(
        default=30.0,
        description="Longest wait of a model's requests, in seconds, until the switch to the model begins.",
    )
    self_check: Flag = Field(
        default=False,
        description=(
            "Compare a greedy answer after each wake-up with the answer before the first sleep; if they "
            "differ, requests get a 503 and the replica is replaced."
        ),
    )


def check_memory(model: LLMSettings, group: Sequence[LLMSettings]) -> None:
    """Refuse a model that doesn't fit into its device while the other models of its group sleep.

    Raises:
        ValueError: The model doesn't fit; the message has the sum.
    """
    device, unit = 1.0, ""
    awake = model.engine.gpu_memory_utilization or UTILIZATION
    what = f"lower engine.gpu_memory_utilization of {model.id}, or the number of models in the group"
    if model.simulate is not None:
        if model.simulate.device_gb is None or model.simulate.awake_gb is None:
            return
        device, awake, unit = model.simulate.device_gb, model.simulate.awake_gb, " GB"
        what = "use another profile, or fewer models in the group"
    others = len(group) - 1
    asleep = others * ASLEEP * device
    if awake + asleep > device + 1e-9:
        raise ValueError(
            f"share: the group {model.share!r} doesn't fit its device: {model.id} takes {awake:g}{unit} "
            f"awake, and {others} others {asleep:.3g}{unit} asleep; that is {awake + asleep:.4g} of "
            f"{device:g}{unit}; {what}"
        )
