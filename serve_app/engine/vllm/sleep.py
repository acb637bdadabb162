"""Sleep mode of a vLLM engine: its weights leave the device, and come back.

The imports are valid for vLLM 0.32.
"""

import itertools
import os

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from serve_app.engine.vllm.stats import own_work
from serve_app.ledger.calls import CallBook
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError
from serve_app.settings.turns import ShareSettings

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
"""Token ids that each vocabulary has."""

CHECKED = 16
"""Tokens of the answer that has to stay the same."""


def check_sleep_mode(settings: LLMSettings) -> None:
    """Refuse a model that shares a device on which vLLM has no sleep mode.

    Raises:
        SettingsError: It can't sleep here.
    """
    if settings.share is None or settings.simulate or current_platform.is_sleep_mode_available():
        return
    raise SettingsError(
        f"models[{settings.id}].share: vLLM has no sleep mode on this device "
        f"({current_platform.device_name}); leave share out, serve the model on a GPU, or try it on a "
        "simulated device (simulate: h100-7b)"
    )


def shared_devices(settings: LLMSettings, node: str) -> tuple[str, ...]:
    """Return the names of the devices of a model in this process, the same in all processes of the machine.

    Args:
        settings: The model.
        node: The node of Ray; a simulated device belongs to it.
    """
    visible = os.environ.get(current_platform.device_control_env_var, "")
    if settings.simulate or not current_platform.is_cuda():
        return (f"{node}:{visible}",)
    engine = settings.engine
    count = (engine.tensor_parallel_size or 1) * (engine.pipeline_parallel_size or 1)
    places = visible.split(",") if visible else map(str, range(count))
    # A container may count its GPUs by itself. Parts of a GPU (MIG) are made visible by name.
    return tuple(
        current_platform.get_device_uuid(number) if place.isdigit() else place
        for number, place in enumerate(itertools.islice(places, count))
    )


class SleepingError(Exception):
    """An engine answers otherwise than before its sleep."""


class VLLMSleeper:
    """Puts an engine to sleep and wakes it up.

    Args:
        llm: The engine.
        settings: The settings of its group.
        book: Gets the work of the checks.
    """

    def __init__(self, llm: AsyncLLM, settings: ShareSettings, book: CallBook) -> None:
        self._llm = llm
        self._book = book
        self._level = settings.sleep_level
        self._checks = settings.self_check
        self._expected: list[int] = []
        self._count = 0

    @property
    def busy(self) -> bool:
        """True if the engine has work."""
        return bool(self._llm.output_processor.has_unfinished_requests())

    @property
    def died(self) -> bool:
        """True if the engine has died."""
        return bool(self._llm.errored)

    async def prepare(self) -> None:
        """Note an answer of the engine as it was loaded, if answers are checked."""
        if self._checks:
            self._expected = await self._answer()

    async def sleep(self) -> None:
        """Move the weights to the host, or drop them with level 2; the KV cache is dropped."""
        await self._llm.sleep(self._level, mode="wait")

    async def wake_up(self) -> None:
        """Bring the weights back.

        Raises:
            SleepingError: The engine answers otherwise than before.
        """
        if self._level == 1:
            await self._llm.wake_up()
        else:
            await self._llm.wake_up(["weights"])
            await self._llm.collective_rpc("reload_weights")
            await self._llm.wake_up(["kv_cache"])
        if self._checks and (answer := await self._answer()) != self._expected:
            raise SleepingError(f"self_check: it answers {answer}, and {self._expected} before its sleep")

    def release(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()

    async def _answer(self) -> list[int]:
        """Return the tokens of a greedy answer, past the batcher."""
        self._count += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=CHECKED, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        tokens: list[int] = []
        with own_work(self._book):
            results = AsyncLLM.generate(self._llm, tokens_input(PROMPT), params, f"self-check-{self._count}")
            async for result in results:
                tokens = list(result.outputs[0].token_ids)
        return tokens
