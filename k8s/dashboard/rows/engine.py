"""Row of the dashboard: What does the engine say?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import VLLM, highest, quantiles, rate, vllm
from serve_app.telemetry.catalogue import ROWS_DISPLACED, ROWS_LEFT_OUT, STEP_BOUND, STEP_SECONDS

ROW = Row(
    "What does the engine say?",
    (
        Panel(
            "vLLM's sequences",
            "short",
            (
                Query(
                    f"sum by (model_name) (ray_vllm_num_requests_running{{{VLLM}}})", "{{model_name}} running"
                ),
                Query(
                    f"sum by (model_name) (ray_vllm_num_requests_waiting{{{VLLM}}})", "{{model_name}} waiting"
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
            quantiles("ray_vllm_request_time_per_output_token_seconds", "model_name", "{{model_name}}", VLLM),
        ),
        Panel(
            "Whole request in the engine",
            "s",
            quantiles("ray_vllm_e2e_request_latency_seconds", "model_name", "{{model_name}}", VLLM),
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (Query(f"{vllm('prefix_cache_hits')} / {vllm('prefix_cache_queries')}", "{{model_name}}"),),
            "",
            1,
        ),
        Panel(
            "Preemptions",
            "short",
            (Query(vllm("num_preemptions"), "{{model_name}}"),),
            "Work that was discarded for lack of KV cache. Empty until the first preemption.",
        ),
        Panel(
            "Bound of a step",
            "s",
            (Query(highest(STEP_BOUND, "model"), "{{model}}"),),
            "How long a step may take while live requests run beside rows; 0: rows run alone, or none.",
        ),
        Panel(
            "Rows that gave way",
            "short",
            (
                Query(rate(ROWS_LEFT_OUT, "model"), "{{model}} left out of a step"),
                Query(rate(ROWS_DISPLACED, "model"), "{{model}} preempted"),
            ),
            "For goals, and for places and blocks of live requests.",
        ),
        Panel(
            "Times of a step, as learned",
            "s",
            (Query(highest(STEP_SECONDS, "model, part"), "{{model}} {{part}}"),),
        ),
    ),
)
