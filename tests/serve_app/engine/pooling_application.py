"""vLLM's application of a pooling model, on an engine that the test plays."""

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext

from batcher import ContinuousBatcher
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.application import build_application
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.options import vllm_args
from serve_app.engine.vllm.tokenizing import bound_tokenizing
from serve_app.settings.models import LLMSettings
from tests.progress import STILL_S

CONTEXT = 128


LIMIT_S = STILL_S


class Texts(TokenizingQueue):
    """A queue that counts what it admits.

    Attributes:
        sizes: Characters of each call.
    """

    def __init__(self) -> None:
        super().__init__(100)
        self.sizes: list[int] = []

    async def run(self, call: Any, characters: int) -> Any:
        self.sizes.append(characters)
        return await super().run(call, characters)


class Application:
    """vLLM's application of a pooling model.

    Attributes:
        llm: Its engine.
        app: The application.
        routes: The routes that it serves.
        client: Calls it.
        batcher: Admits its prompts.
        texts: Admits its texts.
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
        llm.input_processor = None
        llm.adapters = SimpleNamespace(requests={})

        async def supported() -> tuple[str, ...]:
            return tasks

        llm.get_supported_tasks = supported
        self.llm = llm

    async def start(self, stack: AsyncExitStack) -> "Application":
        """Start its queues, which end with a stack, and return it."""
        self.batcher = await stack.enter_async_context(ContinuousBatcher(capacity=CONTEXT))
        self.llm.batcher = self.batcher
        self.texts = Texts()
        await self.texts.start()
        stack.push_async_callback(self.texts.stop)
        bound_tokenizing(self.llm.renderer, self.texts, CONTEXT)
        self.app, self.routes = await build_application(self.llm, self._args, self.texts)
        transport = httpx.ASGITransport(app=self.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://x", timeout=LIMIT_S)
        self.client = await stack.enter_async_context(client)
        return self

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Return the status and the body of an answer."""
        response = await self.client.post(path, json={"model": "demo"} | body)
        return response.status_code, response.json()
