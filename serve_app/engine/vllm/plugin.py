"""The plugin that vLLM loads in each of its processes; it changes only processes of an Engine replica."""

import os

from serve_app.system.parent_death import TIED, tie_to_parent
from serve_app.turns.board import lock_inherited

ZEROED = "SATURATE_ZERO_BLOCKS"
"""Set in an Engine replica and inherited by the processes that it starts."""


def zero_blocks() -> None:
    """Have the engine that this process will start zero each block of its KV cache when a request gets it."""
    os.environ[ZEROED] = "1"


def load() -> None:
    """Tie this process to its Engine replica and correct vLLM in it; other uses of vLLM stay as they are."""
    if TIED not in os.environ:
        return
    tie_to_parent()
    lock_inherited()
    from serve_app.engine.vllm import workarounds

    workarounds.allow_amx()
    workarounds.keep_lora_rows_apart()
    if ZEROED in os.environ:
        workarounds.zero_new_blocks()
