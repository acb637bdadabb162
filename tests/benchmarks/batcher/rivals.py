"""Other batchers, each used as in its own documentation."""

import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

ProcessFn = Callable[[list[int]], Awaitable[list[int]]]

NO_FLYTE = "flyte is not installed, so it is left out (`make bench NAME=batcher` installs it)"


def flyte_batcher() -> Any | None:
    """Return flyte's class `DynamicBatcher`; None if the package is not installed.

    Only its module is loaded: it needs no other, and the whole package would fill the heap.
    """
    package = importlib.util.find_spec("flyte")
    if package is None or not package.submodule_search_locations:
        return None
    name = "flyte_dynamic_batcher"
    if name not in sys.modules:
        path = Path(package.submodule_search_locations[0]) / "extras" / "_dynamic_batcher.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name].DynamicBatcher


def serve_batch(process_fn: ProcessFn, **options: Any) -> Callable[[int], Awaitable[int]]:
    """Return a function of one record, made by Ray's `@serve.batch` from a function of many.

    Args:
        process_fn: The function of a batch.
        options: Arguments of `@serve.batch`.
    """
    from ray import serve
    from ray.serve import batching

    # It compares its limit with that of its replica, to log a warning; there is no replica here.
    warn = "_warn_if_max_batch_size_exceeds_max_ongoing_requests"
    setattr(batching._BatchQueue, warn, lambda queue: None)

    async def process(records: list[int]) -> list[int]:
        return await process_fn(records)

    handler: Callable[[int], Awaitable[int]] = serve.batch(**options)(process)
    return handler
