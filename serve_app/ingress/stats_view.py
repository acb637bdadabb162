"""The part of the statistics that a caller may see."""

from serve_app.api.protocol import JSON
from serve_app.auth.middleware import Caller
from serve_app.quotas.messages import key_subject, tenant_subject


def own_part(stats: JSON, caller: Caller | None) -> JSON:
    """Return the statistics without the usage and the quotas of other keys and tenants.

    An administrator sees all, and so does a client of a service without keys.

    Args:
        stats: The body of `/stats`.
        caller: The caller; None: the service has no keys.
    """
    if caller is None or caller.key.admin:
        return stats
    key = caller.key
    for report in stats["models"].values():
        for replica in report["replicas"]:
            if usage := replica.get("usage"):
                usage["tenants"] = _only(usage["tenants"], {key.tenant})
    if limits := stats.get("quotas", {}).get("limits"):
        stats["quotas"]["limits"] = _only(limits, {key_subject(key.name), tenant_subject(key.tenant)})
    return stats


def _only(items: JSON, names: set[str]) -> JSON:
    return {name: item for name, item in items.items() if name in names}
