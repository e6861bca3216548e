"""What stands before every request: who may ask, how often, how much; and the headers of every answer."""

import json
import math
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bier.web.limits import COSTS, Limits, RateLimit

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_FORM = 16_384  # bytes of a multipart form around the picture itself
_PAGE_POLICY = (
    "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
# The report is one file that carries its own styles and no script.
_REPORT_POLICY = (
    "default-src 'none'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """ASGI middleware.

    Args:
        hosts: names that the Host header may have; None allows any. A page elsewhere that points a name of its own at
            127.0.0.1 (DNS rebinding) is turned away by this.
        limits: bounds on size and rate.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, limits: Limits) -> None:
        self.app, self.hosts, self.limits = app, hosts, limits
        self.rate = RateLimit(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        guarded = _with_headers(scope, send)
        refused = self._refusal(scope, headers)
        if refused is not None:
            await _answer(guarded, *refused)
            return
        counted = _Counted(self.limits.upload_bytes, receive, guarded)
        await self.app(scope, counted.receive, counted.send)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str, str, dict[str, str]] | None:
        host = _host_name(headers.get("host", ""))
        if self.hosts is not None and host not in self.hosts:
            return 421, "wrong_host", f"This server does not answer for the host {host!r}.", {}
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return 403, "other_origin", "Other web sites may not use this server.", {}
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.upload_bytes + _FORM:
            return 413, "too_large", too_large(self.limits.upload_bytes), {"connection": "close"}
        cost = _cost(scope["method"], scope["path"])
        client = scope.get("client")
        wait = self.rate.wait(client[0] if client else "", cost) if cost else 0.0
        if wait:
            seconds = max(1, math.ceil(wait))
            return 429, "too_many", f"Too many requests; try again in {seconds} s.", {"retry-after": str(seconds)}
        return None


def too_large(most: int) -> str:
    return f"The picture must be at most {most / 2**20:g} MB."


def error_body(code: str, message: str) -> dict[str, dict[str, str]]:
    """The form of every error of the API."""
    return {"error": {"code": code, "message": message}}


def _cost(method: str, path: str) -> float:
    if not path.startswith("/api/"):
        return 0.0
    if method == "POST":
        return COSTS["upload"]
    if path.startswith("/api/image/"):
        return COSTS["image"]
    return COSTS["search"] if path == "/api/search" else COSTS["other"]


def _host_name(host: str) -> str:
    """`localhost:8000` -> `localhost`, `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _with_headers(scope: Scope, send: Send) -> Send:
    policy = _REPORT_POLICY if scope["path"].startswith("/report/") else _PAGE_POLICY

    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = policy
            headers.update(_HEADERS)
            headers.setdefault("cache-control", "no-cache")
        await send(message)

    return guarded


class _TooLargeError(Exception):
    """The body is longer than its headers let on."""


class _Counted:
    """Counts the body as it comes, for clients that do not say its length; past the limit the answer is 413."""

    def __init__(self, most: int, receive: Receive, send: Send) -> None:
        self._most, self._receive, self._send = most, receive, send
        self._bytes, self._over, self._answered = 0, False, False

    async def receive(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most + _FORM:
            self._over = True
            raise _TooLargeError
        return message

    async def send(self, message: Message) -> None:
        if not self._over:
            await self._send(message)
        elif not self._answered:  # whatever the application made of the error
            self._answered = True
            await _answer(self._send, 413, "too_large", too_large(self._most), {"connection": "close"})


async def _answer(send: Send, status: int, code: str, message: str, headers: dict[str, str]) -> None:
    body = json.dumps(error_body(code, message)).encode()
    plain = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    pairs = [(name.encode(), value.encode()) for name, value in plain.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
