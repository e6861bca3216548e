"""Limits on requests (origin, size, rate), and the headers and errors of every response."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
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
    """Limits that keep one client from overloading the machine. Pixels are limited by `bier.images.MAX_PIXELS`.

    upload_bytes: the largest file that may be uploaded.
    results, shortlist: the most that one search returns and compares.
    browsed: the most images in one response of /api/browse.
    waiting: uploads that may wait for the model at one time; more are refused.
    uploads: pictures whose vectors are remembered, so that the page can return to them.
    rate, burst: points per second that a client gains, and the most it can accumulate; `COSTS` has the prices.
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
    """A token bucket per client, in memory, which Starlette does not have. Idle clients are forgotten first."""

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


LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FORM = 16_384  # bytes of a multipart form around the picture itself
_PAGE_POLICY = (
    "default-src 'self'; img-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
# The report is one file with its own styles and no script.
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
    """ASGI middleware: security headers, and limits on origin, size and rate.

    Written by hand because Starlette has no rate limit and no check of the origin (its CORSMiddleware only adds
    headers), and because its limit of the body answers in plain text, while the page shows the message of a JSON error.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits
        self.rate = RateLimit(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        guarded = _with_headers(scope, send)
        refused = self._refusal(scope, Headers(scope=scope))
        if refused is not None:
            await refused(scope, receive, guarded)
            return
        counted = _CountedBody(self.limits.upload_bytes, scope, receive, guarded)
        await self.app(scope, counted.receive, counted.send)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return error_response(403, "other_origin", "Other web sites may not use this server.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.upload_bytes + _FORM:
            return _too_large_response(self.limits.upload_bytes)
        cost = _cost(scope["method"], scope["path"])
        client = scope.get("client")
        wait = self.rate.wait(client[0] if client else "", cost) if cost else 0.0
        if not wait:
            return None
        seconds = max(1, math.ceil(wait))
        message = f"Too many requests; try again in {seconds} s."
        return error_response(429, "too_many", message, {"retry-after": str(seconds)})


def too_large(most: int) -> str:
    return f"The picture must be at most {most / 2**20:g} MB."


def error_response(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The form of every error of the API."""
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _too_large_response(most: int) -> JSONResponse:
    return error_response(413, "too_large", too_large(most), {"connection": "close"})


def _cost(method: str, path: str) -> float:
    if not path.startswith("/api/"):
        return 0.0
    if method == "POST":
        return COSTS["upload"]
    if path.startswith("/api/image/"):
        return COSTS["image"]
    return COSTS["search"] if path == "/api/search" else COSTS["other"]


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
    """The body is longer than the limit."""


class _CountedBody:
    """Counts the body as it arrives, for clients that do not send its length; past the limit the response is 413."""

    def __init__(self, most: int, scope: Scope, receive: Receive, send: Send) -> None:
        self._most, self._scope, self._receive, self._send = most, scope, receive, send
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
        elif not self._answered:  # whatever the application has made of the error
            self._answered = True
            await _too_large_response(self._most)(self._scope, self._receive, self._send)


class ApiError(Exception):
    """An error of the API: its HTTP status, a code for programs and a sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


def refused_picture(error: DataError) -> ApiError:
    """Why `open_image` refused a picture: by its own check (too many pixels), or because of an error of Pillow."""
    if error.__cause__ is None:
        return ApiError(413, "too_many_pixels", f"The picture must have at most {MAX_PIXELS / 1e6:.0f} megapixels.")
    if isinstance(error.__cause__, UnidentifiedImageError):
        return ApiError(415, "not_a_picture", "This is not a picture in a known format such as JPEG, PNG or WebP.")
    return ApiError(422, "broken_picture", "The picture is broken: it could not be read completely.")


def add_error_handlers(app: FastAPI) -> None:
    """Turn every exception into the JSON form of errors."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error.status, error.code, error.message)

    @app.exception_handler(BierError)
    async def unavailable(_: Request, error: BierError) -> JSONResponse:
        return error_response(503, "unavailable", " ".join(str(error).split()))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return error_response(422, "invalid", f"The '{first['loc'][-1]}' parameter is not valid: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, "http", str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return error_response(500, "internal", "An internal error. The server's terminal has the details.")
