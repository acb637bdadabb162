"""Settings of models that take turns."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from serve_app.api.protocol import Flag
from serve_app.settings.fields import Seconds, Strict
from serve_app.settings.models import LLMSettings

ASLEEP = 0.02
"""Share of a device that a model keeps while it sleeps: the context of its processes, its graphs."""

UTILIZATION = 0.92
"""vLLM's default of `gpu_memory_utilization`."""


class ShareSettings(Strict):
    """Turns of the models of a group."""

    sleep_level: Literal[1, 2] = Field(
        default=1,
        description=(
            "vLLM's: 1 keeps the weights of a model that sleeps in the memory of the host, 2 loads "
            "them again for each turn."
        ),
    )
    min_turn_s: Seconds = Field(
        default=5.0,
        description=(
            "Seconds of a turn, at least, while its model has work and no other has waited for `max_wait_s`."
        ),
    )
    max_wait_s: Seconds = Field(
        default=30.0,
        description="Seconds for which the requests of a model wait at most until the switch to it begins.",
    )
    self_check: Flag = Field(
        default=False,
        description=(
            "Compare a greedy answer after each wake-up with that before the first sleep; a model "
            "whose answer differs is answered 503, and its replica replaced."
        ),
    )


def check_memory(model: LLMSettings, group: Sequence[LLMSettings]) -> None:
    """Refuse a model that doesn't fit into its device while the others of its group sleep.

    Raises:
        ValueError: The sum of what they take.
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
