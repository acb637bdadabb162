"""Wrong arguments are named, and nothing is queued."""

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from batcher import ContinuousBatcher, DynamicBatcher, Entry, RequestQueue, TokenBatcher, checks
from tests.batcher.helpers import Machine, continuous_batcher, dynamic_batcher
from tests.batcher.virtual import virtual
from tests.fakes.clock import Clock


async def nothing(record: Any) -> None:
    """Process one record."""


def str_of(given: Any) -> str:
    return given if isinstance(given, str) else "-"


HUGE = 10**400
BITS = "a number of 1,329 bits"
BAD_NUMBERS: list[Any] = [float("nan"), float("inf"), -1, HUGE, 10**5000, "5", [1]]
SUBMITS: list[dict[str, Any]] = [
    *({name: value} for name in ("cost", "estimated_cost") for value in BAD_NUMBERS),
    *({"priority": value} for value in (float("nan"), 1.5, HUGE, "5", None, True)),
    *({"deadline": value} for value in (float("nan"), float("inf"), -math.inf, HUGE, "5", True)),
    *({"timeout": value} for value in BAD_NUMBERS),
    *({"tenant": value} for value in (None, 5, ["a"], b"a")),
]


@pytest.mark.parametrize("options", SUBMITS, ids=lambda options: next(iter(options)))
def test_a_wrong_argument_of_a_submit_is_named_and_nothing_is_queued(options: dict[str, Any]) -> None:
    (name,) = options

    @virtual
    async def scenario() -> None:
        async with dynamic_batcher(Machine()) as batcher, continuous_batcher(9) as window:
            for submit in (batcher.submit, batcher.submit_batch):
                given = (
                    {name: [options[name]]} if submit == batcher.submit_batch and "cost" in name else options
                )
                with pytest.raises((ValueError, TypeError), match=name):
                    await submit("x", **given)
            with pytest.raises((ValueError, TypeError), match=name):
                batcher.submit_nowait("x", **options)
            if name != "estimated_cost":
                with pytest.raises((ValueError, TypeError), match=name):
                    window.slot(**{"cost": 1, **options})
                with pytest.raises((ValueError, TypeError), match=name):
                    await window.submit(nothing, "x", **{"cost": 1, **options})
            if name == "cost":
                for tokens in ("prompt_tokens", "max_tokens"):
                    with pytest.raises(ValueError, match=tokens):
                        window.slot(**{"prompt_tokens": 1, "max_tokens": 1, tokens: options[name]})
            assert (batcher.stats.total_submitted, window.stats.total_submitted) == (0, 0)
            assert await (await batcher.submit("fine")) == "<fine>"

    scenario()


SETTINGS: dict[type, dict[str, list[Any]]] = {
    DynamicBatcher: {
        **dict.fromkeys(
            [
                "target_batch_cost",
                "max_batch_size",
                "min_batch_size",
                "max_queue_size",
                "prefetch_batches",
                "default_cost",
                "max_queue_cost",
                "max_concurrent_batches",
                "lookahead",
                "priority_aging_s",
                "batch_timeout_s",
            ],
            BAD_NUMBERS,
        ),
        "tenant_weights": [{"a": value} for value in BAD_NUMBERS] + [5],
        "padded": [5, "no"],
        "forming": ["random"],
        "oversize": ["split"],
        "on_error": ["retry"],
    },
    ContinuousBatcher: {
        **dict.fromkeys(
            ["capacity", "max_running", "places", "max_queue_size", "max_queue_cost", "priority_aging_s"],
            BAD_NUMBERS,
        ),
        "background": [float("nan"), HUGE, "5"],
        "max_starting": BAD_NUMBERS,
        "policy": ["best"],
        "oversize": ["split"],
        "tenant_weights": [{"a": value} for value in BAD_NUMBERS],
    },
    TokenBatcher: dict.fromkeys(["target_batch_tokens", "default_token_estimate"], BAD_NUMBERS),
    RequestQueue: {
        **dict.fromkeys(["max_size", "max_cost", "priority_aging_s"], BAD_NUMBERS),
        "background": [float("nan"), HUGE, "5"],
    },
}
WRONG = [
    (kind, name, value)
    for kind, names in SETTINGS.items()
    for name, values in names.items()
    for value in values
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    WRONG,
    ids=str_of,
)
def test_a_wrong_setting_is_named(kind: Any, name: str, value: Any) -> None:
    least: dict[type, dict[str, Any]] = {
        DynamicBatcher: {"process_fn": list},
        TokenBatcher: {"process_fn": list},
        ContinuousBatcher: {"capacity": 1},
        RequestQueue: {"clock": Clock()},
    }
    with pytest.raises((ValueError, TypeError), match=name):
        kind(**{**least[kind], name: value})


