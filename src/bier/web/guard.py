"""Limits on requests (host, origin, token, size, time, rate), and the headers and errors of every response."""

import hashlib
import ipaddress
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bier.errors import BierError

_MOST_CLIENTS = 10_000


@dataclass(frozen=True)
class Limits:
    """Limits that keep one client from overloading the machine.

    upload_bytes, upload_pixels: the largest file, and the largest picture in it, that may be uploaded.
    upload_seconds, upload_rate: a body must have arrived after so many seconds, and one more for each so many bytes.
    decode_seconds: a picture that takes more processor time to decode is refused.
    results: the most that one search returns.
    browsed: the most images in one response of /api/browse.
    waiting: uploads that may wait for the model at one time; more are refused.
    remembered: bytes of the vectors and thumbnails of uploads that are kept, so that the page can return to them.
    rate, burst: points per second that a client gains, and the most it can accumulate; `COSTS` has the prices.
    """

    upload_bytes: int = 20 * 2**20
    upload_pixels: int = 50_000_000
    upload_seconds: float = 20.0
    upload_rate: float = 32_768.0
    decode_seconds: float = 4.0
    results: int = 100
    browsed: int = 200
    waiting: int = 8
    remembered: int = 32 * 2**20
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


@dataclass(frozen=True)
class Access:
    """Who may use the server.

    hosts: the host names that a request may be addressed to, and with `any_address` every IP address too. This refuses
        a page elsewhere that points a name of its own at this machine (DNS rebinding).
    token: if given, a request must have it: as `Authorization: Bearer TOKEN`, or in the cookie that the page with
        `/?token=TOKEN` sets.
    """

    hosts: tuple[str, ...] = LOOPBACK
    any_address: bool = False
    token: str | None = None

    def admits_host(self, header: str) -> bool:
        matched = _HOST.fullmatch(header)
        if matched is None:
            return False
        name = (matched["v6"] or matched["name"]).lower()
        return name in {host.lower() for host in self.hosts} or (self.any_address and _is_address(name))

    @property
    def cookie(self) -> str:
        """The name of the cookie: one per token, because the servers of one machine share their cookies."""
        return f"bier-{hashlib.sha256((self.token or '').encode()).hexdigest()[:12]}"

    def admits(self, scope: Scope) -> bool:
        """Whether a request has the token."""
        connection = HTTPConnection(scope)
        scheme, _, value = connection.headers.get("authorization", "").partition(" ")
        given = (value.strip() if scheme.lower() == "bearer" else "", connection.cookies.get(self.cookie, ""))
        return self.token is None or any(self._equal(one) for one in given)

    def _equal(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(errors="replace"), (self.token or "").encode())

    def enter(self, scope: Scope) -> Response | None:
        """The response to `/?token=TOKEN`: a cookie, and the page at an address without the token."""
        given = HTTPConnection(scope).query_params.get("token")
        if given is None or scope["path"] != "/" or scope["method"] != "GET" or not self._equal(given):
            return None
        answer = RedirectResponse("./", 303)
        answer.set_cookie(self.cookie, given, httponly=True, samesite="strict")
        return answer


