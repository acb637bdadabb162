"""The Grafana dashboard, in the order in which a person asks.

python -m serve_app.telemetry.dashboard > k8s/components/observability/dashboard.json
"""

from dataclasses import dataclass

from serve_app.telemetry import catalogue as c
from serve_app.telemetry.catalogue import Metric

HERE = 'application=~"$application", model=~"$model"'
MODEL = 'model=~"$model"'
VLLM = 'model_name=~"$model"'
SERVE = 'application=~"$application"'


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, and what its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        title: What it answers.
        unit: Grafana's name of the unit.
        queries: What it shows.
        help: What to read from it.
        most: The end of its axis.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    most: float | None = None


def rate(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return the growth per second of a counter, added up over replicas."""
    return f"sum by ({by}) (rate({metric.exported}{{{labels}}}[$__rate_interval]))"


def total(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return a gauge, added up over replicas."""
    return f"sum by ({by}) ({metric.exported}{{{labels}}})"


def highest(metric: Metric, by: str, labels: str = HERE) -> str:
    """Return a gauge of the replica where it is highest."""
    return f"max by ({by}) ({metric.exported}{{{labels}}})"


def quantile(share: float, name: str, by: str, labels: str = HERE) -> str:
    """Return a quantile of a histogram. (Ray makes up its sum, so a mean of it would be wrong.)"""
    grown = f"sum by (le, {by}) (rate({name}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {grown})"


def quantiles(name: str, by: str, legend: str, labels: str = HERE) -> tuple[Query, ...]:
    """Return the median and the 95th percentile of a histogram."""
    return tuple(
        Query(quantile(share, name, by, labels), f"{legend} p{share * 100:.0f}") for share in (0.5, 0.95)
    )


def vllm(name: str) -> str:
    """Return the growth per second of one of vLLM's counters."""
    return f"sum by (model_name) (rate(ray_vllm_{name}_total{{{VLLM}}}[$__rate_interval]))"


GOOD = 'outcome="ok", '
COUNTED = 'outcome=~"ok|failed|rejected|expired", '
SHARE_GOOD = f"{rate(c.REQUESTS, 'model', GOOD + HERE)} / {rate(c.REQUESTS, 'model', COUNTED + HERE)}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Are users happy?",
        (
            Panel(
                "Requests by what became of them",
                "reqps",
                (Query(rate(c.REQUESTS, "model, outcome"), "{{model}} {{outcome}}"),),
                "rejected: 429, the queue is full. expired: 408, it waited as long as it would. refused: "
                "the client's mistake. cancelled: the client left.",
            ),
            Panel(
                "Share that got an answer",
                "percentunit",
                (
                    Query(
                        SHARE_GOOD,
                        "{{model}}",
                    ),
                ),
                "Without what clients broke off or asked wrongly.",
                1,
            ),
            Panel(
                "Time to first token",
                "s",
                quantiles(c.FIRST_TOKEN.exported, "model", "{{model}}"),
                "Streams, as the Ingress sees them.",
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
                "What the way to the engine adds",
                "s",
                quantiles(c.PATH_SECONDS.exported, "model", "{{model}}"),
                "Of an answered request, what was neither waiting in the batcher nor in the engine.",
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
                "Reserved is what the batcher has admitted. Much above what vLLM uses: answers are shorter "
                "than their max_tokens; see batcher.policy.",
                1,
            ),
            Panel(
                "Time in which anything runs",
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
                    Query(rate(c.OUTPUT_TOKENS, "model"), "{{model}} out, of what has ended"),
                    Query(
                        vllm("generation_tokens"),
                        "{{model_name}} out, as produced",
                    ),
                ),
            ),
            Panel(
                "GPUs",
                "percent",
                (Query("avg by (ip, GpuIndex) (ray_node_gpus_utilization)", "{{ip}} {{GpuIndex}}"),),
                "As Ray's agent reads it from the driver.",
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
        "What waits, and why?",
        (
            Panel(
                "Waiting, by tier",
                "short",
                (Query(total(c.QUEUE_RECORDS, "model, tier"), "{{model}} {{tier}}"),),
            ),
            Panel(
                "What it costs",
                "short",
                (
                    Query(total(c.QUEUE_COST, "model, tier"), "{{model}} {{tier}}"),
                    Query(total(c.CAPACITY, "model"), "{{model}} may run at once"),
                ),
                "Tokens, for an LLM. What waits, divided by what may run at once, is the rounds ahead.",
            ),
            Panel(
                "How long they waited",
                "s",
                quantiles(c.WAIT_SECONDS.exported, "model, tier", "{{model}} {{tier}}"),
            ),
            Panel(
                "How long who comes now would wait",
                "s",
                (Query(highest(c.WAIT_ESTIMATE, "model"), "{{model}}, longest queue"),),
                "What a 429 tells its client.",
            ),
            Panel("How long they ran", "s", quantiles(c.RUN_SECONDS.exported, "model", "{{model}}")),
            Panel(
                "Outside the batcher",
                "short",
                (
                    Query(total(c.QUEUE_OUTSIDE, "model"), "{{model}}: callers that wait for room"),
                    Query(
                        f"sum by (deployment) (ray_serve_deployment_queued_queries{{{SERVE}}})",
                        "{{deployment}}: waiting for a replica",
                    ),
                ),
                "Waiting for a replica: there is none yet, or Serve's own limit is met.",
            ),
            Panel(
                "Goal for the first token",
                "s",
                (
                    Query(highest(c.FIRST_TOKEN_EXPECTED, "model"), "{{model}} expected"),
                    Query(highest(c.FIRST_TOKEN_GOAL, "model"), "{{model}} goal"),
                ),
                "Where `batcher.goals` is set: what 99 of 100 requests that are not flex are to wait for it.",
            ),
            Panel(
                "Batch work beside it",
                "short",
                (
                    Query(total(c.BACKGROUND_RECORDS, "model"), "{{model}}"),
                    Query(total(c.BACKGROUND_LIMIT, "model"), "{{model}} at most"),
                ),
                "Records of flex that run, and how many the goal lets run.",
            ),
        ),
    ),
    (
        "Who is using it?",
        (
            Panel(
                "Cost per second by tenant",
                "short",
                (Query(f"topk(10, {rate(c.TENANT_COST, 'model, tenant')})", "{{model}} {{tenant}}"),),
                "Tokens, prompt and output, for an LLM. 'other' is all who use less than the first twenty.",
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
                "Who asks for more than a fair share waits longer; the others should not.",
            ),
            Panel(
                "Rows of datasets per second",
                "short",
                (
                    Query(rate(c.DRIVER_ROWS, "model, outcome", MODEL), "{{model}} {{outcome}}"),
                    Query(rate(c.DRIVER_RETRIES, "model", MODEL), "{{model}} calls sent again"),
                ),
                "Of drivers that go through the handle; one that goes over HTTP shows it where it runs.",
            ),
            Panel(
                "Tokens of datasets per second",
                "short",
                (Query(rate(c.DRIVER_TOKENS, "model", MODEL), "{{model}}"),),
                "Of the same drivers: prompts and results.",
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
        "Is anything failing?",
        (
            Panel(
                "Answers that are errors",
                "reqps",
                (Query(rate(c.REQUESTS, "model, code", 'outcome!="ok", ' + HERE), "{{model}} {{code}}"),),
                "200: a stream that broke off. 0: there was no answer any more.",
            ),
            Panel(
                "Records that got no result",
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
                        "{{deployment}} there",
                    ),
                ),
            ),
            Panel(
                "Nodes that are waited for",
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
                "With policy guaranteed_no_evict nothing waits here for long: the batcher lets in what fits.",
            ),
            Panel(
                "Time to first token in the engine",
                "s",
                quantiles("ray_vllm_time_to_first_token_seconds", "model_name", "{{model_name}}", VLLM),
                "All requests, from the engine's intake: without the batcher's queue and the way to it.",
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
                "Work that was thrown away for want of KV cache. Stays empty until the first one.",
            ),
        ),
    ),
)
