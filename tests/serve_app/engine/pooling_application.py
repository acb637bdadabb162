"""vLLM's own application behind a door, on an engine that a test plays."""

import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext

from serve_app.api.routes import TOKENIZING
from serve_app.engine.job import set_current
from serve_app.engine.vllm.application import build_application
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.options import vllm_args
from serve_app.engine.vllm.workarounds import bound_tokenizing
from serve_app.settings.models import LLMSettings
from tests.progress import STILL_S
from tests.serve_app.engine.engine_doubles import (
    CONTEXT,
    REQUEST,
    PlayedAdapters,
    PlayedGrammars,
    new_job,
    opened,
)

LIMIT_S = STILL_S


class Application:
    """vLLM's application of a model.

    Attributes:
        llm: Its engine.
        app: The application.
        routes: The routes that it serves.
        client: Calls it.
        site: The door with all around it.
        tokenized: Slots that ran when a text was tokenized, by texts.
    """

    def __init__(self, source: str, tasks: tuple[str, ...], **engine: Any) -> None:
        options = {"runner": "pooling", "max_model_len": CONTEXT, "enforce_eager": True, **engine}
        settings = LLMSettings.model_validate({"id": "demo", "source": source, "engine": options})
        self._args = vllm_args(settings)
        config = AsyncEngineArgs.from_cli_args(self._args).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
        config.cache_config.num_gpu_blocks = 9
        # The constructor would start vLLM.
        llm: Any = GatedLLM.__new__(GatedLLM)
        llm.shutdown = lambda *_: None
        llm.vllm_config, llm.model_config = config, config.model_config
        llm.renderer = renderer_from_config(config)
        llm.by_priority = False
        llm.grammars = PlayedGrammars()
        llm.input_processor = None

        async def supported() -> tuple[str, ...]:
            return tasks

        llm.get_supported_tasks = supported
        self.llm = llm

    async def start(self, stack: AsyncExitStack) -> "Application":
        """Open its door, which closes with a stack, and return it."""
        # Texts are tokenized in threads, which have no loop.
        door = opened(capacity=CONTEXT, clock=time.monotonic, adapters=PlayedAdapters(1, ()))
        self.site = site = await stack.enter_async_context(door)
        self.llm.door, self.llm.adapters = site.door, site.adapters
        self.tokenized: list[int] = []
        tokenize = self.llm.renderer._tokenize_prompt

        def watched(prompt: Any, params: Any) -> Any:
            self.tokenized.append(site.batcher.stats.running + site.texts.stats.running)
            return tokenize(prompt, params)

        self.llm.renderer._tokenize_prompt = watched
        bound_tokenizing(self.llm.renderer, CONTEXT)
        self.app, self.routes = await build_application(self.llm, self._args)
        transport = httpx.ASGITransport(app=self.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://x", timeout=LIMIT_S)
        self.client = await stack.enter_async_context(client)
        return self

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Admit a request, and return the status and the body of its answer."""
        facts = {"runs": path not in TOKENIZING, "output": 0}
        job = new_job(replace(REQUEST, path=path), facts=facts)
        await self.site.door.admit(job)
        set_current(job)
        try:
            response = await self.client.post(path, json={"model": "demo"} | body)
        finally:
            if job.slot is not None and not job.placed:
                job.slot.release()
        return response.status_code, response.json()
