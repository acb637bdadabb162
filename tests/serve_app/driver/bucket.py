"""Object storage that speaks as much of S3 as reading needs."""

import contextlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.serve_app.driver.fake import running


@contextlib.contextmanager
def bucket(name: str, objects: dict[str, bytes]) -> Iterator[str]:
    """Run a bucket, and give what has to stand behind a URI of it."""

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
        body = objects[path]
        headers = {"content-length": str(len(body)), "last-modified": "Sat, 01 Nov 2025 00:00:00 GMT"}
        if request.method == "HEAD":
            return Response(headers=headers)
        if wanted := request.headers.get("range"):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            last = min(int(end), len(body) - 1) if end else len(body) - 1
            return Response(
                body[int(start) : last + 1],
                206,
                {"content-range": f"bytes {start}-{last}/{len(body)}"},
            )
        return Response(body, headers=headers)

    app = Starlette(routes=[Route("/{path:path}", get, methods=["GET", "HEAD"])])
    with running(app) as port:
        yield f"?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
