"""Engines on a simulated device with features of vLLM that such a device doesn't have by itself."""

from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, KVConnectorOutput

from serve_app.simulation.device import Device
from serve_app.simulation.profiles import Work
from serve_app.simulation.vllm_executor import SimulatedExecutor
from tests.fakes.clock import Clock
from tests.serve_app.simulation.virtual_engine import VirtualEngine

GOALS = "saturate_goals"
"""The argument by which the scheduler gets the goals of a request."""

WINDOW = 256
"""Tokens of context that the layers of a sliding window read."""

STATE_BLOCK = 128
"""Tokens of a block of `States`."""

DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
"""Options of `Drafts`."""

STORE = {
    "kv_connector": "Stored",
    "kv_connector_module_path": "tests.serve_app.engine.vllm.features",
    "kv_role": "kv_both",
}
"""Options of `Loading`."""

STAGES = 4
"""Stages of the pipeline of `Stages`."""

LOADS_S = 0.3
"""Seconds that the KV cache of a prompt takes from the store of `Stored`."""


class Windows(SimulatedExecutor):
    """A model with six layers of a sliding window for each layer of full attention."""

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        (layers,) = super().get_kv_cache_specs()
        full = layers["simulated"]
        assert isinstance(full, FullAttentionSpec)
        same = {
            "block_size": full.block_size,
            "num_kv_heads": full.num_kv_heads,
            "head_size": full.head_size,
            "dtype": full.dtype,
        }
        windows = {
            f"window {number}": SlidingWindowSpec(sliding_window=WINDOW, **same) for number in range(6)
        }
        return [{"full": full, **windows}]

    def determine_available_memory(self) -> list[int]:
        (memory,) = super().determine_available_memory()
        return [7 * memory]


class States(SimulatedExecutor):
    """A model with a layer of states (Mamba) beside a layer of full attention.

    Parts of a prompt end with a block, whose states are kept.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.cache_config.block_size, self.cache_config.mamba_cache_mode = STATE_BLOCK, "align"

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        (layers,) = super().get_kv_cache_specs()
        full = layers["simulated"]
        states = MambaSpec(
            block_size=full.block_size,
            shapes=((8,),),
            dtypes=(torch.float16,),
            page_size_padded=full.page_size_bytes,
            mamba_cache_mode="align",
        )
        return [{"full": full, "states": states}]


class Drafts(SimulatedExecutor):
    """A model with four drafts for each token, none of which is accepted."""

    def take_draft_token_ids(self) -> Any:
        ids = list(self._requests)
        return DraftTokenIds(ids, [[3] * 4 for _ in ids])


class Stored(KVConnectorBase_V1):  # type: ignore[misc]
    """A store outside of the engine with all of each prompt from 128 tokens on but the last 16 tokens."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.loading: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found = (request.num_prompt_tokens - 16) // 16 * 16 - num_computed_tokens
        if request.num_prompt_tokens < 128 or found <= 0 or request.num_output_tokens:
            return 0, False
        return found, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Loads(self.loading)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The requests whose KV cache is loaded with a step."""

    def __init__(self, loading: set[str]) -> None:
        self.loading = set(loading)
        loading.clear()


class Loading(SimulatedExecutor):
    """A device that loads the KV cache of prompts from `Stored` beside its steps."""

    time: Clock

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        loading = scheduled.kv_connector_metadata.loading
        self._loads = vars(self).get("_loads", {}) | dict.fromkeys(loading, self.time.now + LOADS_S)
        done = super().execute_model(scheduled, non_block)
        if scheduled.num_scheduled_tokens:
            return done
        # vLLM asks again at once.
        self.time.sleep(0.01)
        output = replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=self._loaded())
        if not non_block:
            return output
        loaded: Future[Any] = Future()
        loaded.set_result(output)
        return loaded

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        output = super().sample_tokens(grammar, non_block)
        made = Future.result(output) if non_block else output
        made.kv_connector_output = self._loaded()
        return output

    def _loaded(self) -> KVConnectorOutput:
        loaded = {name for name, at in self._loads.items() if at <= self.time.now}
        for name in loaded:
            del self._loads[name]
        return KVConnectorOutput(finished_recving=loaded)


class Pipeline(Device):
    """A device of several stages, each with its share of a step; each stage is at another step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ends_at = [0.0] * STAGES

    def submit(self, work: Work) -> float:
        share, at = self.profile.step.seconds(work) / STAGES, self._clock()
        for stage in range(STAGES):
            self._ends_at[stage] = at = max(at, self._ends_at[stage]) + share
        return at


class Stages(SimulatedExecutor):
    """A model whose layers stand on several devices, one behind the other."""

    time: Clock

    def _init_executor(self) -> None:
        super()._init_executor()
        self._device = Pipeline(self._device.profile, lambda: self.time.now, self.time.sleep)


class Images(SimulatedExecutor):
    """A model that reads images; a token of an image takes the time of one of a prompt to be encoded.

    Attributes:
        encodes: Tokens of images that a step encodes at most, and that the cache of images holds.
    """

    encodes = 2048

    def _init_executor(self) -> None:
        super()._init_executor()
        self._images: dict[str, Any] = {}

    def _submit(self, scheduled: Any) -> Any:
        images = self._images
        images |= {new.req_id: new.mm_features for new in scheduled.scheduled_new_reqs}
        encoded = sum(
            images[name][item].mm_position.get_num_embeds()
            for name, items in scheduled.scheduled_encoder_inputs.items()
            for item in items
        )
        batch = super()._submit(scheduled)
        self._device._free_at += self._device.profile.step.prompt_token * encoded
        return batch._replace(ends_at=self._device._free_at)


class FewImages(Images):
    """A model that reads images, with a cache for hardly more than one."""

    encodes = 128


def image(name: str, at: int, tokens: int) -> MultiModalFeatureSpec:
    """Return an image that stands at a place of a prompt, in so many tokens."""
    return MultiModalFeatureSpec(None, "image", f"{name} {tokens}", PlaceholderRange(at, tokens))


def _complete(engine: VirtualEngine) -> None:
    """Give an engine what vLLM has for an executor's model and devices."""
    scheduler, executor = engine.scheduler, engine.core.model_executor
    if isinstance(executor, Images):
        scheduler.max_num_encoder_input_tokens = executor.encodes
        scheduler.encoder_cache_manager = EncoderCacheManager(executor.encodes)
    if isinstance(executor, Stages) and isinstance(scheduler, AsyncScheduler):
        # As with vLLM's second runner on a GPU.
        scheduler.use_v2_model_runner = True
        engine.core.batch_queue_size = STAGES + 1
        engine.core.batch_queue = deque(maxlen=STAGES + 1)


def engine_of(executor: type[SimulatedExecutor], kind: type[VirtualEngine]) -> type[VirtualEngine]:
    """Return a kind of engine with another executor."""

    class Engine(kind):  # type: ignore[misc,valid-type]
        """The engine."""

        stages = STAGES if issubclass(executor, Stages) else 1

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            _complete(self)

        def _executor(self) -> type[SimulatedExecutor]:
            fields = {"time": self.time, "make_device": staticmethod(self.device)}
            return type("Executor", (executor,), fields)

    return Engine
