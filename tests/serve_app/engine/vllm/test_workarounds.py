"""The behaviour of vLLM by itself, and with each workaround.

A test named `…_still_…` shows the fault in vLLM as it is installed. Where it fails, the workaround may go.
"""

import asyncio
import fcntl
import platform
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.renderers import TokenizeParams
from vllm.renderers.hf import HfRenderer
from vllm.tokenizers import get_tokenizer
from vllm.v1.kv_cache_interface import KVCacheConfig

from serve_app.engine.vllm import plugin, workarounds
from serve_app.engine.vllm.workarounds import (
    allow_amx,
    bound_tokenizing,
    run_beam_searches,
    score_beside_the_loop,
    short_chats_at_once,
)
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.system.parent_death import TIED
from serve_app.turns.board import LOCKED
from tests.progress import run
from tests.serve_app.engine.pooling_application import Application
from tests.serve_app.engine.pooling_models import make_classifier

# Processes of the engine.


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own functions, which are put back behind the test."""
    for holder, names in (
        (lora_ops, ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")),
        (punica_cpu, ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")),
        (KVCacheConfig, ("needs_kv_cache_zeroing",)),
    ):
        for name in names:
            monkeypatch.setattr(holder, name, getattr(holder, name))


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    """This process is one of an Engine replica."""
    monkeypatch.setenv(TIED, "1")
    plugin.load()


def test_vllm_loads_one_plugin_which_leaves_other_uses_of_vllm_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (point,) = (p for p in entry_points(group="vllm.general_plugins") if p.name.startswith("saturate"))
    assert point.load() is plugin.load
    monkeypatch.delenv(TIED, raising=False)
    monkeypatch.setenv("SATURATE_ZERO_BLOCKS", "1")
    before = punica_cpu.bgmv_shrink, KVCacheConfig.needs_kv_cache_zeroing
    plugin.load()
    assert (punica_cpu.bgmv_shrink, KVCacheConfig.needs_kv_cache_zeroing) == before


def test_the_engines_of_a_replica_are_corrected(monkeypatch: pytest.MonkeyPatch, restored: None) -> None:
    monkeypatch.setenv(TIED, "1")
    monkeypatch.delenv("SATURATE_ZERO_BLOCKS", raising=False)
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    shrink = punica_cpu.bgmv_shrink
    plugin.load()
    assert punica_cpu.bgmv_shrink is not shrink
    assert not config.needs_kv_cache_zeroing
    plugin.zero_blocks()
    plugin.load()
    assert config.needs_kv_cache_zeroing


def test_the_processes_of_an_engine_lock_the_file_of_its_entry(
    monkeypatch: pytest.MonkeyPatch, restored: None, tmp_path: Path
) -> None:
    monkeypatch.setenv(TIED, "1")
    (file := tmp_path / "entry").touch()
    monkeypatch.setenv(LOCKED, str(file))
    plugin.load()
    with file.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def shrunk() -> tuple[list[list[float]], list[list[float]]]:
    """Return what the first operation of an adapter's layer makes of three rows, by both of its ways."""
    inputs, weights = torch.ones(3, 4), torch.stack([torch.ones(2, 4), 2 * torch.ones(2, 4)])
    tokens, prompts = torch.full((3, 2), 9.0), torch.full((3, 2), 9.0)
    punica_cpu.bgmv_shrink(inputs, weights, tokens, torch.tensor([0, -1, 1]), 0.5)
    starts, lengths = torch.tensor([0, 2]), torch.tensor([2, 1])
    punica_cpu.sgmv_shrink(inputs, weights, prompts, starts, lengths, torch.tensor([-1, 1]), 2, 2, 3, 0.5)
    return tokens.tolist(), prompts.tolist()


def test_vllm_still_takes_an_adapter_for_rows_without_one_on_a_cpu() -> None:
    tokens, prompts = shrunk()
    assert (tokens[1], prompts[0]) == ([4.0, 4.0], [4.0, 4.0])


def test_rows_without_an_adapter_stay_without_one(corrected: None) -> None:
    assert shrunk() == ([[2.0, 2.0], [0.0, 0.0], [4.0, 4.0]], [[0.0, 0.0], [0.0, 0.0], [4.0, 4.0]])


