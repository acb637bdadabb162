"""TokenBatcher: a DynamicBatcher whose cost is tokens."""

from collections.abc import Callable, Mapping
from typing import Literal, TypedDict, Unpack

from batcher import checks
from batcher.costs import CostEstimatorFn, RecordT, whole_cost
from batcher.dynamic import DynamicBatcher, SubmitOptions
from batcher.entries import Entry, ResultT
from batcher.forming import Forming
from batcher.processing import OnError, ProcessFn


class BatchOptions(TypedDict, total=False):
    """The arguments of `DynamicBatcher` that have the same names in `TokenBatcher`."""

    max_batch_size: int
    min_batch_size: int
    batch_timeout_s: float
    max_queue_size: int
    prefetch_batches: int
    max_queue_cost: int | None
    max_concurrent_batches: int
    forming: Forming
    lookahead: int | None
    padded: bool
    oversize: Literal["alone", "reject"]
    on_error: OnError
    priority_aging_s: float | None
    tenant_weights: Mapping[str, float] | None
    clock: Callable[[], float]


class TokenBatcher(DynamicBatcher[RecordT, ResultT]):
    """A `DynamicBatcher` in the words of a language model.

    `inference_fn` is another name for `process_fn`, `token_estimator` for `cost_estimator`,
    `target_batch_tokens` for `target_batch_cost`, `default_token_estimate` for `default_cost`, and
    `estimated_tokens`, of `submit` and `submit_nowait`, for `cost`. Each goes before the other name, if both
    are given. A record's `estimate_tokens()` goes before its `estimate_cost()`.
    """

    _cost_methods = ("estimate_tokens", "estimate_cost")

    def __init__(
        self,
        inference_fn: ProcessFn[RecordT, ResultT] | None = None,
        *,
        process_fn: ProcessFn[RecordT, ResultT] | None = None,
        token_estimator: CostEstimatorFn[RecordT] | None = None,
        cost_estimator: CostEstimatorFn[RecordT] | None = None,
        target_batch_tokens: int | None = None,
        target_batch_cost: int = 32_000,
        default_token_estimate: int | None = None,
        default_cost: int = 1,
        **options: Unpack[BatchOptions],
    ) -> None:
        function = process_fn if inference_fn is None else inference_fn
        if function is None:
            raise TypeError("TokenBatcher requires either inference_fn or process_fn")
        checks.whole("target_batch_tokens", target_batch_tokens, 1, optional=True)
        checks.whole("default_token_estimate", default_token_estimate, 0, optional=True)
        super().__init__(
            function,
            cost_estimator=cost_estimator if token_estimator is None else token_estimator,
            target_batch_cost=target_batch_cost if target_batch_tokens is None else target_batch_tokens,
            default_cost=default_cost if default_token_estimate is None else default_token_estimate,
            **options,
        )

    async def submit(
        self, record: RecordT, *, estimated_tokens: int | None = None, **options: Unpack[SubmitOptions]
    ) -> Entry[ResultT]:
        return await super().submit(record, **_in_tokens(estimated_tokens, options))

    def submit_nowait(
        self, record: RecordT, *, estimated_tokens: int | None = None, **options: Unpack[SubmitOptions]
    ) -> Entry[ResultT]:
        return super().submit_nowait(record, **_in_tokens(estimated_tokens, options))


def _in_tokens(tokens: int | None, options: SubmitOptions) -> SubmitOptions:
    if tokens is None:
        return options
    return {**options, "cost": whole_cost("estimated_tokens", tokens), "estimated_cost": None}
