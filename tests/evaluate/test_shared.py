"""Processes share the comparison of a test set and get the numbers of one process. Threads stand for processes here;
tests/training/test_distributed.py evaluates under torchrun.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bier import distributed
from bier.evaluate import recall, verification
from bier.evaluate.ensemble import evaluate_ensemble

WORLD = 2


class Threads:
    """Stands for the process group of `distributed`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank = threading.local()
        self.barrier = threading.Barrier(WORLD, timeout=60)
        self.given: dict[int, torch.Tensor] = {}
        self.shares: list[int] = []
        patch.setattr(distributed, "world", lambda: WORLD if hasattr(self.rank, "number") else 1)
        patch.setattr(distributed, "rank", lambda: getattr(self.rank, "number", 0))
        patch.setattr(distributed, "sum_shares", lambda values, shared: self.reduce(values, torch.add, shared))
        patch.setattr(
            distributed, "highest_of_shares", lambda values, shared: self.reduce(values, torch.maximum, shared)
        )
        whole = distributed.share

        def share(items: Any, shared: bool) -> Any:
            mine = whole(items, shared)
            if shared:
                assert 0 < len(mine) < len(items)
                self.shares.append(len(mine))
            return mine

        patch.setattr(distributed, "share", share)

    def reduce(self, values: torch.Tensor, how: Callable[..., torch.Tensor], shared: bool) -> None:
        if not shared:
            return
        self.given[self.rank.number] = values.clone()
        self.barrier.wait()
        values.copy_(how(self.given[0], self.given[1]))
        self.barrier.wait()

    def run(self, task: Callable[[], Any]) -> list[Any]:
        def as_process(number: int) -> Any:
            self.rank.number = number
            return task()

        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(as_process, range(WORLD)))


@pytest.mark.parametrize("with_gallery", [False, True])
def test_shares_add_up(monkeypatch: pytest.MonkeyPatch, with_gallery: bool) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 40, 1_700)
    z = (random.normal(size=(40, 12))[labels] + random.normal(size=(1_700, 12))).astype(np.float32)
    options: dict[str, Any] = {"threshold": 0.5}
    if with_gallery:
        options |= {"gallery": z[900:], "gallery_labels": labels[900:]}
        z, labels = z[:900], labels[:900]
    monkeypatch.setattr(recall, "BLOCK", 200_000)
    monkeypatch.setattr(verification, "TILE", 500)
    alone = evaluate_ensemble(z, (4, 8), labels, (1, 10), **options)
    threads = Threads(monkeypatch)
    expected = {key: value for key, value in alone.to_dict().items() if key != "seconds"}
    for result in threads.run(lambda: evaluate_ensemble(z, (4, 8), labels, (1, 10), **options, shared=True)):
        found = result.to_dict()
        assert found["recall"] == expected["recall"]
        assert found["same"] == expected["same"]
        assert found["map_at_r"] == pytest.approx(expected["map_at_r"], abs=1e-9)
        assert found["r_precision"] == pytest.approx(expected["r_precision"], abs=1e-9)
        for name, ranks in alone.ranks.items():
            np.testing.assert_array_equal(result.ranks[name], ranks)
    assert len(threads.shares) == 3 * WORLD  # ranks, mAP@R and pairs
