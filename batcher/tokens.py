"""TokenBatcher: a DynamicBatcher whose cost is tokens."""

from typing import Any, TypeVar

from batcher.calls import ProcessFn
from batcher.costs import CostEstimatorFn
from batcher.dynamic import DynamicBatcher
from batcher.entries import Ticket

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


class TokenBatcher(DynamicBatcher[RecordT, ResultT]):
    """A `DynamicBatcher` in the words of a language model.

    A record's own `estimate_tokens()` goes before its `estimate_cost()`.

    Args:
        inference_fn: Takes a list of records and returns as many results, in the same order.
        process_fn: The same, if `inference_fn` is not given.
        token_estimator: Returns the tokens of a record.
        cost_estimator: The same, if `token_estimator` is not given.
        target_batch_tokens: Most tokens of a batch; None: `target_batch_cost`.
        target_batch_cost: The same.
        default_token_estimate: Tokens of a record of which nothing is known; None: `default_cost`.
        default_cost: The same.
        options: All other arguments of `DynamicBatcher`.

    Raises:
        TypeError: Neither function is given, or one is not callable.
        ValueError: An argument is out of range.
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
        **options: Any,
    ) -> None:
        function = process_fn if inference_fn is None else inference_fn
        if function is None:
            raise TypeError("TokenBatcher needs inference_fn, or process_fn, and got neither")
        super().__init__(
            function,
            cost_estimator=cost_estimator if token_estimator is None else token_estimator,
            target_batch_cost=target_batch_cost if target_batch_tokens is None else target_batch_tokens,
            default_cost=default_cost if default_token_estimate is None else default_token_estimate,
            **options,
        )

    async def submit(
        self,
        record: RecordT,
        *,
        estimated_tokens: int | None = None,
        estimated_cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> Ticket[ResultT]:
        """Queue one record and return the future of its result; waits while the queue is full.

        Args:
            record: What `inference_fn` is given.
            estimated_tokens: Its tokens; None: `estimated_cost`.
            estimated_cost: The same; this and the rest are as in `DynamicBatcher.submit`.
        """
        return await super().submit(
            record,
            estimated_cost=estimated_cost if estimated_tokens is None else estimated_tokens,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
        )

    def submit_nowait(
        self,
        record: RecordT,
        *,
        estimated_tokens: int | None = None,
        estimated_cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> Ticket[ResultT]:
        """Queue one record at once and return the future of its result, or raise `QueueFull`.

        Args:
            record: What `inference_fn` is given.
            estimated_tokens: Its tokens; None: `estimated_cost`.
            estimated_cost: The same; this and the rest are as in `DynamicBatcher.submit_nowait`.
        """
        return super().submit_nowait(
            record,
            estimated_cost=estimated_cost if estimated_tokens is None else estimated_tokens,
            priority=priority,
            tenant=tenant,
            deadline=deadline,
        )