def test_numbers_of_an_adapter_do_not_reach_rows_without_one(corrected: None) -> None:
    nan = float("nan")
    inputs, weights = torch.ones(3, 2), torch.stack([torch.ones(4, 2), torch.full((4, 2), nan)])
    indices, base = torch.tensor([0, -1, -1]), torch.full((3, 4), 9.0)
    punica_cpu.bgmv_expand(inputs, weights, rows := base.clone(), indices, True)
    assert rows.tolist() == [[11.0] * 4, [9.0] * 4, [9.0] * 4]
    punica_cpu.bgmv_expand(inputs, weights, rows := base.clone(), torch.tensor([-1, -1, -1]), True)
    assert rows.tolist() == base.tolist()
    lengths, starts = torch.tensor([1, 2]), torch.tensor([0, 1])
    arguments = (starts, lengths, torch.tensor([0, -1]), 2, 2, 3)
    punica_cpu.sgmv_expand(inputs, weights, rows := base.clone(), *arguments, True)
    assert rows.tolist() == [[11.0] * 4, [9.0] * 4, [9.0] * 4]
    punica_cpu.sgmv_expand_slice(inputs, weights, rows := torch.full((3, 8), 9.0), *arguments, 4, 4, True)
    assert rows.tolist() == [[9.0] * 4 + [11.0] * 4, [9.0] * 8, [9.0] * 8]


def test_vllm_still_leaves_blocks_of_plain_attention_as_they_are(
    monkeypatch: pytest.MonkeyPatch, restored: None
) -> None:
    config = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    assert not config.needs_kv_cache_zeroing
    monkeypatch.setenv(TIED, "1")
    monkeypatch.setenv("SATURATE_ZERO_BLOCKS", "1")
    plugin.load()
    assert config.needs_kv_cache_zeroing
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    with pytest.raises(RuntimeError, match=r"KVCacheConfig\.needs_kv_cache_zeroing"):
        plugin.load()


# arch_prctl(ARCH_GET_XCOMP_PERM): bit 18 is the permission for the tiles.
AMX = """
import ctypes
from serve_app.engine.vllm.workarounds import allow_amx

def permitted():
    mask = ctypes.c_ulong()
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value & 1 << 18)

import vllm.v1.attention.backends.cpu_attn
print(permitted())
allow_amx()
print(permitted())
"""


def has_amx() -> bool:
    cpus = Path("/proc/cpuinfo")
    return platform.machine() == "x86_64" and cpus.exists() and "amx_tile" in cpus.read_text()


@pytest.mark.skipif(not has_amx(), reason="the CPU has no AMX")
def test_vllm_still_does_not_ask_for_amx() -> None:
    out = run([sys.executable, "-c", AMX])
    assert out.stdout.split() == ["False", "True"], out.stderr


def test_a_cpu_without_amx_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    monkeypatch.setattr("torch.cpu._init_amx", lambda: asked.append(True))
    allow_amx()
    assert asked == []


# Texts.

MOST = 10
SHORT, PIECE = 2_048, 65_536
"""Characters that are tokenized on the event loop, and in one piece."""

COUNTS = TokenizeParams(max_total_tokens=None)
TOKENIZER = get_tokenizer(LLMSettings(id="demo", source=DEMO_MODEL).path)
LONGEST = TOKENIZER.max_chars_per_token


