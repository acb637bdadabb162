"""The seeds' design: a FastAPI app, one `TokenBatcher` of the package flyte, `LLM.generate` on its batches.

    python -m tests.benchmarks.serve.static PORT '{"model": "...", ...}'

It follows the description in the guides, with their settings, except where their example would slow itself
down or can't be measured: `generate` runs in a thread, so that the event loop collects while a batch runs;
each prompt has its own `max_tokens`; a call may have a single prompt; and an answer has its number of tokens.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel


class Body(BaseModel):
    """Body of `/generate`: a list of prompts, or one."""

    prompts: list[str] = []
    prompt: str | None = None
    max_tokens: int = 512
    temperature: float = 0.7
    ignore_eos: bool = False
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt in the batcher."""

    text: str
    params: Any

    def estimate_tokens(self) -> int:
        """Return the cost at four characters a token, as in the guides."""
        return len(self.text) // 4 + 1


def build(engine: dict[str, Any]) -> FastAPI:
    """Return the app.

    Args:
        engine: The arguments of `vllm.LLM`.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        from vllm import LLM

        llm = LLM(**engine)

        def run(batch: list[Record]) -> list[tuple[str, int]]:
            texts, params = [record.text for record in batch], [record.params for record in batch]
            outputs = [output.outputs[0] for output in llm.generate(texts, params, use_tqdm=False)]
            return [(output.text, len(output.token_ids)) for output in outputs]

        async def inference(batch: list[Record]) -> list[tuple[str, int]]:
            return await asyncio.to_thread(run, batch)

        # Imported by name, since flyte is installed for benchmarks only.
        token_batcher = importlib.import_module("flyte.extras").TokenBatcher
        app.state.batcher = token_batcher(
            inference_fn=inference,
            target_batch_tokens=32_000,
            max_batch_size=256,
            batch_timeout_s=0.05,
            max_queue_size=5_000,
        )
        await app.state.batcher.start()
        yield
        await app.state.batcher.stop()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/generate")
    async def generate(body: Body) -> dict[str, Any]:
        from vllm import SamplingParams

        prompts = body.prompts if body.prompt is None else [body.prompt]
        if not prompts:
            raise HTTPException(status_code=400, detail="No prompts provided")
        params = SamplingParams(
            max_tokens=body.max_tokens, temperature=body.temperature, ignore_eos=body.ignore_eos
        )
        futures = [await app.state.batcher.submit(Record(prompt, params)) for prompt in prompts]
        done = await asyncio.gather(*futures)
        return {
            "results": [text for text, _ in done],
            "task_id": body.task_id,
            "usage": {"completion_tokens": sum(tokens for _, tokens in done)},
        }

    return app


if __name__ == "__main__":
    uvicorn.run(build(json.loads(sys.argv[2])), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
