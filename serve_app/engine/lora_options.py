"""vLLM's options for LoRA adapters."""

from typing import Any

from serve_app.engine.adapter_copies import AdapterFiles
from serve_app.engine.adapter_files import Adapter, AdapterError
from serve_app.settings.adapters import adapters_by_id
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError

WORKER = "serve_app.engine.vllm.adapter_worker.AdapterWorker"
"""The look at adapters inside vLLM's workers."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM takes for `max_lora_rank`."""

USUAL_RANK = 16
"""The least of it, unless the config has one."""


def lora_options(settings: LLMSettings, files: AdapterFiles) -> tuple[dict[str, Any], dict[str, Adapter]]:
    """Return vLLM's options for the adapters of a model, as far as the config leaves them out.

    Args:
        settings: The model.
        files: Gets the files of the adapters.

    Returns:
        The options, and the adapters of the config by id.

    Raises:
        SettingsError: An adapter of the config can't be read.
    """
    if not settings.has_adapters:
        return {}, {}
    fetched = {}
    for id, adapter in adapters_by_id(settings.id, settings.adapters).items():
        try:
            fetched[id] = files.fetch(adapter)
        except AdapterError as error:
            raise SettingsError(f"models[{settings.id}].adapters: {id} ({adapter.source}) {error}") from None
    most = max([USUAL_RANK, *(adapter.rank for adapter in fetched.values())])
    options: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": settings.slots,
        "max_cpu_loras": settings.cpu_slots,
        "max_lora_rank": settings.engine.max_lora_rank or next((r for r in RANKS if r >= most), RANKS[-1]),
    }
    if settings.simulate is None:
        options["worker_extension_cls"] = WORKER
    return options, fetched