class Renderer:
    """Stands for vLLM's renderer, with a thread of its own.

    Attributes:
        texts: The texts that were tokenized.
        threads: The threads that did it.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: list[str] = []

    def get_tokenizer(self) -> Any:
        return TOKENIZER

    def _tokenize_prompt(self, prompt: Any, params: TokenizeParams) -> Any:
        self.texts.append(prompt["prompt"])
        self.threads.append(threading.current_thread().name)
        return {"prompt_token_ids": TOKENIZER(prompt["prompt"], **params.get_encode_kwargs()).input_ids}

    async def _tokenize_prompt_async(self, prompt: Any, params: TokenizeParams) -> Any:
        return await asyncio.to_thread(Renderer._tokenize_prompt, self, prompt, params)


def bounded(most: int = MOST) -> Any:
    renderer: Any = Renderer()
    bound_tokenizing(renderer, most)
    return renderer


@pytest.mark.parametrize(
    ("characters", "thread"),
    [(SHORT, "MainThread"), (PIECE, "asyncio_0"), (PIECE + 1, "tokenize-long_0")],
)
async def test_texts_are_tokenized_by_their_lengths(characters: int, thread: str) -> None:
    renderer = bounded(4 * PIECE)
    tokens = await renderer._tokenize_prompt_async({"prompt": "x" * characters}, COUNTS)
    assert len(tokens["prompt_token_ids"]) == characters
    assert renderer.threads == [thread]


async def test_no_text_waits_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    going = threading.Event()
    plain = Renderer._tokenize_prompt

    def slowly(self: Renderer, prompt: Any, params: TokenizeParams) -> Any:
        if len(prompt["prompt"]) > PIECE:
            going.wait()
        return plain(self, prompt, params)

    monkeypatch.setattr(Renderer, "_tokenize_prompt", slowly)
    renderer = bounded(4 * PIECE)
    longs = [
        asyncio.ensure_future(renderer._tokenize_prompt_async({"prompt": "x" * 2 * PIECE}, COUNTS))
        for _ in range(3)
    ]
    for characters in (3, PIECE):
        await renderer._tokenize_prompt_async({"prompt": "x" * characters}, COUNTS)
    assert not any(each.done() for each in longs)
    going.set()
    await asyncio.gather(*longs)


async def test_a_text_that_can_not_be_within_the_limit_is_not_tokenized() -> None:
    renderer = bounded()
    with pytest.raises(VLLMValidationError, match=f"{MOST * LONGEST + 1} characters.*max_tokenize_tokens"):
        await renderer._tokenize_prompt_async({"prompt": "x" * (MOST * LONGEST + 1)}, COUNTS)
    assert renderer.texts == []


async def test_a_text_beyond_the_limit_has_no_more_tokens_than_show_it() -> None:
    renderer = bounded()
    assert await renderer._tokenize_prompt_async({"prompt": "x" * MOST}, COUNTS)
    with pytest.raises(VLLMValidationError, match="more than 10 tokens"):
        await renderer._tokenize_prompt_async({"prompt": "x" * (MOST + 1)}, COUNTS)


async def test_a_long_text_of_tokenize_is_refused_in_pieces() -> None:
    renderer = bounded(2 * PIECE)
    with pytest.raises(VLLMValidationError, match=r"more than 131072 tokens.*max_tokenize_tokens"):
        await renderer._tokenize_prompt_async({"prompt": "x" * 3 * PIECE}, COUNTS)
    assert renderer.texts == []


@pytest.mark.parametrize("on_the_loop", [True, False])
async def test_a_text_that_is_longer_than_the_context_is_refused_in_pieces(on_the_loop: bool) -> None:
    renderer = bounded()
    # One token for each character.
    params = TokenizeParams(max_total_tokens=3 * PIECE)

    async def tokenize(characters: int) -> Any:
        prompt = {"prompt": "x" * characters}
        if on_the_loop:
            return await renderer._tokenize_prompt_async(prompt, params)
        # As the routes of pooling models do.
        return renderer._tokenize_prompt(prompt, params)

    assert len((await tokenize(3 * PIECE))["prompt_token_ids"]) == 3 * PIECE
    with pytest.raises(VLLMValidationError, match="maximum context length is 196608 tokens"):
        await tokenize(4 * PIECE)
    assert len(renderer.texts) == 1


@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_long_text_that_is_truncated_is_cut_before_it_is_tokenized(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(TOKENIZER, "truncation_side", side)
    renderer = bounded()
    text = "a" * 1000 + "b" * 1000
    params = TokenizeParams(max_total_tokens=8, truncate_prompt_tokens=4)
    await renderer._tokenize_prompt_async({"prompt": text}, params)
    most = 8 * LONGEST
    assert renderer.texts == [text[-most:] if side == "left" else text[:most]]


@pytest.mark.parametrize(
    ("characters_per_token", "most", "answer", "counted"),
    [
        (1, 4 * PIECE, False, 0),
        (4, 2 * PIECE, False, 3),
        (4, PIECE, False, 4),
        (1, PIECE, True, 2),
    ],
    ids=["fewer bytes than tokens", "soon", "at the end", "too many"],
)
def test_a_long_text_is_counted_as_far_as_the_answer_is_open(
    characters_per_token: int, most: int, answer: bool, counted: int
) -> None:
    pieces: list[str] = []

    def tokenize(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        pieces.append(text)
        return {"input_ids": [0] * (len(text) // characters_per_token)}

    renderer = bounded()
    renderer.get_tokenizer = lambda: tokenize
    text = {"prompt": "x" * (4 * PIECE)}
    with pytest.raises(VLLMValidationError) if answer else nullcontext():
        renderer._tokenize_prompt(text, TokenizeParams(max_total_tokens=most))
    assert len(pieces) == counted
    assert len(renderer.texts) == (not answer)


@pytest.fixture
async def reranker(tmp_path: Path) -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        tasks = ("classify", "token_classify")
        yield await Application(str(make_classifier(tmp_path, 1)), tasks).start(stack)


def test_vllm_still_has_no_bound_for_tokenize() -> None:
    tokenize = (Path(workarounds.__file__), Path(sys.modules["vllm"].__file__ or ""))[1].parent
    source = (tokenize / "entrypoints/serve/tokenize/protocol.py").read_text()
    assert source.count("max_total_tokens=None") >= 2


def test_vllm_still_applies_every_chat_template_in_a_thread() -> None:
    source = Path(sys.modules["vllm.renderers.hf"].__file__ or "").read_text()
    assert "self._apply_chat_template_async = make_async(" in source


@pytest.mark.parametrize(
    ("messages", "options", "short"),
    [
        ([{"role": "user", "content": "1+2"}], {}, True),
        ([{"role": "user", "content": [{"type": "text", "text": "1+2"}]}], {}, True),
        ([{"role": "user", "content": "1+2", "tool_calls": None}], {"tools": None}, True),
        ([{"role": "user", "content": "x" * SHORT}], {}, False),
        ([{"role": "user", "content": [{"type": "text", "text": "x" * SHORT}]}], {}, False),
        ([{"role": "user", "content": ""}] * 1_000, {}, False),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], {}, False),
        ([{"role": "user", "content": "1+2"}], {"tools": [{}]}, False),
    ],
)
async def test_the_chat_template_of_a_short_chat_is_applied_without_a_thread(
    messages: Any, options: dict[str, Any], short: bool
) -> None:
    async def in_thread(*args: Any, **options: Any) -> str:
        return "in a thread"

    renderer: Any = object.__new__(HfRenderer)
    renderer._apply_chat_template_async = in_thread
    short_chats_at_once(renderer)
    found = await renderer._apply_chat_template_async(
        None, TOKENIZER, messages, chat_template="{{ messages[0].role }}", tokenize=False, **options
    )
    assert found == ("user" if short else "in a thread")


def test_a_renderer_of_another_kind_keeps_its_threads() -> None:
    renderer: Any = SimpleNamespace(_apply_chat_template_async=None)
    short_chats_at_once(renderer)
    assert renderer._apply_chat_template_async is None


class Scoring:
    """Stands for vLLM's part that scores pairs.

    Attributes:
        threads: The threads that prepared texts.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.io_processor: Any = self
        self.renderer = Renderer()
        self.model_config = None
        self._preprocessing: Any = None

    def get_request_factory_online(self, ctx: Any) -> list[str]:
        self.threads.append(threading.current_thread().name)
        return list(ctx.request.data_2)

    async def render_async(self, request: str) -> str:
        return f"rendered {request}"


