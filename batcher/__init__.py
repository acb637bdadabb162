"""Batchers that keep a GPU full: by token cost, in a fair order, with a bound on the records that wait."""

from batcher.continuous import ContinuousBatcher, SlotOptions
from batcher.costs import (
    CostEstimator,
    CostEstimatorFn,
    OutputEstimator,
    Prompt,
    TokenEstimator,
    TokenEstimatorFn,
)
from batcher.dynamic import DynamicBatcher, RecordOptions, SubmitOptions
from batcher.entries import Entry
from batcher.errors import Aborted, BadResults, BatcherError, Closed, Expired, Oversize, QueueFull
from batcher.forming import Former
from batcher.goals import Goals
from batcher.processing import InferenceFn, ProcessFn
from batcher.profiles import PROFILES, profile
from batcher.queue import RequestQueue
from batcher.stats import (
    BatchObservation,
    BatchStats,
    ContinuousStats,
    Load,
    Observation,
    Observations,
    Stats,
)
from batcher.threads import ThreadClient
from batcher.tokens import BatchOptions, TokenBatcher
from batcher.window import Slot

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
    "Load",
    "Observation",
    "Observations",
    "OutputEstimator",
    "Oversize",
    "ProcessFn",
    "Prompt",
    "QueueFull",
    "RecordOptions",
    "RequestQueue",
    "Slot",
    "SlotOptions",
    "Stats",
    "SubmitOptions",
    "ThreadClient",
    "TokenBatcher",
    "TokenEstimator",
    "TokenEstimatorFn",
    "profile",
]
