"""Routes for administrators: those with a key that has `admin`."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.errors import RequestError
from serve_app.auth.middleware import Caller, KeyStore
from serve_app.ingress.usage_report import UsageReports

KEYS = "/v1/admin/keys"
USAGE = "/v1/admin/usage"


def routes(keys: KeyStore | None, reports: UsageReports) -> list[Route]:
    """Return the routes.

    Args:
        keys: The keys of the service; None: it asks for none, and has no administrator.
        reports: Reports on its usage ledger.
    """

    async def list_keys(request: Request) -> Response:
        check_admin(request)
        assert keys
        return JSONResponse({"object": "list", "data": keys.describe(), "has_more": False})

    async def report_usage(request: Request) -> Response:
        check_admin(request)
        text, media_type = await reports.make(request.query_params)
        return Response(text, media_type=media_type)

    return [Route(KEYS, list_keys), Route(USAGE, report_usage)]


def is_admin(request: Request) -> bool:
    """Return whether a request comes from an administrator."""
    caller: Caller | None = request.scope.get("caller")
    return caller is not None and caller.key.admin


def check_admin(request: Request) -> None:
    """Raise a RequestError if a request does not come from an administrator: 403.

    A service without keys has no administrator, so its clients get a 403 too.
    """
    if "caller" not in request.scope:
        message = "This service asks for no API keys, so it has no administrator; see `args.access`."
        raise RequestError(403, "permission_error", message)
    if not is_admin(request):
        message = "This API key is not one of an administrator, with `admin: true`."
        raise RequestError(403, "permission_error", message)
