"""Batchers that keep a GPU full: by token cost, in a fair order, with a bound on what may wait."""

from batcher.calls import InferenceFn, ProcessFn
from batcher.continuous import ContinuousBatcher
from batcher.costs import (
    CostEstimator,
    CostEstimatorFn,
    OutputEstimator,
    Prompt,
    TokenEstimator,
    TokenEstimatorFn,
)
from batcher.dynamic import DynamicBatcher
from batcher.entries import Ticket
from batcher.errors import Aborted, BadResults, BatcherError, Closed, Expired, Oversize, QueueFull
from batcher.fair_share import Queued
from batcher.forming import Former
from batcher.observations import BatchObservation, Observation, Observations
from batcher.profiles import PROFILES, profile
from batcher.queue import Entry, RequestQueue
from batcher.slo import Goals
from batcher.slot import Slot
from batcher.stats import BatchStats, ContinuousStats, Stats
from batcher.threads import ThreadClient
from batcher.tokens import TokenBatcher

__all__ = [
    "PROFILES",
    "Aborted",
    "BadResults",
    "BatchObservation",
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
    "ThreadClient",
    "Ticket",
    "TokenBatcher",
    "TokenEstimator",
    "TokenEstimatorFn",
    "profile",
]
