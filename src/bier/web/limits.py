"""What one client may ask of the server, and how often."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

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
