"""Routes for administrators: those with a key that has `admin`."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from serve_app.api.errors import RequestError
from serve_app.auth.middleware import Caller, KeyStore

KEYS = "/v1/admin/keys"


def routes(keys: KeyStore | None) -> list[Route]:
    """Return the routes.

    Args:
        keys: The keys of the service; None: it asks for none, and has no administrator.
    """

    async def list_keys(request: Request) -> Response:
        check_admin(request)
        assert keys
        return JSONResponse({"object": "list", "data": keys.describe(), "has_more": False})

    return [Route(KEYS, list_keys)]


def check_admin(request: Request) -> None:
    """Raise a RequestError if a request does not come from an administrator: 403.

    A service without keys has no administrator, so its clients get a 403 too.
    """
    caller: Caller | None = request.scope.get("caller")
    if caller is None:
        message = "This service asks for no API keys, so it has no administrator; see `args.access`."
        raise RequestError(403, "permission_error", message)
    if not caller.key.admin:
        message = "This API key is not one of an administrator, with `admin: true`."
        raise RequestError(403, "permission_error", message)
