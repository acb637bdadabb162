"""The driver against the live service: over HTTP and over the handle, chats, Ray Data, an evaluation."""

import json
import sys
from pathlib import Path

import httpx
import pytest

from serve_app.api.protocol import JSON
from serve_app.dataset import HTTPClient, Prompter, run
from serve_app.demo.questions import QUESTIONS_FILE
from tests import progress
from tests.e2e.service import Service

FEW = 100
"""Questions of the short run."""

QUESTIONS = [json.loads(line) for line in QUESTIONS_FILE.read_text().splitlines()]
COMMAND = [sys.executable, "-m", "serve_app.cli", "batch"]
CHAT = [{"role": "user", "content": "What is 47+28?"}]


def drive(service: Service, *arguments: object) -> str:
    """Run the command to its end and return its output."""
    return service.run([*COMMAND, *map(str, arguments)])


def rows(path: Path) -> list[JSON]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def right(done: list[JSON], count: int = FEW) -> float:
    """Return the share of the first questions that was answered right."""
    given = [(row["id"], row["result"]) for row in done]
    expected = [(question["id"], question["answer"]) for question in QUESTIONS[:count]]
    return sum(one == other for one, other in zip(given, expected, strict=True)) / len(expected)


@pytest.fixture(scope="module")
def over_http(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The output of the command for a few questions over HTTP, and the file of results."""
    out = tmp_path_factory.mktemp("http") / "out.jsonl"
    where = ["--url", service.url, "--model", "demo"]
    return drive(service, QUESTIONS_FILE, out, "--limit", FEW, *where), out


def test_over_http(over_http: tuple[str, Path]) -> None:
    printed, out = over_http
    assert "100: 100 with a result, 0 failed" in printed
    done = rows(out)
    assert right(done) >= 0.99
    report = json.loads(out.with_name("out.jsonl.report.json").read_text())
    assert report["this_run"]["utilization"] > 0
    assert report["output_rows"]["completion_tokens"] == sum(row["completion_tokens"] for row in done)


def test_over_the_handle(service: Service, over_http: tuple[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    printed = drive(service, QUESTIONS_FILE, out, "--app", "llm", "--model", "demo", "--limit", FEW)
    assert "batcher" in printed
    one, other = rows(over_http[1]), rows(out)
    assert right(other) >= 0.99
    assert [sorted(row) for row in other] == [sorted(row) for row in one]
    # Rounding differs with the sizes of the batches, so a doubtful sum may come out differently.
    assert sum(row == same for row, same in zip(one, other, strict=True)) >= 0.99 * len(one)


@pytest.mark.long
def test_as_a_ray_job(service: Service, tmp_path: Path) -> None:
    ray = Path(sys.executable).with_name("ray")
    submit = ["env", "RAY_AUTH_MODE=token", str(ray), "job", "submit", "--address", "auto", "--"]
    out = tmp_path / "out.jsonl"
    service.run([*submit, *COMMAND, str(QUESTIONS_FILE), str(out), "--app", "llm", "--model", "demo"])
    assert right(rows(out), len(QUESTIONS)) >= 0.99


def test_the_error_of_a_missing_handle_names_those_that_exist(service: Service, tmp_path: Path) -> None:
    done = progress.run(
        [
            sys.executable,
            "-m",
            "serve_app.cli",
            "batch",
            QUESTIONS_FILE,
            tmp_path / "out.jsonl",
            "--app",
            "llm",
            "--model",
            "other",
        ],
        env=service.env | {"RAY_ADDRESS": "auto"},
    )
    assert done.returncode == 2
    assert "this cluster has: --app llm --model demo" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("way", ["http", "handle"])
def test_chats(service: Service, tmp_path: Path, way: str) -> None:
    where = ["--url", service.url] if way == "http" else ["--app", "llm"]
    drive(service, QUESTIONS_FILE, tmp_path / "out.jsonl", *where, "--model", "demo", "--chat")
    assert right(rows(tmp_path / "out.jsonl"), len(QUESTIONS)) >= 0.99


def test_rows_that_fail_are_data(service: Service, tmp_path: Path) -> None:
    questions = tmp_path / "in.jsonl"
    prompts = ["What is 1+1?", "1" * 5000, "", "What is 2+2?"]
    lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
    questions.write_text(
        "\n".join([*lines, json.dumps({"prompt": 7}), json.dumps({"question": "What is 3+3?"})])
    )
    done = progress.run(
        [
            sys.executable,
            "-m",
            "serve_app.cli",
            "batch",
            questions,
            tmp_path / "out.jsonl",
            "--url",
            service.url,
            "--model",
            "demo",
        ]
    )
    assert done.returncode == 3, done.stderr
    assert "6: 2 with a result, 4 failed" in done.stdout
    found = rows(tmp_path / "out.jsonl")
    assert [row["result"] for row in found] == ["2", None, None, "4", None, None]
    types = [row["error"] and row["error"]["type"] for row in found]
    refused = "invalid_request_error"
    assert types == [None, refused, refused, None, "invalid_row", "missing_column"]
    assert "5000 tokens" in found[1]["error"]["message"]


async def test_in_python(service: Service) -> None:
    async with HTTPClient(service.url, model="demo") as client:
        done = [
            row
            async for row in run(
                QUESTIONS[:FEW],
                client,
                prompts=Prompter(chat=True),
                model="demo",
                sampling={"temperature": 0},
                concurrency="auto",
            )
        ]
    assert right(sorted(done, key=lambda row: int(row["row"]))) >= 0.99


def test_generate_takes_chats(http: httpx.Client) -> None:
    chats = [CHAT, [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 5-5?"}]]
    body = {"messages": chats, "model": "demo", "details": True}
    answer = http.post("/generate", json=body).json()
    assert answer["results"] == ["75", "0"]
    chat = http.post(
        "/v1/chat/completions", json={"model": "demo", "messages": CHAT, "temperature": 0}
    ).json()
    assert answer["details"][0]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert answer["results"][0] == chat["choices"][0]["message"]["content"]


def test_a_bad_chat_fails_alone_and_is_named(http: httpx.Client) -> None:
    picture = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}
    ]
    bad = [
        [],
        [{"role": "wizard", "content": "x"}],
        [{"content": "x"}],
        picture,
        [{"role": "user", "content": "1" * 5000}],
    ]
    answer = http.post(
        "/generate", json={"messages": [CHAT, *bad, CHAT], "partial": True, "model": "demo"}
    ).json()
    assert answer["results"] == ["75", *[None] * len(bad), "75"]
    assert [error["index"] for error in answer["errors"]] == [1, 2, 3, 4, 5]
    assert {error["type"] for error in answer["errors"]} == {"invalid_request_error"}
    assert "wizard" in answer["errors"][1]["message"]
    refused = http.post("/generate", json={"messages": [CHAT, bad[1]], "model": "demo"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages[1]"


RAY_DATA = """
import json, ray
from serve_app.dataset.ray_data import Generate

ray.init(address="auto", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
questions = json.loads(input())
rows = ray.data.from_items(questions)
stage = {"fn_constructor_args": ["llm", "demo"], "batch_format": "pyarrow", "batch_size": 50}
done = rows.map_batches(Generate, **stage, concurrency=1, max_concurrency=10, num_cpus=0).take_all()
print(json.dumps(done))
"""


TWO_STAGES = """
import json, ray
from serve_app.dataset.ray_data import Generate
ray.init(address="auto", logging_level="ERROR")
ray.data.DataContext.get_current().enable_progress_bars = False
stage = {"batch_format": "pyarrow", "batch_size": 5, "concurrency": 1, "max_concurrency": 2, "num_cpus": 0}
rows = ray.data.from_items([{"prompt": f"What is {n}+28?"} for n in range(20, 30)])
first = rows.map_batches(Generate, fn_constructor_args=["llm", "demo"], **stage)
again = {"columns": {"result": "again", "error": "again_error"}}
second = first.map_batches(
    Generate, fn_constructor_args=["llm", "demo"], fn_constructor_kwargs=again, **stage
)
done = second.take_all()
try:
    first.map_batches(Generate, fn_constructor_args=["llm", "demo"], **stage).take_all()
    told = ""
except Exception as error:
    told = str(error)
print(json.dumps({"done": done, "told": told}))
"""


@pytest.mark.long
def test_two_stages_of_ray_data_in_a_row(service: Service) -> None:
    found = service.run_python(TWO_STAGES)
    assert sorted(row["result"] for row in found["done"]) == [str(n + 28) for n in range(20, 30)]
    assert all(row["again"] == row["result"] and row["again_error"] is None for row in found["done"])
    assert "the dataset has a column 'result' already" in found["told"]


@pytest.mark.long
def test_ray_data(service: Service) -> None:
    questions = [*QUESTIONS[:250], {"id": "long", "prompt": "1" * 5000, "answer": ""}, *QUESTIONS[250:]]
    done = service.run_python(RAY_DATA, questions)
    by_id = {row["id"]: row for row in done}
    assert len(done) == len(by_id) == 501
    failed = by_id.pop("long")
    assert failed["result"] is None
    assert failed["error"]["type"] == "invalid_request_error"
    assert "5000 tokens" in failed["error"]["message"]
    assert failed["prompt"] == "1" * 5000
    assert sum(row["result"] == row["answer"] for row in by_id.values()) >= 495
    assert all(row["error"] is None and row["finish_reason"] == "stop" for row in by_id.values())
