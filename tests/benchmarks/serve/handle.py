"""Client that sends lists of prompts over a deployment handle, as a Ray job does."""

import asyncio
import time
from collections.abc import Callable

from serve_app.api.protocol import JSON
from tests.benchmarks.serve.pipes import serve


def prepare() -> Callable[[JSON], JSON]:
    """Connect to the service's Ray cluster; return the function that sends lists."""
    import ray
    from ray.serve import get_deployment_handle

    ray.init(address="auto", log_to_driver=False)
    engine = get_deployment_handle("Engine:demo", app_name="llm")

    async def send(lists: list[JSON], in_flight: int) -> list[JSON]:
        # In the order of the lists, whatever the order in which they are answered.
        answers: list[JSON] = [{} for _ in lists]
        left = iter(zip(lists, answers, strict=True))

        async def caller() -> None:
            for one, answer in left:
                started = time.monotonic()
                content = await engine.generate.remote(one)
                tokens = content["usage"]["completion_tokens"]
                answer.update(started=started, ended=time.monotonic(), tokens=tokens)

        await asyncio.gather(*(caller() for _ in range(in_flight)))
        return answers

    def answer(question: JSON) -> JSON:
        cpu = time.process_time()
        answers = asyncio.run(send(question["lists"], question["in_flight"]))
        return {"answers": answers, "cpu_s": time.process_time() - cpu}

    return answer


if __name__ == "__main__":
    serve(prepare)
