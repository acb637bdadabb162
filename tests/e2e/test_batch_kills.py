"""Batches of the real service, of which any part is ended with SIGKILL at any moment."""

import json
import random
from collections.abc import Callable

import openai
import pytest

from serve_app.demo.questions import all_questions
from tests.e2e.services import Restartable
from tests.progress import ANSWER_S, wait_until

pytestmark = pytest.mark.long

ROWS, OF_BATCH = 3_000, 1_000
VICTIMS = {
    "batches": "ServeReplica:llm:Batches",
    "engine": "ServeReplica:llm:Engine:demo",
    "ingress": "ServeReplica:llm:Ingress",
    "service": "",
}
KILLS = [*["batches"] * 3, *["engine"] * 3, *["ingress"] * 2, *["service"] * 2]


@pytest.mark.timeout(3600)
def test_ten_kills_lose_no_row_and_double_none(restartable: Restartable) -> None:
    answers = {question.prompt: question.answer for question in all_questions()}
    asked = random.Random(0).sample(sorted(answers), ROWS)
    client = openai.OpenAI(base_url=f"{restartable.url}/v1", api_key="none", max_retries=60, timeout=ANSWER_S)
    batches = []
    for first in range(0, ROWS, OF_BATCH):
        text = "".join(_row(number, asked[number]) for number in range(first, first + OF_BATCH))
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        created = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        batches.append(created.id)

    def completed() -> int:
        counts = [client.batches.retrieve(id).request_counts for id in batches]
        return sum(each.completed for each in counts if each)

    dice = random.Random(1)
    victims = dice.sample(KILLS, len(KILLS))
    for number, victim in enumerate(victims):
        moment = int(ROWS * (number + dice.random()) / (len(victims) + 1))
        done = _wait_for(completed, moment)
        print(f"kill {number + 1}: {victim} after {done} rows", flush=True)
        if victim == "service":
            restartable.kill_all()
        else:
            restartable.kill(VICTIMS[victim])
    _wait_for(completed, ROWS)

    found: list[str] = []
    right = 0
    for id in batches:
        batch = client.batches.retrieve(id)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        assert batch.output_file_id
        for line in client.files.content(batch.output_file_id).text.splitlines():
            row = json.loads(line)
            found.append(row["custom_id"])
            text = row["response"]["body"]["choices"][0]["text"]
            right += text == answers[asked[int(row["custom_id"])]]
    assert sorted(found, key=int) == [str(number) for number in range(ROWS)]
    assert right >= 0.99 * ROWS


def _row(number: int, prompt: str) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    row = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row) + "\n"


def _wait_for(completed: Callable[[], int], least: int) -> int:
    """Wait until so many rows are completed; return how many are."""
    done = 0

    def enough() -> bool:
        nonlocal done
        done = completed()
        return done >= least

    wait_until(enough, news=lambda: done, tell=lambda: f"{done} rows, waiting for {least}", every_s=0.05)
    return done
