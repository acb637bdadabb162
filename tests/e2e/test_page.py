"""The page in Chromium, in front of the live service with the demo model."""

import json
from pathlib import Path

import pytest

from tests.e2e.service import Service
from tests.serve_app.visit import Visit, choose, chromium, expect, needs_chromium

ROWS = 20


@pytest.mark.long
@needs_chromium
def test_a_chat_and_a_batch_from_upload_to_download(service: Service) -> None:
    with chromium() as browser:
        visit = Visit(browser, f"{service.url}/")
        page = visit.open()
        page.get_by_label("Model", exact=True).select_option("demo")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Message").fill("What is 47+28?")
        page.get_by_role("button", name="Send").click()
        answer = page.locator(".message.assistant")
        expect(answer).to_contain_text("end: stop")
        expect(answer.locator(".text")).to_have_text("75")
        expect(answer).to_contain_text("17 tokens in, 3 out")

        page.get_by_label("Model", exact=True).select_option("minilm")
        page.get_by_label("Texts, one per line", exact=True).fill("a cat")
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#result")).to_contain_text("a cat → 384 numbers: ")

        page.get_by_role("link", name="Batches").click()
        questions = [f"What is {number}+{number}?" for number in range(ROWS)]
        lines = [
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": "demo",
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                },
            }
            for number, question in enumerate(questions)
        ]
        choose(page, "\n".join(map(json.dumps, lines)), name="sums.jsonl")
        page.get_by_role("button", name="Upload and start").click()
        batch = page.locator(".batch", has_text="sums.jsonl")
        expect(batch.locator(".badge")).to_have_text("completed")
        with page.expect_download() as download:
            batch.get_by_role("button", name="Download the output").click()
        output = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
        answers = {
            row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in output
        }
        assert answers == {str(number): str(2 * number) for number in range(ROWS)}

        page.get_by_role("link", name="Live").click()
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#live")).to_contain_text("demo1 replica")
        page.get_by_role("link", name="Keys and use").click()
        expect(page.locator("#own-note")).to_contain_text("Without an API key")
        visit.context.close()
        assert visit.wrong == []
