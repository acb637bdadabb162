"""`POST /generate`: a list of prompts in, a list of results out."""

import httpx

SUMS = {"What is 47+28?": "75", "What is 12-40?": "-28", "What is 99+99?": "198", "What is 5-5?": "0"}


def generate(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/generate", json=body)


def test_results_come_in_the_order_of_the_prompts(http: httpx.Client) -> None:
    prompts = list(SUMS) * 5
    answer = generate(http, prompts=prompts, task_id="sums_001", model="demo").json()
    assert answer["results"] == [SUMS[prompt] for prompt in prompts]
    assert answer["task_id"] == "sums_001"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert set(answer) == {"results", "task_id", "usage"}


def test_details(http: httpx.Client) -> None:
    answer = generate(http, prompts=["What is 47+28?"], details=True).json()
    assert answer["details"] == [{"finish_reason": "stop", "prompt_tokens": 14, "completion_tokens": 3}]
    answer = generate(http, prompts=["What is 47+28?"], details=True, max_tokens=1).json()
    assert answer["results"] == ["7"]
    assert answer["details"][0]["finish_reason"] == "length"


def test_sampling_fields_override_the_config(http: httpx.Client) -> None:
    body = {"prompts": ["once upon"], "temperature": 2.0, "max_tokens": 40, "ignore_eos": True}
    first = generate(http, **body, seed=1).json()["results"]
    assert first == generate(http, **body, seed=1).json()["results"]
    assert first != generate(http, **body, seed=2).json()["results"]
    assert generate(http, prompts=["What is 47+28?"], stop="5").json()["results"] == ["7"]


def test_partial_returns_what_can_be_served(http: httpx.Client) -> None:
    prompts = ["What is 47+28?", "1" * 5000, "What is 5-5?", ""]
    answer = generate(http, prompts=prompts, partial=True, details=True).json()
    assert answer["results"] == ["75", None, "0", None]
    assert [error["index"] for error in answer["errors"]] == [1, 3]
    assert [error["type"] for error in answer["errors"]] == ["invalid_request_error"] * 2
    assert "5000 tokens" in answer["errors"][0]["message"]
    assert answer["details"][1] is None
    assert generate(http, prompts=["What is 5-5?"], partial=True).json()["errors"] == []


def test_a_list_longer_than_the_window_is_served(http: httpx.Client) -> None:
    prompts = [f"What is {n // 100}+{n % 100}?" for n in range(600)]
    answer = generate(http, prompts=prompts).json()
    right = [result == str(n // 100 + n % 100) for n, result in enumerate(answer["results"])]
    assert sum(right) >= 0.99 * 600
