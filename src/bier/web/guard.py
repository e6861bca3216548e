"""What stands before every request: who may ask, how often, how much; the headers and the errors of every answer."""

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from PIL import UnidentifiedImageError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bier.errors import BierError, DataError
from bier.images.decode import MAX_PIXELS

_MOST_CLIENTS = 10_000


@dataclass(frozen=True)
class Limits:
    """Bounds that keep one visitor from using up the machine. Pixels are bounded by `bier.images.MAX_PIXELS`.

    upload_bytes: the largest picture that is taken, as a file.
    results, shortlist: the most that one search returns and looks at.
    browsed: the most images that one page of the catalogue holds.
    waiting: uploads that may wait for the model at one time; more are turned away.
    uploads: pictures whose vectors are remembered, so that the page can go back to them.
    rate, burst: points a second that a client earns and the most it can save up; `COSTS` has the prices.
    """

    upload_bytes: int = 20 * 2**20
    results: int = 100
    shortlist: int = 10_000
    browsed: int = 200
    waiting: int = 8
    uploads: int = 256
    rate: float = 20.0
    burst: float = 120.0


COSTS = {"image": 0.1, "search": 1.0, "upload": 4.0, "other": 0.25}


class RateLimit:
    """A token bucket a client, in memory. The clients that were silent longest are forgotten first."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self.burst, self._clock = rate, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait(self, client: str, cost: float) -> float:
        """Take `cost` points of the client; 0 if it had them, else the seconds until it will."""
        now = self._clock()
        points, seen = self._buckets.pop(client, (self.burst, now))
        points = min(self.burst, points + (now - seen) * self.rate)
        enough = points >= cost
        self._buckets[client] = (points - cost if enough else points, now)
        if len(self._buckets) > _MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return 0.0 if enough else (cost - points) / self.rate


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


class Problem(Exception):  # noqa: N818 - it is an answer, not a failure of ours
    """An answer other than the one that was hoped for."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def refused_picture(error: DataError) -> Problem:
    """Why `open_image` refused, told by what made it: nothing but itself (too many pixels), or Pillow's complaint."""
    if error.__cause__ is None:
        return Problem(413, "too_many_pixels", f"The picture must have at most {MAX_PIXELS / 1e6:.0f} megapixels.")
    if isinstance(error.__cause__, UnidentifiedImageError):
        return Problem(415, "not_a_picture", "This is not a picture in a known format such as JPEG, PNG or WebP.")
    return Problem(422, "broken_picture", "The picture is broken: it could not be read to its end.")


def add_errors(app: FastAPI) -> None:
    def answer(status: int, code: str, message: str) -> JSONResponse:
        return JSONResponse(error_body(code, message), status)

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return answer(error.status, error.code, error.message)

    @app.exception_handler(BierError)
    async def unavailable(_: Request, error: BierError) -> JSONResponse:
        return answer(503, "unavailable", " ".join(str(error).split()))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return answer(422, "invalid", f"The '{first['loc'][-1]}' parameter is not right: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, "http", str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return answer(500, "internal", "Something went wrong here. The server's terminal says what.")
