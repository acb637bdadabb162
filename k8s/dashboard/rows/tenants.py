"""Row of the dashboard: Who uses it?"""

from k8s.dashboard.panel import Panel, Query, Row
from k8s.dashboard.promql import HERE, MODEL, SERVE, highest, rate, total
from serve_app.telemetry import catalogue as c

PROMPT, CACHED, OUTPUT = ('kind="prompt", ', 'kind="cached", ', 'kind="output", ')

ROW = Row(
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
            "As the engine counts them, with tokens from its cache: the rows of `saturate usage`.",
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
            "As they are made, also tokens that no client gets.",
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
            "A tenant that asks for more than its share waits longer; other tenants should not.",
        ),
        Panel(
            "Use of quotas",
            "percentunit",
            (Query(f"topk(10, {highest(c.QUOTA_USED, 'subject, limit', SERVE)})", "{{subject}} {{limit}}"),),
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
            "With `--concurrency auto` it follows the service.",
        ),
    ),
)