_HOST = re.compile(r"(\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:/@\[\]]+))(:[0-9]*)?")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
    """ASGI middleware: security headers, and limits on host, origin, token, size, time and rate.

    Written by hand because Starlette has no rate limit, no token and no check of the origin (its CORSMiddleware only
    adds headers); its TrustedHostMiddleware cannot admit every address but no foreign name, and its errors and those of
    its limit of the body are plain text, while the page shows the message of a JSON error.
    """

    def __init__(self, app: ASGIApp, limits: Limits, access: Access) -> None:
        self.app, self.limits, self.access = app, limits, access
        self.rate = RateLimit(limits.rate, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _GuardedAnswer(scope, send)
        try:
            refused = self._refusal(scope, Headers(scope=scope))
            if refused is not None:
                await refused(scope, receive, answer.send)
                return
            limited = _LimitedBody(self.limits, scope, receive, answer.send)
            await self.app(scope, limited.receive, limited.send)
        except Exception:
            # Here, because Starlette's own answer to an exception would come without the headers.
            if not answer.started:
                message = "An internal error. The server's terminal has the details."
                await error_response(500, "internal", message)(scope, receive, answer.send)
            raise  # uvicorn writes it to the terminal

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.access.admits_host(host):
            message = "This server does not answer to that host name; bier serve --allow-host adds one."
            return error_response(400, "other_host", message)
        if origin is not None and origin.partition("://")[2] != host:
            return error_response(403, "other_origin", "Other web sites may not use this server.")
        admitted = self.access.admits(scope)
        cost = _cost(scope["method"], scope["path"]) if admitted else COSTS["search"]
        client = scope.get("client")
        wait = self.rate.wait(client[0] if client else "", cost) if cost else 0.0
        if wait:
            seconds = max(1, math.ceil(wait))
            message = f"Too many requests; try again in {seconds} s."
            return error_response(429, "too_many", message, {"retry-after": str(seconds)})
        if not admitted:
            return self.access.enter(scope) or _no_token(scope["path"])
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > self.limits.upload_bytes + _FORM:
            return _too_large_response(self.limits.upload_bytes)
        return None


def too_large(most: int) -> str:
    return f"The picture must be at most {most / 2**20:g} MB."


def error_response(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The form of every error of the API."""
    return JSONResponse({"error": {"code": code, "message": message}}, status, headers)


def _too_large_response(most: int) -> JSONResponse:
    return error_response(413, "too_large", too_large(most), {"connection": "close"})


def _no_token(path: str) -> Response:
    message = "This server asks for a token: open the address that `bier serve` printed when it started."
    headers = {"www-authenticate": "Bearer"}
    return PlainTextResponse(message, 401, headers) if path == "/" else error_response(401, "token", message, headers)


def _cost(method: str, path: str) -> float:
    if not path.startswith("/api/"):
        return 0.0
    if method == "POST":
        return COSTS["upload"]
    if path.startswith("/api/image/"):
        return COSTS["image"]
    return COSTS["search"] if path == "/api/search" else COSTS["other"]


class _GuardedAnswer:
    """Adds the security headers to a response, and knows whether it has been started."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._policy = _REPORT_POLICY if scope["path"].startswith("/report/") else _PAGE_POLICY
        self._send, self.started = send, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            headers["content-security-policy"] = self._policy
            headers.update(_HEADERS)
            headers.setdefault("cache-control", "no-cache")
        await self._send(message)


class _RefusedBodyError(Exception):
    """The body is too long, or comes too slowly."""


class _LimitedBody:
    """Counts the body and the time as it arrives, for clients that do not say its length or send it slowly.

    Past a limit the response is 413 or 408, whatever the application has made of the error.
    """

    def __init__(self, limits: Limits, scope: Scope, receive: Receive, send: Send) -> None:
        self._limits, self._scope, self._receive, self._send = limits, scope, receive, send
        self._bytes, self._complete, self._answered = 0, False, False
        self._started = time.monotonic()
        self._refusal: JSONResponse | None = None

    async def receive(self) -> Message:
        if self._complete:  # what follows is that the client has gone, which may take as long as it likes
            return await self._receive()
        until = self._started + self._limits.upload_seconds + self._bytes / self._limits.upload_rate
        with anyio.move_on_after(until - time.monotonic()) as waiting:
            message = await self._receive()
        if waiting.cancelled_caught:
            self._refusal = error_response(408, "too_slow", "The upload took too long.", {"connection": "close"})
            raise _RefusedBodyError
        self._bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._bytes > self._limits.upload_bytes + _FORM:
            self._refusal = _too_large_response(self._limits.upload_bytes)
            raise _RefusedBodyError
        return message

    async def send(self, message: Message) -> None:
        if self._refusal is None:
            await self._send(message)
        elif not self._answered:
            self._answered = True
            await self._refusal(self._scope, self._receive, self._send)


class ApiError(Exception):
    """An error of the API: its HTTP status, a code for programs and a sentence for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


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
