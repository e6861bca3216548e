"""Being asked to stop: Ctrl-C and SIGTERM end a run after the step it is in."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AT_ONCE = 1.0  # seconds; torchrun hands on a Ctrl-C that its processes have also got from the terminal


@contextmanager
def stop_requests() -> Iterator[list[float]]:
    """A list that Ctrl-C or SIGTERM fills with its time. One more, a second or more later, ends everything at once."""
    requests: list[float] = []

    def request(_: int, __: Any) -> None:
        now = time.monotonic()
        if requests and now - requests[0] > AT_ONCE:
            raise KeyboardInterrupt
        requests.append(now)

    try:
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where signals cannot be caught
        yield requests
        return
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
