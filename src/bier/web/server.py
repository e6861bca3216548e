"""The HTTP server: uvicorn, with the deadlines and the limit of connections that it does not have.

uvicorn's own options close a connection that is idle after a response (`timeout_keep_alive`) and answer 503 above a
number of connections (`limit_concurrency`). A client that never finishes the head of a request keeps its connection
for ever, and with as many of these as the process may open files, nobody is answered.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar

import uvicorn
from fastapi import FastAPI
from h11 import ProtocolError
from uvicorn.protocols.http.h11_impl import H11Protocol

from bier.web.guard import RateLimit

HEAD_SECONDS = 10.0  # for the head of a request, and for a client to read on where a response waits for it
_MOST_CONNECTIONS = 512
_BACKLOG = 64  # asyncio accepts so many connections in one go, before any of them can be closed
_LINES = 20  # of the log per minute
_SHUTDOWN = 3  # seconds that running requests get when the server is stopped


class Server(uvicorn.Server):
    """Warms the app up before it accepts connections. An error of it leaves `run`, where uvicorn would log it."""

    def __init__(self, config: uvicorn.Config, warm_up: Callable[[], Awaitable[None]], ready: Callable[[], None]):
        super().__init__(config)
        self._warm_up, self._ready = warm_up, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._warm_up()
        await super().startup(sockets)
        if self.started:
            self._ready()


def create_server(
    app: FastAPI,
    connections: int | None = None,
    head_seconds: float = HEAD_SECONDS,
    ready: Callable[[], None] = lambda: None,
) -> Server:
    """A server for an app of `create_app`; `ready` is called when it answers.

    It holds at most so many connections, by default as many as its files allow.
    """
    most = _connection_limit() if connections is None else connections

    class Protocol(BoundedProtocol):
        most_connections, seconds = most, head_seconds

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_level="error",  # uvicorn warns of each request that is not HTTP, which lets anyone fill the disk
        access_log=False,
        server_header=False,
        proxy_headers=False,  # otherwise a client could give any address and evade the rate limit
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_SHUTDOWN,
    )
    logging.getLogger("uvicorn.error").addFilter(ShortLog())
    return Server(config, app.state.warm_up, ready)


class ShortLog(logging.Filter):
    """Keeps what anyone who can connect could write to the log short, so that nobody fills the disk with it.

    Requests that are no proper HTTP leave nothing. A traceback is written once for the line that has raised; after
    that, an error is one line, and there are at most so many lines per minute.
    """

    def __init__(self, lines: int = _LINES) -> None:
        super().__init__()
        self._rate, self._seen = RateLimit(lines / 60, lines), set[tuple[str, int]]()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, ProtocolError) or self._rate.wait("", 1.0):
            return False
        if error is not None:
            last = error.__traceback__
            while last is not None and last.tb_next is not None:
                last = last.tb_next
            place = ("", 0) if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
            if place in self._seen:
                text = " ".join(f"{record.getMessage()}: {type(error).__name__}: {error}".split())[:300]
                record.msg, record.args, record.exc_info, record.exc_text = text, (), None, None
            self._seen.add(place)
        return True


def _connection_limit() -> int:
    """Half of the files that the process may open; the others are for the index, for uploads and for the backlog."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 4 * _MOST_CONNECTIONS
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft != resource.RLIM_INFINITY:
            return max(8, min(_MOST_CONNECTIONS, (soft - _BACKLOG) // 2))
    return _MOST_CONNECTIONS


class BoundedProtocol(H11Protocol):
    """A connection that is closed when its client does not send or read for too long.

    Above `most_connections`, the one that has kept the server waiting for the longest time is closed: a browser sends
    its request at once, so clients that hold connections without using them lose theirs first.
    """

    most_connections: ClassVar[int] = _MOST_CONNECTIONS
    seconds: ClassVar[float] = HEAD_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._start_timer()
        if len(self.connections) > self.most_connections:
            idle = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one.has_request]
            oldest = min(idle, key=lambda one: one._since)
            self.connections.discard(oldest)
            oldest.transport.abort()

    @property
    def has_request(self) -> bool:
        """Whether a request has come completely and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stop_timer_at_work()

    def _stop_timer_at_work(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()  # the guard of the app limits the time of a body

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        self._start_timer()
        super().on_response_complete()
        self._stop_timer_at_work()  # the next request may be there already

    def pause_writing(self) -> None:
        self._start_timer()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop_timer_at_work()
        super().resume_writing()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.seconds, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
