"""Batchers that keep a GPU full: by token cost, in a fair order, with a bound on the records that wait."""

from batcher.continuous import ContinuousBatcher, Slot
from batcher.costs import (
    CostEstimator,
    CostEstimatorFn,
    OutputEstimator,
    Prompt,
    TokenEstimator,
    TokenEstimatorFn,
)
from batcher.dynamic import DynamicBatcher
from batcher.entries import Entry, Queued, Ticket
from batcher.errors import Aborted, BadResults, BatcherError, Closed, Expired, Oversize, QueueFull
from batcher.forming import Former
from batcher.processing import InferenceFn, ProcessFn
from batcher.profiles import PROFILES, profile
from batcher.queue import RequestQueue
from batcher.slo import Goals
from batcher.stats import BatchObservation, BatchStats, ContinuousStats, Observation, Observations, Stats
from batcher.threads import ThreadClient
from batcher.tokens import BatchOptions, SubmitOptions, TokenBatcher

__all__ = [
    "PROFILES",
    "Aborted",
    "BadResults",
    "BatchObservation",
    "BatchOptions",
    "BatchStats",
    "BatcherError",
    "Closed",
    "ContinuousBatcher",
    "ContinuousStats",
    "CostEstimator",
    "CostEstimatorFn",
    "DynamicBatcher",
    "Entry",
    "Expired",
    "Former",
    "Goals",
    "InferenceFn",
    "Observation",
    "Observations",
    "OutputEstimator",
    "Oversize",
    "ProcessFn",
    "Prompt",
    "QueueFull",
    "Queued",
    "RequestQueue",
    "Slot",
    "Stats",
    "SubmitOptions",
    "ThreadClient",
    "Ticket",
    "TokenBatcher",
    "TokenEstimator",
    "TokenEstimatorFn",
    "profile",
]
