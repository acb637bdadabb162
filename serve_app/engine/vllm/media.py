"""Images, videos and sound that a request names by URL: fetched from allowed hosts on the Internet only."""

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from urllib3.util import parse_url
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from yarl import URL

from serve_app.engine.vllm.seams import HTTPConnection

METADATA = {"168.63.129.16", "192.0.0.192"}
"""Addresses at which clouds serve metadata to their machines, beside those of private ranges."""

NAT64 = ipaddress.ip_network("64:ff9b::/96")
UNICAST6 = ipaddress.ip_network("2000::/3")
"""The addresses of IPv6 that are given to machines on the Internet."""


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet, whatever IPv6 form it is written in."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        if inner:
            return is_public(str(inner))
        if ip not in UNICAST6:
            return False
    return ip.is_global and not ip.is_multicast and str(ip) not in METADATA


class PublicResolver(AbstractResolver):
    """A resolver of host names that refuses a name with any address that isn't public.

    The connection goes to the addresses that were checked: nothing resolves the name again.

    Args:
        resolver: Asked for the addresses.
        allowed: Tells whether an address may be connected to.
    """

    def __init__(self, resolver: AbstractResolver, allowed: Callable[[str], bool]) -> None:
        self._resolver = resolver
        self._allowed = allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises:
            VLLMValidationError: One of them is not public.
        """
        found = await self._resolver.resolve(host, port, family)
        if not all(self._allowed(each["host"]) for each in found):
            raise VLLMValidationError(f"media URLs: the host {host!r} is not on the public Internet")
        return found

    async def close(self) -> None:
        """Close the resolver."""
        await self._resolver.close()


class PublicConnection(HTTPConnection):  # type: ignore[misc]
    """Fetches from public addresses, follows no redirect and uses no proxy of the environment.

    Args:
        resolver: Makes the resolver of host names; None: that of the system.
        allowed: Tells whether an address may be connected to.
    """

    def __init__(
        self,
        resolver: Callable[[], AbstractResolver] = aiohttp.DefaultResolver,
        allowed: Callable[[str], bool] = is_public,
    ) -> None:
        super().__init__()
        self._session: aiohttp.ClientSession | None = None
        self._resolver = resolver
        self._allowed = allowed

    async def get_async_client(self) -> aiohttp.ClientSession:
        """Return the session of all fetches."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=PublicResolver(self._resolver(), self._allowed)),
                cookie_jar=aiohttp.DummyCookieJar(),
                raise_for_status=_check_status,
                trust_env=False,
            )
        return self._session

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        """Return what a URL holds.

        Raises:
            VLLMValidationError: Its host is not on the public Internet, or it redirects.
        """
        host = URL(url).host or ""
        # Addresses don't pass the resolver.
        if _is_address(host) and not self._allowed(host):
            raise VLLMValidationError(f"media URLs: {host} is not on the public Internet")
        content: bytes = await super().async_get_bytes(url, **options | {"allow_redirects": False})
        return content

    def get_bytes(self, url: str, **options: Any) -> bytes:
        """Refuse: vLLM fetches without the event loop on few routes, where nothing here could check."""
        raise VLLMValidationError("media URLs are not fetched on this route; send the content as a data: URL")


class AllowedHostsConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's reader of media, with no host allowed unless `allowed_media_domains` names it.

    vLLM's own allows every host then, follows redirects, and fetches from private addresses.
    """

    def __init__(
        self,
        media_io_kwargs: dict[str, dict[str, Any]] | None = None,
        connection: HTTPConnection | None = None,
        **options: Any,
    ) -> None:
        super().__init__(media_io_kwargs, connection or _connection, **options)

    def load_from_url(self, url: str, media_io: Any, **options: Any) -> Any:
        """Return the media of a URL; see `check`."""
        self.check(url)
        return super().load_from_url(url, media_io, **options)

    async def load_from_url_async(self, url: str, media_io: Any, **options: Any) -> Any:
        """Return the media of a URL; see `check`."""
        self.check(url)
        return await super().load_from_url_async(url, media_io, **options)

    def check(self, url: str) -> None:
        """Raise a VLLMValidationError if a URL may not be read, with the name of the setting."""
        if url[:5].lower() == "data:":
            return
        spec = parse_url(url)
        if spec.scheme == "file":
            if self.allowed_local_media_path is None:
                raise VLLMValidationError("media URLs: files are not read here; send a data: URL")
            return
        if not self.allowed_media_domains:
            message = (
                "media URLs are not fetched here, since engine.allowed_media_domains names no host; "
                "send the content as a data: URL"
            )
            raise VLLMValidationError(message)
        # The host that is connected to is the one that this parser finds.
        host = URL(spec.url).host
        if host not in self.allowed_media_domains:
            raise VLLMValidationError(f"media URLs: {host!r} is not in engine.allowed_media_domains")


def use_allowed_hosts() -> None:
    """Have vLLM read media through `AllowedHostsConnector`."""
    MEDIA_CONNECTOR_REGISTRY.register("http")(AllowedHostsConnector)


async def _check_status(response: aiohttp.ClientResponse) -> None:
    if 300 <= response.status < 400:
        raise VLLMValidationError("media URLs: this one redirects, which is not followed; send its target")
    response.raise_for_status()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


_connection = PublicConnection()
