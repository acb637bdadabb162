"""Row of the dashboard: Is the GPU full?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import HERE, VLLM, quantiles, rate, total, vllm
from serve_app.telemetry import catalogue as c

ROW = Row(
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
            (Query(f"avg by (model) (rate({c.BUSY.exported}{{{HERE}}}[$__rate_interval]))", "{{model}}"),),
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
                Query(vllm("generation_tokens"), "{{model_name}} out, when produced"),
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
)