@virtual
async def test_a_wrong_number_of_tokens_is_named_and_nothing_is_queued() -> None:
    async with TokenBatcher[str, str](Machine()) as batcher:
        for value in BAD_NUMBERS:
            with pytest.raises(ValueError, match="estimated_tokens"):
                await batcher.submit("x", estimated_tokens=value)
            with pytest.raises(ValueError, match="estimated_tokens"):
                batcher.submit_nowait("x", estimated_tokens=value)
        assert batcher.stats.total_submitted == 0


@virtual
@pytest.mark.parametrize("name", ["cost", "estimated_cost"])
async def test_one_cost_for_many_records_is_named_and_nothing_is_queued(name: str) -> None:
    async with dynamic_batcher(Machine()) as batcher:
        with pytest.raises(TypeError, match=f"^{name} must be a sequence of costs, not 5$"):
            await batcher.submit_batch("ab", **{name: 5})  # type: ignore[arg-type]
        assert batcher.stats.total_submitted == 0


@virtual
async def test_other_wrong_numbers_are_named() -> None:
    async with continuous_batcher(10) as batcher, batcher.slot(1) as slot:
        calls: list[tuple[str, Callable[[Any], Any]]] = [
            ("capacity", batcher.set_capacity),
            ("max_running", lambda value: batcher.set_capacity(1, value)),
            ("weight", lambda value: batcher.weigh("a", value)),
            ("output_tokens", slot.report),
            ("limit", batcher.observe),
        ]
        for (name, call), value in itertools.product(calls, BAD_NUMBERS):
            with pytest.raises((ValueError, TypeError), match=name):
                call(value)
        with pytest.raises(TypeError, match="tenant"):
            batcher.weigh(["a"], 1.0)  # type: ignore[arg-type]
    for name, wrong in (("cost", HUGE), ("priority", math.nan), ("deadline", math.nan)):
        with pytest.raises(ValueError, match=name):
            Entry(None, **{"cost": 1, name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("check", "arguments", "message"),
    [
        (checks.whole, ("size", 0, 1), "size must be a whole number >= 1, not 0"),
        (checks.whole, ("size", HUGE, 1), f"size must be a whole number <= {2**53}, not {BITS}"),
        (checks.seconds, ("limit", -1), "limit must be a finite number of seconds >= 0, not -1"),
        (checks.seconds, ("limit", 2e9), "limit must be at most 1000000000, not 2000000000.0"),
        (checks.positive, ("rate", 0), "rate must be a finite number > 0, not 0"),
        (checks.one_of, ("kind", "c", "ab"), "kind must be one of 'a', 'b', not 'c'"),
        (checks.weight, ("share", 1e-9), "share must be a finite number >= 0.000001, not 1e-09"),
        (checks.flag, ("drain", 1), "drain must be True or False, not 1"),
        (checks.function, ("work", "x"), "work must be a function or another callable, not 'x'"),
        (checks.tenant, (b"a",), "tenant must be a string, not b'a'"),
        (checks.weights, ("weights", []), "weights must be a mapping from tenant to weight, not []"),
    ],
)
def test_a_message_shows_the_value_and_what_is_allowed(
    check: Callable[..., None], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        check(*arguments)


def test_what_is_allowed_passes() -> None:
    checks.whole("size", 2**53, 1)
    checks.whole("size", None, 1, optional=True)
    checks.seconds("limit", 0)
    checks.instant("deadline", -5.5)
    checks.positive("rate", 1e-300)
    checks.weight("share", 1e-6)
    checks.weights("weights", {"a": 1e6, "b": 1})
    checks.one_of("kind", "a", ["a"])
    checks.function("work", print)
    checks.flag("drain", False)