def scored(most: int, *texts: Any, **options: int) -> tuple[Scoring, Any]:
    scoring = Scoring()
    score_beside_the_loop(SimpleNamespace(serving_scores=scoring), most)
    limits = {"max_tokens_per_query": 0, "max_tokens_per_doc": 0, "truncate_prompt_tokens": None} | options
    request = SimpleNamespace(data_1="q", data_2=list(texts), **limits)
    return scoring, SimpleNamespace(request=request)


async def test_texts_to_score_are_prepared_in_a_thread() -> None:
    scoring, ctx = scored(MOST, "a", "b")
    await scoring._preprocessing(scoring, ctx)
    assert ctx.engine_inputs == ["rendered a", "rendered b"]
    assert scoring.threads == ["score_0"]


async def test_texts_to_score_have_a_bound() -> None:
    scoring, ctx = scored(MOST, {"content": [{"type": "text", "text": "x" * (MOST * LONGEST + 1)}]})
    with pytest.raises(VLLMValidationError, match="this model's context"):
        await scoring._preprocessing(scoring, ctx)
    long = "x" * 2 * PIECE
    scoring, ctx = scored(PIECE, long)
    with pytest.raises(VLLMValidationError, match="a text has more"):
        await scoring._preprocessing(scoring, ctx)
    scoring, ctx = scored(PIECE, long, max_tokens_per_doc=3)
    await scoring._preprocessing(scoring, ctx)
    assert scoring.threads == ["score_0"]


async def test_vllm_still_prepares_texts_to_score_on_the_event_loop(reranker: Application) -> None:
    threads = []
    serving = reranker.app.state.serving_scores

    class Processor:
        def get_request_factory_online(self, ctx: Any) -> list[Any]:
            threads.append(threading.current_thread().name)
            return []

    with pytest.raises(ValueError, match="at least one prompt"):
        await type(serving)._preprocessing(serving, Processor(), None)
    assert threads == ["MainThread"]


def test_an_application_that_scores_nothing_stays_as_it_is() -> None:
    score_beside_the_loop(SimpleNamespace(), MOST)


# The application.


async def test_beam_searches_of_the_application_run_through_another_function(reranker: Application) -> None:
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    class Part(BeamSearchOnlineMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

    part, state = Part(), reranker.app.state
    state.part = part
    search = part.beam_search
    run_beam_searches(state, lambda own, *, prompt: (own, prompt))
    assert part.beam_search(prompt="a") == (search, "a")
