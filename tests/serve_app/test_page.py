"""The page in Chromium, in front of a service whose models are played.

The pictures that the test of each view takes are in `.bench/page/`.
"""

import json
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from tests.pages import ROOT
from tests.progress import STILL_S, wait_until
from tests.serve_app.page_service import HOSTILE, KEYS, PageService
from tests.serve_app.visit import WIDE, Visit, choose, chromium, expect, needs_chromium, rows

PICTURES = ROOT / ".bench/page"
VIEWS = ("try", "batches", "live", "keys")
NARROW = {"width": 390, "height": 844}

pytestmark = [pytest.mark.long, needs_chromium]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., PageService]]:
    """Start a service."""
    services: list[PageService] = []

    def start(**more: Any) -> PageService:
        folder = tmp_path / "batches"
        folder.mkdir()
        services.append(PageService(**{"folder": folder} | more))
        return services[-1]

    yield start
    for service in services:
        service.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Visit a service; nothing may have gone wrong in the end."""
    visits: list[Visit] = []

    def start(service: PageService, **context: Any) -> Visit:
        visits.append(Visit(browser, service.url, **context))
        return visits[-1]

    yield start
    for one in visits:
        one.context.close()
        assert one.wrong == []


# Try


def test_a_chat_is_streamed_with_its_settings_and_tells_its_usage(serve: Any, visit: Any) -> None:
    service = serve()
    service.hold_chats()
    page = visit(service).open()
    page.get_by_label("System prompt").fill("Be brief.")
    for label, value in {"Temperature": "0.5", "Maximum tokens": "64", "Top p": "0.9", "Seed": "7"}.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Stop texts").fill("END\n\\n")
    page.get_by_label("Priority tier").select_option("flex")
    page.get_by_label("Message").fill("hello <i>there</i>")
    page.get_by_role("button", name="Send").click()
    answer = page.locator(".message.assistant")
    expect(answer).to_contain_text("You said ")
    expect(page.locator(".message.user .text")).to_have_text("hello <i>there</i>")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    service.set_free()
    expect(answer).to_contain_text("You said <b>hello <i>there</i></b>, and that is fine.")
    expect(answer).to_contain_text(
        re.compile(r"TTFT \d.* tokens/s · 14 tokens in \(4 cached\), 8 out · end: stop")
    )
    assert service.bodies == [
        {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hello <i>there</i>"},
            ],
            "temperature": 0.5,
            "max_tokens": 64,
            "top_p": 0.9,
            "seed": 7,
            "stop": ["END", "\\n"],
            "service_tier": "flex",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    # The next turn has the whole chat; Regenerate asks for its last answer again.
    page.get_by_label("Message").fill("more")
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    page.get_by_role("button", name="Regenerate").click()
    wait_until(lambda: len(service.bodies) == 3, every_s=0.01)
    assert service.bodies[1] == service.bodies[2]
    assert [one["role"] for one in service.bodies[2]["messages"]] == ["system", "user", "assistant", "user"]
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".message")).to_have_count(0)


def test_a_chat_can_be_stopped_and_keeps_what_came(serve: Any, visit: Any) -> None:
    service = serve()
    service.hold_chats()
    page = visit(service).open()
    page.get_by_label("Model", exact=True).select_option("thinker")
    page.get_by_label("Message").fill("go on")
    page.get_by_label("Message").press("Enter")
    expect(page.locator(".message.assistant details")).to_contain_text("Let me think.")
    expect(page.locator(".message.assistant > .text")).to_have_text("You said ")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".message.assistant")).to_contain_text("end: stopped")
    assert service.left.wait(STILL_S), "the service goes on with an answer that nobody reads"
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_label("Message")).to_be_focused()


def test_a_wrong_setting_is_named_and_nothing_is_sent(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).open()
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Temperature").fill("3")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Message").press("Enter")
    expect(page.get_by_label("Temperature")).to_be_focused()
    assert "2" in page.get_by_label("Temperature").evaluate("one => one.validationMessage")
    assert service.bodies == []


def test_a_refusal_says_when_to_try_again(serve: Any, visit: Any) -> None:
    service = serve()
    service.refuse = [RequestError(429, "rate_limit_error", "The queue is full.", retry_after_s=7.0)]
    page = visit(service).open()
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator("#ask-error")).to_have_text("The queue is full. Try again in 7.0 s.")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant")).to_contain_text("end: stop")
    expect(page.locator("#ask-error")).to_have_text("")


@pytest.mark.parametrize(
    ("model", "fields", "shown", "call"),
    [
        (
            "minilm",
            {"Texts, one per line": "one\ntwo"},
            "two → 384 numbers: 0.1250, ",
            "client.embeddings.create(",
        ),
        (
            "reranker",
            {"Query": "pet", "Documents, one per line": "a cat\na rate"},
            "0.9000  a cat",
            "/v1/rerank",
        ),
    ],
)
def test_a_model_without_chats_has_a_form(
    serve: Any, visit: Any, model: str, fields: dict[str, str], shown: str, call: str
) -> None:
    page = visit(serve()).open()
    page.get_by_label("Model", exact=True).select_option(model)
    expect(page.locator("#settings")).to_be_hidden()
    for label, text in fields.items():
        page.get_by_role("textbox", name=label, exact=True).fill(text)
    page.get_by_role("button", name="Python").click()
    expect(page.locator("#code")).to_contain_text(call)
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#result")).to_contain_text(shown)
    expect(page.locator("#result pre")).to_be_attached()


def test_records_of_a_function_are_json_or_texts(serve: Any, visit: Any) -> None:
    page = visit(serve()).open()
    page.get_by_label("Model", exact=True).select_option("minilm")
    page.get_by_label("What to ask").select_option("Process records")
    page.get_by_label("Records").fill('{"a": [1]}\nplain <b>text</b>')
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#result")).to_contain_text('{"a":[1]} → {"a":[1]}')
    expect(page.locator("#result")).to_contain_text("plain <b>text</b> → plain <b>text</b>")


def test_the_code_runs_and_does_not_have_the_key(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    page = visit(service).open()
    give_key(page, "ada")
    page.get_by_label("Message").fill('it\'s "quoted" $HOME\nand `more` \\ null')
    page.get_by_label("Seed").fill("3")
    said = page.get_by_label("Message").input_value()
    codes = {}
    for language in ("curl", "Python", "Node"):
        page.get_by_role("button", name=language).click()
        codes[language] = page.locator("#code").inner_text()
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == codes[language]
        assert KEYS["ada"] not in page.content() + copied
        assert "SATURATE_KEY" in copied
        assert service.url.rstrip("/") in copied
    environment = {"SATURATE_KEY": KEYS["ada"], "PATH": "/usr/bin:/bin"}
    if shutil.which("curl"):
        done = subprocess.run(
            ["bash", "-c", codes["curl"]], env=environment, capture_output=True, text=True, check=True
        )
        assert "data: [DONE]" in done.stdout
        assert service.bodies[-1]["messages"] == [{"role": "user", "content": said}]
        assert service.bodies[-1]["seed"] == 3
    printed: list[str] = []
    scope = {"print": lambda *parts, **_: printed.append("".join(map(str, parts)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SATURATE_KEY", KEYS["ada"])
        exec(compile(codes["Python"], "sample", "exec"), scope)
    assert said in "".join(printed)
    assert service.bodies[-1] == service.bodies[0] or not shutil.which("curl")
    if shutil.which("node"):
        # The package `openai` of npm is not there; the rest of the sample is checked.
        script = codes["Node"].replace('import OpenAI from "openai";', "")
        subprocess.run(["node", "--check", "--input-type=module", "-"], input=script, text=True, check=True)


def test_a_chat_by_keyboard_only(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).page
    # With a view in the address, the browser itself begins there.
    page.goto(service.url)
    expect(page.locator("#model option")).to_have_count(5)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(3):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "field-text":
            break
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant")).to_contain_text(
        "You said <b>hello\nyou</b>", use_inner_text=True
    )
    expect(page.locator("#said")).to_contain_text("Answer: You said")


# Batches


def test_a_batch_from_upload_to_download(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    page = visit(service).open("batches")
    give_key(page, "ada")
    fail = {"model": "demo", "messages": [{"role": "user", "content": "fail"}]}
    row = json.dumps({"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": fail})
    choose(page, f"{rows(30)}\n{row}", name=f"{HOSTILE}.jsonl")
    expect(page.locator("#check")).to_contain_text("31 rows · /v1/chat/completions · demo")
    page.get_by_label("Done within").select_option("1h")
    page.get_by_role("button", name="Upload and start").click()
    batch = page.locator(".batch")
    expect(batch.get_by_role("heading")).to_have_text(f"{HOSTILE}.jsonl")
    expect(batch.locator(".badge")).to_have_text("completed")
    expect(batch).to_contain_text("30 of 31 rows completed, 1 failed")
    found = {}
    for name in ("output", "errors"):
        with page.expect_download() as download:
            batch.get_by_role("button", name=f"Download the {name}").click()
        assert download.value.suggested_filename.endswith(f"-{name}.jsonl")
        found[name] = [json.loads(line) for line in Path(download.value.path()).read_text().splitlines()]
    assert {one["custom_id"] for one in found["output"]} == {str(number) for number in range(30)}
    assert [one["custom_id"] for one in found["errors"]] == ["bad"]


def test_a_file_dropped_on_the_page_is_checked(serve: Any, visit: Any) -> None:
    page = visit(serve()).open("batches")
    expect(page.locator("#no-batches")).to_contain_text("a client that sends one")
    drop = """(text) => {
        const data = new DataTransfer();
        data.items.add(new File([text], "dropped.jsonl"));
        for (const kind of ["dragover", "drop"])
            document.getElementById("drop").dispatchEvent(
                new DragEvent(kind, {dataTransfer: data, bubbles: true, cancelable: true}));
    }"""
    page.evaluate(drop, rows(2))
    expect(page.locator("#check")).to_contain_text("dropped.jsonl")
    expect(page.locator("#check")).to_contain_text("2 rows")


def test_wrong_lines_are_named_before_the_upload(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).open("batches")
    good = json.loads(rows(1))
    wrong = [
        json.dumps(good),
        "{",
        json.dumps(good),
        json.dumps(good | {"custom_id": 5}),
        json.dumps(good | {"custom_id": "a", "url": "/v1/files"}),
        json.dumps(good | {"custom_id": "b", "url": "/v1/completions"}),
        json.dumps(good | {"custom_id": "c", "body": {"model": HOSTILE + "?"}}),
        json.dumps(good | {"custom_id": "d", "body": []}),
        json.dumps(good | {"custom_id": "e", "method": "GET"}),
        "null",
        "",
        json.dumps(good | {"custom_id": "f", "body": None}),
    ]
    choose(page, "\n".join(wrong))
    listed = page.locator("#wrong li")
    expect(page.locator("#check")).to_contain_text("in.jsonl can't be a batch.")
    texts = listed.all_inner_texts()
    for line, text in {
        2: "not JSON",
        3: 'custom_id "0" is not unique',
        4: "custom_id must be a text",
        5: "url must be one of /v1/chat/completions, ",
        6: "url must be /v1/chat/completions, as in the lines before",
        7: f"the model {json.dumps(HOSTILE + '?')} is not served",
        8: "body must be an object",
        9: "method must be POST",
        10: "custom_id must be a text",
        12: "body must be an object",
    }.items():
        assert any(one.startswith(f"Line {line}: {text}") for one in texts), (line, text, texts)
    expect(page.get_by_role("button", name="Upload and start")).to_be_hidden()
    choose(page, b'{"custom_id": "\xff"}')
    expect(listed).to_contain_text(["Line 1: not UTF-8"])
    choose(page, "\n\n")
    expect(listed).to_contain_text(["the file has no rows"])
    assert not any(path == "/v1/files" for _, path, _ in service.asked)
    # The right one follows.
    choose(page, "\ufeff" + rows(3).replace("\n", "\r\n"))
    expect(page.get_by_role("button", name="Upload and start")).to_be_visible()
    expect(listed).to_have_count(0)


def test_a_large_file_is_checked_in_pieces(serve: Any, visit: Any, tmp_path: Path) -> None:
    page = visit(serve()).open("batches")
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(60):
            row = json.loads(rows(1)) | {"custom_id": str(number)}
            row["body"]["messages"][0]["content"] = "é" * 500_000
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    page.get_by_label("Choose a file").set_input_files(path)
    expect(page.locator("#check")).to_contain_text("60 rows")
    expect(page.locator("#check")).to_contain_text("60.0 MB")


def test_a_batch_is_cancelled_after_a_question(serve: Any, visit: Any) -> None:
    service = serve()
    service.hold_rows()
    page = visit(service).open("batches")
    choose(page, rows(10))
    page.get_by_role("button", name="Upload and start").click()
    badge = page.locator(".batch .badge")
    expect(badge).to_have_text("in progress")
    page.get_by_role("button", name="Cancel in.jsonl").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep it running").click()
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(badge).to_have_text("in progress")
    page.get_by_role("button", name="Cancel in.jsonl").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the batch").click()
    expect(badge).to_have_text("cancelled")
    expect(page.get_by_role("button", name="Cancel in.jsonl")).to_be_hidden()
    assert sum(path.endswith("/cancel") for _, path, _ in service.asked) == 1


def test_many_batches_have_pages(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).open("batches")
    made = """async (text) => {
        const form = new FormData();
        form.append("purpose", "batch");
        form.append("file", new File([text], "in.jsonl"));
        const file = await (await fetch("v1/files", {method: "POST", body: form})).json();
        for (let number = 0; number < 25; number++)
            await fetch("v1/batches", {method: "POST", headers: {"content-type": "application/json"},
                body: JSON.stringify({input_file_id: file.id, endpoint: "/v1/chat/completions",
                    completion_window: "24h", metadata: {file: `batch ${number}`}})});
    }"""
    page.evaluate(made, rows(1))
    page.reload()
    expect(page.locator(".batch")).to_have_count(20)
    expect(page.locator(".batch h2").first).to_have_text("batch 24")
    page.get_by_role("button", name="Older").click()
    expect(page.locator(".batch")).to_have_count(5)
    expect(page.locator(".batch h2").last).to_have_text("batch 0")
    page.get_by_role("button", name="Newest").click()
    expect(page.locator(".batch h2").first).to_have_text("batch 24")


def test_a_service_without_batches_names_the_setting(serve: Any, visit: Any) -> None:
    page = visit(serve(folder=None)).open("batches")
    expect(page.locator("#batches-off")).to_contain_text("`args.batches`")
    expect(page.locator("#upload")).to_be_hidden()


# Keys


def give_key(page: Any, name: str) -> None:
    """Enter a key."""
    page.locator("#key").fill(KEYS.get(name, name))
    page.get_by_role("button", name="Use this key").click()


def test_a_wrong_key_then_a_right_one_which_is_gone_in_a_new_tab(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    one = visit(service)
    page = one.open()
    expect(page.locator("#key-error")).to_have_text("This service asks for an API key.")
    expect(page.get_by_role("textbox", name="API key")).to_be_focused()
    give_key(page, "sk-wrong")
    expect(page.locator("#key-error")).to_have_text("This API key is not valid here. Enter another key.")
    give_key(page, "ada")
    expect(page.locator("#model option")).to_have_count(5)
    expect(page.locator("#key-form")).to_be_hidden()
    # A reload keeps it, in this tab alone.
    page.reload()
    expect(page.locator("#model option")).to_have_count(5)
    other = one.tab()
    other.goto(service.url)
    expect(other.locator("#key-error")).to_have_text("This service asks for an API key.")
    page.get_by_role("button", name="API key: set").click()
    page.get_by_role("button", name="Forget the key").click()
    expect(page.locator("#key-error")).to_have_text("This service asks for an API key.")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [0, 0, ""]
    keys = Counter(key for _, path, key in service.asked if path == "/v1/models")
    assert set(keys) == {"", "Bearer sk-wrong", f"Bearer {KEYS['ada']}"}


def test_a_plain_key_sees_its_own_part(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    page = visit(service).open("keys")
    give_key(page, "ada")
    limits = page.get_by_role("region", name="Quotas, and what is left").locator("tbody tr")
    expect(limits).to_have_count(3)
    # The fullest comes first.
    assert limits.first.locator("th, td").all_text_contents() == [
        "tenant research",
        "tokens per day",
        "100K",
        "96 %",
        "4K",
        "40.0 s",
    ]
    use = page.get_by_role("region", name="Use since the replicas began").locator("tbody tr")
    expect(use).to_have_count(1)
    expect(use).to_contain_text("research")
    expect(page.locator("#admin")).to_be_hidden()
    assert sum(path == "/v1/admin/keys" for _, path, _ in service.asked) == 1


def test_an_administrator_sees_all_keys_and_chooses_a_period(serve: Any, visit: Any) -> None:
    page = visit(serve(keys=True)).open("keys")
    give_key(page, "root")
    keys = page.get_by_role("region", name="API keys").locator("tbody tr")
    expect(keys).to_have_count(2)
    expect(keys.last).to_contain_text("valid · admin")
    row = page.locator("#usage tbody tr")
    expect(row).to_contain_text("0.0061")
    page.get_by_label("by", exact=True).select_option("tenant, model")
    expect(page.locator("#usage thead")).to_contain_text("model")
    with page.expect_request("**/v1/admin/usage?*since=30d*") as asked:
        page.get_by_label("Since", exact=True).select_option("30 days")
    assert "by=tenant%2Cmodel" in asked.value.url
    expect(row).to_contain_text(HOSTILE)


# Live


def test_the_figures_of_the_service_are_there(serve: Any, visit: Any) -> None:
    page = visit(serve()).open("live")
    live = page.locator("#live")
    expect(page.locator("#state")).to_have_text("live")
    for shown in (
        "demo2 replicas",
        "9 default, 3 flex",
        "of 262K tokens",
        "110 msmedian",
        "goal 500 ms",
        "goal 50 ms",
        "asleepasleep",
        "newstarting · an Engine replica",
        "turns1 replica · asleep",
        "9.0 to a batch",
        f"{HOSTILE}no <i>answer",
        "2 in_progress · rows: 1.2K waiting, 64 in flight, 30 completed, 1 failed · 13 rows/s",
        "96.0 s left · the oldest is 30.0 s old · 1 will be late",
    ):
        expect(live).to_contain_text(shown)
    rows = page.get_by_role("region", name="Replicas of demo").locator("tbody tr")
    assert rows.first.inner_text().split("\t")[:3] == ["r000", "12", rows.first.inner_text().split("\t")[2]]
    tokens = page.locator(".tile", has=page.get_by_role("heading", name="Tokens out")).first.locator("b")
    expect(tokens).not_to_have_text("0")
    # 8 tiles of a language model, twice; 6 of a function.
    expect(page.locator(".tile")).to_have_count(8 + 6 + 8)
    limits = page.get_by_role("region", name="Quotas, the fullest first").locator("tbody tr")
    assert limits.first.inner_text().startswith("tenant research\ttokens per day")


def test_it_asks_once_a_second_one_at_a_time_and_not_while_it_is_hidden(serve: Any, visit: Any) -> None:
    service = serve()
    one = visit(service)
    page = one.open("live")
    expect(page.locator("#state")).to_have_text("live")
    wait_until(lambda: service.stats_asked >= 3, every_s=0.01)
    began, before = time.monotonic(), service.stats_asked
    page.wait_for_timeout(3000)
    assert service.stats_asked - before <= time.monotonic() - began + 1
    hide = """(state) => {
        Object.defineProperty(document, "hidden", {value: state, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    hidden = service.stats_asked
    page.wait_for_timeout(2500)
    assert service.stats_asked == hidden
    page.evaluate(hide, False)
    wait_until(lambda: service.stats_asked > hidden, every_s=0.01)
    page.get_by_role("link", name="Try").click()
    expect(page.locator("#try")).to_be_visible()
    left = service.stats_asked
    page.wait_for_timeout(1500)
    assert service.stats_asked == left


def test_two_hundred_tenants_and_many_replicas(serve: Any, visit: Any) -> None:
    page = visit(serve(tenants=200, replicas=150)).open("live")
    tenants = page.get_by_role("region", name="Tenants of demo")
    replicas = page.get_by_role("region", name="Replicas of demo")
    expect(tenants.locator("tbody tr")).to_have_count(20)
    expect(tenants.get_by_role("button")).to_have_text("180 more")
    expect(replicas.get_by_role("button")).to_have_text("130 more")
    tenants.get_by_role("button").click()
    expect(tenants.locator("tbody tr")).to_have_count(120)
    page.get_by_label("Filter").fill("tenant-19")
    expect(tenants.locator("tbody tr")).to_have_count(9)
    expect(replicas).to_be_hidden()
    page.get_by_label("Filter").fill("")
    expect(tenants.locator("tbody tr")).to_have_count(120)
    # The focus stays while the figures change.
    tenants.get_by_role("button").click()
    expect(tenants.locator("tbody tr")).to_have_count(200)
    tenants.focus()
    page.wait_for_timeout(2500)
    assert page.evaluate("document.activeElement.ariaLabel").startswith("Tenants of demo")
    longest = page.evaluate(
        """() => new Promise((resolve) => {
            let last = performance.now(), most = 0, end = last + 3000;
            const frame = (now) => {
                most = Math.max(most, now - last);
                last = now;
                if (now < end) requestAnimationFrame(frame); else resolve(most);
            };
            requestAnimationFrame(frame);
        })"""
    )
    print(f"longest frame with 200 tenants and 150 replicas: {longest:.0f} ms")
    assert longest < 1000


def test_a_service_that_goes_away_and_comes_back(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).open("live")
    expect(page.locator("#state")).to_have_text("live")
    service.stop()
    expect(page.locator("#notice-text")).to_contain_text(
        "The service does not answer. The page shows what was there at "
    )
    expect(page.locator("#state")).to_have_text("no answer")
    expect(page.locator("#live")).to_contain_text("demo2 replicas")
    # The pauses grow.
    expect(page.locator("#pause")).to_have_text("The page asks again in 2.0 s.")
    expect(page.locator("#pause")).to_have_text("The page asks again in 4.0 s.")
    service.start()
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#notice")).to_be_hidden()


def test_a_chat_during_an_outage_says_so_and_works_afterwards(serve: Any, visit: Any) -> None:
    service = serve()
    page = visit(service).open()
    expect(page.locator("#model option")).to_have_count(5)
    service.stop()
    page.get_by_label("Message").fill("hello")
    page.get_by_label("Message").press("Enter")
    expect(page.locator("#ask-error")).to_have_text("The service does not answer.")
    expect(page.locator("#notice")).to_be_visible()
    service.start()
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#notice")).to_be_hidden()
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message.assistant")).to_contain_text("end: stop")


# All views


def fill(page: Any, view: str) -> None:
    """Wait until a view has its content."""
    if view == "try":
        page.get_by_label("Message").fill("What is a token?")
        page.get_by_label("Message").press("Enter")
        expect(page.locator(".message.assistant")).to_contain_text("end: stop")
        page.get_by_label("Message").fill("And a record?")
    elif view == "batches":
        choose(page, rows(40), name="questions.jsonl")
        page.get_by_role("button", name="Upload and start").click()
        expect(page.locator(".batch .badge").first).to_have_text("completed")
        choose(page, rows(2) + "{")
        expect(page.locator("#wrong li")).to_have_count(1)
    elif view == "live":
        page.wait_for_timeout(6000)
    else:
        expect(page.locator("#usage tbody tr")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [NARROW, WIDE], ids=["390", "1280"])
def test_each_view_is_accessible_and_fits(
    serve: Any, visit: Any, viewport: dict[str, int], scheme: str
) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python", reason="the package `axe-playwright-python` is missing"
    )
    script = Path(axe.__file__).with_name("axe.min.js").read_text()
    PICTURES.mkdir(parents=True, exist_ok=True)
    service = serve(keys=True, tenants=30)
    page = visit(service, viewport=viewport, color_scheme=scheme, reduced_motion="reduce").open()
    give_key(page, "root")
    found: dict[str, JSON] = {}
    for view in VIEWS:
        page.goto(f"{service.url}#{view}")
        fill(page, view)
        wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        page.screenshot(path=PICTURES / f"{view}-{viewport['width']}-{scheme}.png", full_page=True)
        assert wide[0] <= wide[1], f"{view}: {wide[0]} pixels of {wide[1]}"
        page.evaluate(script)
        found[view] = page.evaluate("axe.run()")
        print(
            f"axe, {view}, {viewport['width']}, {scheme}: {len(found[view]['violations'])} violations, "
            f"{len(found[view]['passes'])} rules pass, {len(found[view]['incomplete'])} undecided"
        )
    wrong = {
        (view, one["id"]): [node["html"][:200] + node["failureSummary"][:300] for node in one["nodes"][:3]]
        for view, result in found.items()
        for one in result["violations"]
    }
    assert wrong == {}


def test_no_name_is_markup(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    page = visit(service).open()
    give_key(page, "root")
    page.get_by_label("Model", exact=True).select_option(HOSTILE)
    for view in VIEWS:
        page.goto(f"{service.url}#{view}")
        fill(page, view)
        assert page.locator("main img").count() == 0
        assert page.title().startswith("saturate · ")
    page.go_back()
    expect(page.locator("#live")).to_be_visible()


def test_what_each_view_asks_of_the_service(serve: Any, visit: Any) -> None:
    service = serve(keys=True)
    one = visit(service)
    page = one.open()
    give_key(page, "root")
    expect(page.locator("#model option")).to_have_count(5)
    print()

    def measure(name: str, view: str, most: int, seconds: int) -> None:
        page.goto(f"{service.url}#{view}")
        # The first requests, of a view that opens, are not those of a minute.
        page.wait_for_timeout(500)
        one.requests.clear()
        page.wait_for_timeout(1000 * seconds)
        asked = list(one.requests)
        paths = Counter(request.url.removeprefix(service.url).partition("?")[0] for request in asked)
        sizes = [request.sizes() for request in asked if request.response()]
        sent = sum(size["requestHeadersSize"] + size["requestBodySize"] for size in sizes)
        got = sum(size["responseHeadersSize"] + size["responseBodySize"] for size in sizes)
        print(
            f"{name}, a minute: {len(asked) * 60 // seconds} requests, {sent * 60 // seconds} bytes sent, "
            f"{got * 60 // seconds} bytes received; in {seconds} s {dict(paths)}"
        )
        assert len(asked) <= most

    measure("Try", "try", most=0, seconds=10)
    measure("Batches", "batches", most=2, seconds=60)
    measure("Live", "live", most=31 + 7, seconds=30)
    measure("Keys and use", "keys", most=4, seconds=60)
    service.hold_rows()
    page.goto(f"{service.url}#batches")
    choose(page, rows(10))
    page.get_by_role("button", name="Upload and start").click()
    expect(page.locator(".batch .badge")).to_have_text("in progress")
    measure("Batches with an open batch", "batches", most=16, seconds=30)
