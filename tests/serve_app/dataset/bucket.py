"""Fake object storage: the parts of S3, and of Google's JSON API, that reading needs."""

import contextlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fakes.service import running


@contextlib.contextmanager
def bucket(name: str, objects: dict[str, bytes]) -> Iterator[str]:
    """Run a bucket; yield the query that its URIs need."""

    async def get(request: Request) -> Response:
        path = request.path_params["path"].removeprefix(name).strip("/")
        if not path:
            prefix = request.query_params.get("prefix", "")
            keys = [key for key in sorted(objects) if key.startswith(prefix)]
            found = f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>" + "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size></Contents>"
                for key in keys
            )
            listing = f"<ListBucketResult>{found}</ListBucketResult>"
            return Response(listing, media_type="application/xml")
        if path not in objects:
            return Response(status_code=404)
        return _content(request, objects[path])

    app = Starlette(routes=[Route("/{path:path}", get, methods=["GET", "HEAD"])])
    with running(app) as url:
        yield f"?endpoint_override={url.removeprefix('http://')}&scheme=http&region=us-east-1"


@contextlib.contextmanager
def google_bucket(name: str, objects: dict[str, bytes]) -> Iterator[str]:
    """Run a bucket; yield the query that its URIs need."""

    def described(key: str) -> dict[str, str]:
        return {
            "kind": "storage#object",
            "bucket": name,
            "name": key,
            "size": str(len(objects[key])),
            "generation": "1",
            "updated": "2025-11-01T00:00:00.000Z",
        }

    async def get(request: Request) -> Response:
        key = request.path_params["key"]
        if key not in objects:
            return JSONResponse({"error": {"code": 404, "message": "no such object"}}, 404)
        if request.query_params.get("alt") == "media":
            return _content(request, objects[key])
        return JSONResponse(described(key))

    async def listing(request: Request) -> Response:
        prefix = request.query_params.get("prefix", "")
        found = [described(key) for key in sorted(objects) if key.startswith(prefix)]
        return JSONResponse({"kind": "storage#objects", "items": found})

    objects_at = f"/storage/v1/b/{name}/o"
    app = Starlette(routes=[Route(objects_at, listing), Route(objects_at + "/{key:path}", get)])
    with running(app) as url:
        yield f"?endpoint_override={url.removeprefix('http://')}&scheme=http"


def _content(request: Request, body: bytes) -> Response:
    """Return an object, or the range of it that is asked for."""
    headers = {"content-length": str(len(body)), "last-modified": "Sat, 01 Nov 2025 00:00:00 GMT"}
    if request.method == "HEAD":
        return Response(headers=headers)
    if wanted := request.headers.get("range"):
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        last = min(int(end), len(body) - 1) if end else len(body) - 1
        found = {"content-range": f"bytes {start}-{last}/{len(body)}"}
        return Response(body[int(start) : last + 1], 206, found)
    return Response(body, headers=headers)
