"""Catalogue of the service's metrics; the table in the docs is generated from it."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
RECORDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)
COST = (1.0, 16.0, 64.0, 256.0, 1_024.0, 4_096.0, 16_384.0, 65_536.0, 262_144.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: Name in the code; Ray puts `ray_` before it.
        kind: Kind of the metric.
        help: Description, without a full stop.
        labels: Labels besides `application`, `deployment` and `replica`, which Ray Serve adds.
        buckets: Upper bounds of a histogram's buckets.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("model",)
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"ray_{self.name}"


# Every replica.
FAULTS = Metric(
    "saturate_faults_total",
    "counter",
    "Faults of the service, which are answered 500: errors that a replica logs with their stack",
    (),
)

# The Ingress and the batches.
LOST_CALLS = Metric(
    "saturate_lost_calls_total",
    "counter",
    "Calls that were lost with the process of their engine, so that they have no row in the usage ledger",
)

# The Ingress.
REQUESTS = Metric(
    "saturate_requests_total",
    "counter",
    "Requests that ended, by outcome",
    ("model", "outcome", "code"),
)
IN_PROGRESS = Metric("saturate_requests_in_progress", "gauge", "Requests that are being answered", ())
REQUEST_SECONDS = Metric(
    "saturate_request_seconds",
    "histogram",
    "Seconds from a request's arrival to the end of its answer, for requests that were answered",
    ("model", "stream"),
    SECONDS,
)
FIRST_TOKEN = Metric(
    "saturate_time_to_first_token_seconds",
    "histogram",
    "Seconds from a request's arrival to the first piece of its stream",
    ("model",),
    SECONDS,
)
PER_TOKEN = Metric(
    "saturate_time_per_output_token_seconds",
    "histogram",
    "Seconds per token of a stream after its first piece",
    ("model",),
    TOKEN_SECONDS,
)
PATH_SECONDS = Metric(
    "saturate_path_seconds",
    "histogram",
    "Seconds of an answered request outside the batcher's queue and the engine",
    ("model",),
    SECONDS,
)

# A model's batcher.
QUEUE_RECORDS = Metric(
    "saturate_queue_records", "gauge", "Records that wait, by service tier", ("model", "tier")
)
QUEUE_COST = Metric(
    "saturate_queue_cost", "gauge", "Cost of the records that wait: tokens, for an LLM", ("model", "tier")
)
QUEUE_OUTSIDE = Metric("saturate_queue_outside", "gauge", "Callers that wait for room in the queue")
WAIT_ESTIMATE = Metric(
    "saturate_wait_estimate_seconds",
    "gauge",
    "Seconds that a new record of the default tier would wait",
)
RUNNING_RECORDS = Metric("saturate_running_records", "gauge", "Records that run")
RUNNING_LIMIT = Metric(
    "saturate_running_limit_records",
    "gauge",
    "Records that may run at once; a few more may wait in the engine",
)
RUNNING_COST = Metric(
    "saturate_running_cost", "gauge", "Cost of running records: the tokens of KV budget in use"
)
CAPACITY = Metric("saturate_capacity_cost", "gauge", "Cost that may run at once: the KV budget in tokens")
BACKGROUND_RECORDS = Metric("saturate_background_records", "gauge", "Records of tier flex that run")
BUSY = Metric("saturate_busy_seconds_total", "counter", "Seconds in which at least one record ran")
BUDGET_USED = Metric(
    "saturate_budget_used_seconds_total",
    "counter",
    "Seconds weighted with the share of the budget in use; its rate is the mean share",
)
RECORDS_ENDED = Metric(
    "saturate_records_total",
    "counter",
    "Records by outcome: completed, failed, cancelled, expired, rejected",
    ("model", "outcome"),
)
WAIT_SECONDS = Metric(
    "saturate_record_wait_seconds",
    "histogram",
    "Seconds from submission to start, by service tier",
    ("model", "tier"),
    SECONDS,
)
RUN_SECONDS = Metric(
    "saturate_record_run_seconds", "histogram", "Seconds from start to end", ("model",), SECONDS
)
PROMPT_TOKENS = Metric("saturate_prompt_tokens_total", "counter", "Tokens in, as the engine counts them")
OUTPUT_TOKENS = Metric("saturate_output_tokens_total", "counter", "Tokens out, as the engine counts them")
STEP_BOUND = Metric(
    "saturate_step_bound_seconds",
    "gauge",
    "Maximum seconds that a step may take for live requests and their goals; 0: steps are not bounded",
)
STEP_SECONDS = Metric(
    "saturate_step_seconds",
    "gauge",
    "Times of a step that the engine has learned: base, and per prompt_token, sequence and context_token",
    ("model", "part"),
)
ROWS_LEFT_OUT = Metric(
    "saturate_rows_left_out_total", "counter", "Rows that were left out of a step, for its bound"
)
ROWS_DISPLACED = Metric(
    "saturate_rows_displaced_total", "counter", "Rows that were preempted for live requests"
)
LOOP_HELD = Metric(
    "saturate_loop_held_seconds",
    "gauge",
    "Longest time in the last second for which an Engine replica's event loop was held; the log has the "
    "calls",
)
BATCH_RECORDS = Metric(
    "saturate_batch_records", "histogram", "Records in a batch of a function", ("model",), RECORDS
)
BATCH_COST = Metric("saturate_batch_cost", "histogram", "Cost of a batch of a function", ("model",), COST)
BATCHED_COST = Metric("saturate_batched_cost_total", "counter", "Cost of all batches of a function")
PADDED_COST = Metric(
    "saturate_padded_cost_total",
    "counter",
    "Cost with each batch padded to its longest record; the excess over saturate_batched_cost_total is "
    "padding",
)
TENANT_RECORDS = Metric(
    "saturate_tenant_records_total", "counter", "Records that ran, by tenant", ("model", "tenant")
)
TENANT_COST = Metric(
    "saturate_tenant_cost_total",
    "counter",
    "Cost served to a tenant: prompt and output tokens, for an LLM",
    ("model", "tenant"),
)
TENANT_WAIT = Metric(
    "saturate_tenant_wait_seconds_total",
    "counter",
    "Sum of the seconds that a tenant's records waited",
    ("model", "tenant"),
)

USAGE_CALLS = Metric(
    "saturate_usage_calls_total", "counter", "Calls that an engine ran, by tenant", ("model", "tenant")
)
USAGE_TOKENS = Metric(
    "saturate_usage_tokens_total",
    "counter",
    "Tokens of a tenant as an engine counts them, by kind: prompt, cached (a part of prompt), output",
    ("model", "tenant", "kind"),
)
USAGE_ROWS = Metric("saturate_usage_rows_total", "counter", "Rows that were written to the usage ledger")
USAGE_DROPPED = Metric(
    "saturate_usage_rows_dropped_total",
    "counter",
    "Rows that the usage ledger dropped because they could not be written for too long",
)
USAGE_BEHIND = Metric(
    "saturate_usage_behind_seconds", "gauge", "Seconds since the usage ledger was last written"
)

# A driver in the service's cluster.
DRIVER_ROWS = Metric(
    "saturate_driver_rows_total",
    "counter",
    "Rows with a result or a final error, of drivers that use the handle",
    ("model", "outcome"),
)
DRIVER_TOKENS = Metric(
    "saturate_driver_tokens_total",
    "counter",
    "Tokens of the rows in saturate_driver_rows_total, in prompts and results",
)
DRIVER_RETRIES = Metric("saturate_driver_retries_total", "counter", "Calls that a driver sent again")
DRIVER_CALLS = Metric("saturate_driver_calls_in_progress", "gauge", "Calls of a driver that await an answer")

# The batches of OpenAI's API.
BATCHES_OPEN = Metric(
    "saturate_batches_open", "gauge", "Batches of /v1/batches that have not ended, by state", ("state",)
)
BATCHES_ROWS = Metric(
    "saturate_batches_rows", "gauge", "Rows of open batches without a result: waiting, in_flight", ("state",)
)
BATCHES_ROWS_ENDED = Metric(
    "saturate_batches_rows_total",
    "counter",
    "Rows with a result, by outcome: completed, failed",
    ("outcome",),
)
BATCHES_OLDEST = Metric("saturate_batches_oldest_seconds", "gauge", "Age of the oldest open batch", ())
BATCHES_LEFT = Metric(
    "saturate_batches_left_seconds",
    "gauge",
    "Seconds to the end of all open batches, at the measured rate",
    (),
)
BATCHES_LATE = Metric(
    "saturate_batches_late",
    "gauge",
    "Open batches that will not end within their completion_window at the rate of the last hour",
    (),
)
BATCHES_BYTES = Metric("saturate_batches_file_bytes", "gauge", "Bytes of all stored files", ())

# The quotas.
QUOTA_USED = Metric(
    "saturate_quota_used_ratio",
    "gauge",
    "Share of a limit that is used or reserved in its current window, 0 to 1, by key or tenant",
    ("subject", "limit"),
)

QUOTA_UNLIMITED = Metric(
    "saturate_quota_unlimited_calls_total",
    "counter",
    "Calls that ran without limits while the deployment Quotas was away",
)

# Models that take turns.
AWAKE = Metric(
    "saturate_turn_awake", "gauge", "Engines of a model that are awake on a shared device", ("model", "group")
)
TURNS_BEGUN = Metric(
    "saturate_turns_total",
    "counter",
    "Turns of a model on a shared device",
    ("model", "group"),
)
SWITCHING = Metric(
    "saturate_turn_switching_seconds_total",
    "counter",
    "Seconds in which a shared device did nothing before a turn, while another model fell asleep and this "
    "model woke up",
    ("model", "group"),
)

# vLLM's, by its own names.


def _vllm(name: str, kind: Kind, help: str, buckets: tuple[float, ...] = ()) -> Metric:
    return Metric(f"vllm_{name}", kind, f"vLLM: {help}", ("model_name",), buckets)


VLLM_RUNNING = _vllm("num_requests_running", "gauge", "Sequences in vLLM's batch")
VLLM_WAITING = _vllm("num_requests_waiting", "gauge", "Sequences that wait in vLLM")
VLLM_CACHE_USED = _vllm("kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1")
VLLM_OUTPUT_TOKENS = _vllm("generation_tokens_total", "counter", "Tokens produced, as they are produced")
VLLM_PROMPT_TOKENS = _vllm("prompt_tokens_total", "counter", "Tokens of prompts")
VLLM_PREEMPTIONS = _vllm(
    "num_preemptions_total", "counter", "Sequences that were preempted and computed again"
)
VLLM_CACHE_QUERIES = _vllm(
    "prefix_cache_queries_total", "counter", "Tokens that were looked up in the prefix cache"
)
VLLM_CACHE_HITS = _vllm("prefix_cache_hits_total", "counter", "Tokens that were found in the prefix cache")
VLLM_EXTERNAL_QUERIES = _vllm(
    "external_prefix_cache_queries_total", "counter", "Tokens that were looked up by a KV connector"
)
VLLM_EXTERNAL_HITS = _vllm("external_prefix_cache_hits_total", "counter", "Tokens that a KV connector found")
VLLM_DRAFTS = _vllm("spec_decode_num_drafts_total", "counter", "Drafts of speculative decoding")
VLLM_DRAFT_TOKENS = _vllm("spec_decode_num_draft_tokens_total", "counter", "Tokens of drafts")
VLLM_ACCEPTED_TOKENS = _vllm(
    "spec_decode_num_accepted_tokens_total", "counter", "Tokens of drafts that were accepted"
)
VLLM_FIRST_TOKEN = _vllm(
    "time_to_first_token_seconds", "histogram", "Seconds from arrival in vLLM to the first token", SECONDS
)
VLLM_PER_TOKEN = _vllm(
    "request_time_per_output_token_seconds", "histogram", "Mean seconds per token of a request", TOKEN_SECONDS
)
VLLM_SECONDS = _vllm(
    "e2e_request_latency_seconds", "histogram", "Seconds from arrival in vLLM to the last token", SECONDS
)

INGRESS = (FAULTS, LOST_CALLS, REQUESTS, IN_PROGRESS, REQUEST_SECONDS, FIRST_TOKEN, PER_TOKEN, PATH_SECONDS)
USAGE = (USAGE_CALLS, USAGE_TOKENS, USAGE_ROWS, USAGE_DROPPED, USAGE_BEHIND, QUOTA_UNLIMITED)
BATCHER = (
    FAULTS,
    QUEUE_RECORDS,
    QUEUE_COST,
    QUEUE_OUTSIDE,
    WAIT_ESTIMATE,
    RUNNING_RECORDS,
    RUNNING_COST,
    BUSY,
    RECORDS_ENDED,
    WAIT_SECONDS,
    RUN_SECONDS,
    TENANT_RECORDS,
    TENANT_COST,
    TENANT_WAIT,
    LOOP_HELD,
    *USAGE,
)
LLM = (
    CAPACITY,
    RUNNING_LIMIT,
    BUDGET_USED,
    PROMPT_TOKENS,
    OUTPUT_TOKENS,
    BACKGROUND_RECORDS,
    STEP_BOUND,
    STEP_SECONDS,
    ROWS_LEFT_OUT,
    ROWS_DISPLACED,
    AWAKE,
    TURNS_BEGUN,
    SWITCHING,
)
FUNCTION = (BATCH_RECORDS, BATCH_COST, BATCHED_COST, PADDED_COST)
DRIVER = (DRIVER_ROWS, DRIVER_TOKENS, DRIVER_RETRIES, DRIVER_CALLS)
BATCHES = (
    FAULTS,
    LOST_CALLS,
    BATCHES_OPEN,
    BATCHES_ROWS,
    BATCHES_ROWS_ENDED,
    BATCHES_OLDEST,
    BATCHES_LEFT,
    BATCHES_LATE,
    BATCHES_BYTES,
)
QUOTAS = (QUOTA_USED,)
VLLM = (
    VLLM_RUNNING,
    VLLM_WAITING,
    VLLM_CACHE_USED,
    VLLM_OUTPUT_TOKENS,
    VLLM_PROMPT_TOKENS,
    VLLM_PREEMPTIONS,
    VLLM_CACHE_QUERIES,
    VLLM_CACHE_HITS,
    VLLM_EXTERNAL_QUERIES,
    VLLM_EXTERNAL_HITS,
    VLLM_DRAFTS,
    VLLM_DRAFT_TOKENS,
    VLLM_ACCEPTED_TOKENS,
    VLLM_FIRST_TOKEN,
    VLLM_PER_TOKEN,
    VLLM_SECONDS,
)

ALL = tuple(dict.fromkeys((*INGRESS, *BATCHER, *LLM, *FUNCTION, *DRIVER, *BATCHES, *QUOTAS, *VLLM)))


def table() -> str:
    """Return all metrics as a Markdown table."""
    rows = ["| metric | kind | labels | description |", "|---|---|---|---|"]
    for metric in ALL:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
        rows.append(f"| `{metric.exported}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)
