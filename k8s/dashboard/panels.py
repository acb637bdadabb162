"""Rows and panels of the Grafana dashboard, from what users see to what the engine reports."""

from dataclasses import dataclass

from serve_app.telemetry import catalogue as c
from serve_app.telemetry.catalogue import Metric

HERE = 'application=~"$application", model=~"$model"'
MODEL = 'model=~"$model"'
VLLM = 'model_name=~"$model"'
SERVE = 'application=~"$application"'


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and the name of its series in the legend."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        title: Title.
        unit: Grafana's name of the unit.
        queries: Queries.
        help: Description that Grafana shows beside the title.
        most: Upper end of the axis; None: Grafana chooses.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    most: float | None = None


def rate(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return the rate of a counter, summed over replicas."""
    return f"sum by ({by}) (rate({metric.exported}{{{labels}}}[$__rate_interval]))"


def total(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return a gauge, summed over replicas."""
    return f"sum by ({by}) ({metric.exported}{{{labels}}})"


def highest(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return the highest value of a gauge over replicas."""
    return f"max by ({by}) ({metric.exported}{{{labels}}})"


def quantile(share: float, name: str, by: str, labels: str = HERE) -> str:
    """Return a quantile of a histogram."""
    grown = f"sum by (le, {by}) (rate({name}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {grown})"


def quantiles(name: str, by: str, legend: str, labels: str = HERE) -> tuple[Query, ...]:
    """Return the median and the 95th percentile of a histogram."""
    return tuple(
        Query(quantile(share, name, by, labels), f"{legend} p{share * 100:.0f}") for share in (0.5, 0.95)
    )


def vllm(name: str) -> str:
    """Return the rate of one of vLLM's counters."""
    return f"sum by (model_name) (rate(ray_vllm_{name}_total{{{VLLM}}}[$__rate_interval]))"


PROMPT, CACHED, OUTPUT = ('kind="prompt", ', 'kind="cached", ', 'kind="output", ')

GOOD = 'outcome="ok", '
COUNTED = 'outcome=~"ok|failed|rejected|expired", '
SHARE_GOOD = f"{rate(c.REQUESTS, 'model', GOOD + HERE)} / {rate(c.REQUESTS, 'model', COUNTED + HERE)}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Are users happy?",
        (
            Panel(
                "Requests by outcome",
                "reqps",
                (Query(rate(c.REQUESTS, "model, outcome"), "{{model}} {{outcome}}"),),
                "rejected: 429, the queue is full. expired: 408, its deadline passed. refused: the request "
                "was wrong. cancelled: the client disconnected.",
            ),
            Panel(
                "Share of successful requests",
                "percentunit",
                (
                    Query(
                        SHARE_GOOD,
                        "{{model}}",
                    ),
                ),
                "Without requests that were cancelled or refused.",
                1,
            ),
            Panel(
                "Time to first token",
                "s",
                quantiles(c.FIRST_TOKEN.exported, "model", "{{model}}"),
                "Streams, measured at the Ingress.",
            ),
            Panel(
                "Time per output token",
                "s",
                quantiles(c.PER_TOKEN.exported, "model", "{{model}}"),
                "Streams.",
            ),
            Panel(
                "Whole request",
                "s",
                quantiles(c.REQUEST_SECONDS.exported, "model, stream", "{{model}} stream {{stream}}"),
            ),
            Panel(
                "Overhead of the path",
                "s",
                quantiles(c.PATH_SECONDS.exported, "model", "{{model}}"),
                "Time of an answered request outside the batcher's queue and the engine.",
            ),
        ),
    ),
    (
        "Is the GPU full?",
        (
            Panel(
                "KV budget",
                "percentunit",
                (
                    Query(
                        f"avg by (model) (rate({c.BUDGET_USED.exported}{{{HERE}}}[$__rate_interval]))",
                        "{{model}} reserved",
                    ),
                    Query(
                        f"avg by (model_name) (ray_vllm_kv_cache_usage_perc{{{VLLM}}})",
                        "{{model_name}} used by vLLM",
                    ),
                ),
                "Reserved: admitted by the batcher. If it is far above what vLLM uses, answers are shorter "
                "than their max_tokens; see batcher.policy.",
                1,
            ),
            Panel(
                "Busy time",
                "percentunit",
                (
                    Query(
                        f"avg by (model) (rate({c.BUSY.exported}{{{HERE}}}[$__rate_interval]))", "{{model}}"
                    ),
                ),
                "",
                1,
            ),
            Panel(
                "Running",
                "short",
                (
                    Query(total(c.RUNNING_RECORDS, "model"), "{{model}}"),
                    Query(total(c.RUNNING_LIMIT, "model"), "{{model}} at most"),
                ),
            ),
            Panel(
                "Tokens per second",
                "short",
                (
                    Query(rate(c.PROMPT_TOKENS, "model"), "{{model}} in"),
                    Query(rate(c.OUTPUT_TOKENS, "model"), "{{model}} out, when requests end"),
                    Query(
                        vllm("generation_tokens"),
                        "{{model_name}} out, when produced",
                    ),
                ),
            ),
            Panel(
                "GPUs",
                "percent",
                (Query("avg by (ip, GpuIndex) (ray_node_gpus_utilization)", "{{ip}} {{GpuIndex}}"),),
                "Utilization, as Ray's agent reads it from the driver.",
                100,
            ),
            Panel(
                "Batches of functions",
                "short",
                (
                    *quantiles(c.BATCH_RECORDS.exported, "model", "{{model}} records"),
                    Query(
                        f"1 - {rate(c.BATCHED_COST, 'model')} / {rate(c.PADDED_COST, 'model')}",
                        "{{model}} share of padding",
                    ),
                ),
            ),
        ),
    ),
    (
        "Which requests wait, and why?",
        (
            Panel(
                "Waiting, by tier",
                "short",
                (Query(total(c.QUEUE_RECORDS, "model, tier"), "{{model}} {{tier}}"),),
            ),
            Panel(
                "Cost of waiting records",
                "short",
                (
                    Query(total(c.QUEUE_COST, "model, tier"), "{{model}} {{tier}}"),
                    Query(total(c.CAPACITY, "model"), "{{model}} may run at once"),
                ),
                "Tokens, for a language model.",
            ),
            Panel(
                "Wait in the queue",
                "s",
                quantiles(c.WAIT_SECONDS.exported, "model, tier", "{{model}} {{tier}}"),
            ),
            Panel(
                "Expected wait of a new record",
                "s",
                (Query(highest(c.WAIT_ESTIMATE, "model"), "{{model}}, longest queue"),),
                "The Retry-After of a 429.",
            ),
            Panel("Run time", "s", quantiles(c.RUN_SECONDS.exported, "model", "{{model}}")),
            Panel(
                "Outside the batcher",
                "short",
                (
                    Query(total(c.QUEUE_OUTSIDE, "model"), "{{model}}: callers waiting for the queue"),
                    Query(
                        f"sum by (deployment) (ray_serve_deployment_queued_queries{{{SERVE}}})",
                        "{{deployment}}: waiting for a replica",
                    ),
                ),
                "Waiting for a replica: there is none yet, or Serve's own limit is reached.",
            ),
            Panel(
                "Goal for the first token",
                "s",
                (
                    Query(highest(c.FIRST_TOKEN_EXPECTED, "model"), "{{model}} expected"),
                    Query(highest(c.FIRST_TOKEN_GOAL, "model"), "{{model}} goal"),
                ),
                "With `batcher.goals`: time to first token of 99 of 100 requests that are not flex.",
            ),
            Panel(
                "Batch work beside live traffic",
                "short",
                (
                    Query(total(c.BACKGROUND_RECORDS, "model"), "{{model}}"),
                    Query(total(c.BACKGROUND_LIMIT, "model"), "{{model}} at most"),
                ),
                "Records of flex that run, and their limit.",
            ),
        ),
    ),
    (
        "Who uses it?",
        (
            Panel(
                "Tokens in by tenant",
                "short",
                (
                    Query(
                        f"topk(10, {rate(c.USAGE_TOKENS, 'model, tenant', PROMPT + HERE)})",
                        "{{model}} {{tenant}}",
                    ),
                ),
                "As the engine counts them, with those from its cache: the rows of `saturate usage`.",
            ),
            Panel(
                "Tokens out by tenant",
                "short",
                (
                    Query(
                        f"topk(10, {rate(c.USAGE_TOKENS, 'model, tenant', OUTPUT + HERE)})",
                        "{{model}} {{tenant}}",
                    ),
                ),
                "As they are made, also those that no client gets.",
            ),
            Panel(
                "Share of prompt tokens from the cache, by tenant",
                "percentunit",
                (
                    Query(
                        f"topk(10, {rate(c.USAGE_TOKENS, 'model, tenant', CACHED + HERE)} / "
                        f"{rate(c.USAGE_TOKENS, 'model, tenant', PROMPT + HERE)})",
                        "{{model}} {{tenant}}",
                    ),
                ),
                "",
                1,
            ),
            Panel(
                "Cost per second by tenant",
                "short",
                (Query(f"topk(10, {rate(c.TENANT_COST, 'model, tenant')})", "{{model}} {{tenant}}"),),
                "Tokens in and out, for a language model. 'other': all tenants beyond the first twenty.",
            ),
            Panel(
                "Records per second by tenant",
                "short",
                (Query(f"topk(10, {rate(c.TENANT_RECORDS, 'model, tenant')})", "{{model}} {{tenant}}"),),
            ),
            Panel(
                "Mean wait by tenant",
                "s",
                (
                    Query(
                        f"topk(10, {rate(c.TENANT_WAIT, 'model, tenant')} / "
                        f"{rate(c.TENANT_RECORDS, 'model, tenant')})",
                        "{{model}} {{tenant}}",
                    ),
                ),
                "A tenant that asks for more than its share waits longer; the others should not.",
            ),
            Panel(
                "Use of quotas",
                "percentunit",
                (
                    Query(
                        f"topk(10, {highest(c.QUOTA_USED, 'subject, limit', SERVE)})", "{{subject}} {{limit}}"
                    ),
                ),
                "Share of each limit that is used or reserved in its current window, in UTC.",
                1.0,
            ),
            Panel(
                "Models that are awake on a shared device",
                "short",
                (Query(total(c.AWAKE, "group, model"), "{{group}} {{model}}"),),
                "Models with the same group take turns.",
            ),
            Panel(
                "Time of shared devices that switches take",
                "percentunit",
                (Query(rate(c.SWITCHING, "group"), "{{group}}"),),
                "Share of the time, with one device in a group. Longer turns (min_turn_s) make it less.",
            ),
            Panel(
                "Turns per minute",
                "short",
                (Query(f"60 * {rate(c.TURNS_BEGUN, 'group, model')}", "{{group}} {{model}}"),),
            ),
            Panel(
                "Rows of datasets per second",
                "short",
                (
                    Query(rate(c.DRIVER_ROWS, "model, outcome", MODEL), "{{model}} {{outcome}}"),
                    Query(rate(c.DRIVER_RETRIES, "model", MODEL), "{{model}} calls sent again"),
                ),
                "Drivers that use the handle. A driver that uses HTTP shows its rate where it runs.",
            ),
            Panel(
                "Tokens of datasets per second",
                "short",
                (Query(rate(c.DRIVER_TOKENS, "model", MODEL), "{{model}}"),),
                "The same drivers: prompts and results.",
            ),
            Panel(
                "Calls of drivers in flight",
                "short",
                (Query(total(c.DRIVER_CALLS, "model", MODEL), "{{model}}"),),
                "With `--max-concurrency auto` it follows the service.",
            ),
        ),
    ),
    (
        "How do batches go?",
        (
            Panel(
                "Rows of open batches",
                "short",
                (Query(f"sum by (state) ({c.BATCHES_ROWS.exported}{{{SERVE}}})", "{{state}}"),),
                "Rows of /v1/batches that have no result yet.",
            ),
            Panel(
                "Rows per second",
                "short",
                (
                    Query(
                        f"sum by (outcome) (rate({c.BATCHES_ROWS_ENDED.exported}{{{SERVE}}}"
                        "[$__rate_interval]))",
                        "{{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Time left and age of the oldest batch",
                "s",
                (
                    Query(f"max({c.BATCHES_LEFT.exported}{{{SERVE}}})", "left"),
                    Query(f"max({c.BATCHES_OLDEST.exported}{{{SERVE}}})", "oldest"),
                ),
                "Left: at the rate so far; 0 also where the rate is not known yet.",
            ),
            Panel(
                "Open batches",
                "short",
                (
                    Query(f"sum by (state) ({c.BATCHES_OPEN.exported}{{{SERVE}}})", "{{state}}"),
                    Query(f"sum({c.BATCHES_LATE.exported}{{{SERVE}}})", "will be late"),
                ),
                "Late: they will not end within their completion_window at the rate so far.",
            ),
            Panel(
                "Stored files",
                "bytes",
                (Query(f"max({c.BATCHES_BYTES.exported}{{{SERVE}}})", "files"),),
            ),
        ),
    ),
    (
        "Is anything failing?",
        (
            Panel(
                "Usage ledger",
                "short",
                (
                    Query(rate(c.USAGE_ROWS, "model"), "{{model}} rows per second"),
                    Query(rate(c.USAGE_DROPPED, "model"), "{{model}} dropped per second"),
                    Query(highest(c.USAGE_BEHIND, "model"), "{{model}} seconds behind"),
                ),
                "Empty without `usage.ledger`. Dropped: they could not be written for too long.",
            ),
            Panel(
                "Errors by status",
                "reqps",
                (Query(rate(c.REQUESTS, "model, code", 'outcome!="ok", ' + HERE), "{{model}} {{code}}"),),
                "200: a stream that broke. 0: the client received no status.",
            ),
            Panel(
                "Records without a result",
                "short",
                (
                    Query(
                        rate(c.RECORDS_ENDED, "model, outcome", 'outcome!="completed", ' + HERE),
                        "{{model}} {{outcome}}",
                    ),
                ),
            ),
            Panel(
                "Replicas",
                "short",
                (
                    Query(
                        f"sum by (deployment) (ray_serve_autoscaling_target_replicas{{{SERVE}}})",
                        "{{deployment}} wanted",
                    ),
                    Query(
                        f"count by (deployment) (ray_serve_replica_processing_queries{{{SERVE}}})",
                        "{{deployment}} running",
                    ),
                ),
            ),
            Panel(
                "Pending nodes",
                "short",
                (Query("sum by (NodeType) (autoscaler_pending_nodes)", "{{NodeType}}"),),
            ),
            Panel(
                "Host memory of the nodes",
                "percentunit",
                (Query("max by (ip) (ray_node_mem_used / ray_node_mem_total)", "{{ip}}"),),
                "",
                1,
            ),
            Panel(
                "CPU of the nodes",
                "percent",
                (Query("max by (ip) (ray_node_cpu_utilization)", "{{ip}}"),),
                "",
                100,
            ),
        ),
    ),
    (
        "What does the engine say?",
        (
            Panel(
                "vLLM's sequences",
                "short",
                (
                    Query(
                        f"sum by (model_name) (ray_vllm_num_requests_running{{{VLLM}}})",
                        "{{model_name}} running",
                    ),
                    Query(
                        f"sum by (model_name) (ray_vllm_num_requests_waiting{{{VLLM}}})",
                        "{{model_name}} waiting",
                    ),
                ),
                "With policy guaranteed_no_evict, sequences wait here only for a moment.",
            ),
            Panel(
                "Time to first token in the engine",
                "s",
                quantiles("ray_vllm_time_to_first_token_seconds", "model_name", "{{model_name}}", VLLM),
                "All requests, from their start in the engine: without the queue and the path to it.",
            ),
            Panel(
                "Time per output token in the engine",
                "s",
                quantiles(
                    "ray_vllm_request_time_per_output_token_seconds", "model_name", "{{model_name}}", VLLM
                ),
            ),
            Panel(
                "Whole request in the engine",
                "s",
                quantiles("ray_vllm_e2e_request_latency_seconds", "model_name", "{{model_name}}", VLLM),
            ),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                (
                    Query(
                        f"{vllm('prefix_cache_hits')} / {vllm('prefix_cache_queries')}",
                        "{{model_name}}",
                    ),
                ),
                "",
                1,
            ),
            Panel(
                "Preemptions",
                "short",
                (
                    Query(
                        vllm("num_preemptions"),
                        "{{model_name}}",
                    ),
                ),
                "Work that was discarded for lack of KV cache. Empty until the first one.",
            ),
        ),
    ),
)
