"""Batchers that keep a GPU full: by token cost, in a fair order, with a bound on the records that wait.

A wrong argument raises ValueError or TypeError; the message names it, and says what is allowed.
"""

from batcher.continuous import ContinuousBatcher as ContinuousBatcher
from batcher.continuous import Lanes as Lanes
from batcher.continuous import Slot as Slot
from batcher.continuous import SlotOptions as SlotOptions
from batcher.costs import CostEstimator as CostEstimator
from batcher.costs import CostEstimatorFn as CostEstimatorFn
from batcher.costs import Prompt as Prompt
from batcher.costs import TokenEstimator as TokenEstimator
from batcher.costs import TokenEstimatorFn as TokenEstimatorFn
from batcher.dynamic import DynamicBatcher as DynamicBatcher
from batcher.dynamic import RecordOptions as RecordOptions
from batcher.dynamic import SubmitOptions as SubmitOptions
from batcher.entries import Entry as Entry
from batcher.errors import Aborted as Aborted
from batcher.errors import BadResults as BadResults
from batcher.errors import BatcherError as BatcherError
from batcher.errors import Closed as Closed
from batcher.errors import Expired as Expired
from batcher.errors import Oversize as Oversize
from batcher.errors import QueueFull as QueueFull
from batcher.forming import Former as Former
from batcher.processing import InferenceFn as InferenceFn
from batcher.processing import ProcessFn as ProcessFn
from batcher.profiles import PROFILES as PROFILES
from batcher.profiles import profile as profile
from batcher.queue import RequestQueue as RequestQueue
from batcher.stats import BatchObservation as BatchObservation
from batcher.stats import BatchStats as BatchStats
from batcher.stats import ContinuousStats as ContinuousStats
from batcher.stats import Load as Load
from batcher.stats import Observation as Observation
from batcher.stats import Observations as Observations
from batcher.stats import Stats as Stats
from batcher.tokens import BatchOptions as BatchOptions
from batcher.tokens import TokenBatcher as TokenBatcher
