"""Reader, preprocessing and weight mapping together: frozen features on the CUB test classes."""

from pathlib import Path

import pytest

from bier import data, recall_at_k
from bier.models.model import pretrained

# R@K in float32, as the note beside the data gives it
FROZEN = {
    "efficientnet_lite0": {1: 49.85, 2: 62.12, 4: 73.73, 8: 83.61},
    "googlenet-bvlc": {1: 41.93, 2: 54.32, 4: 67.81, 8: 78.68, 16: 88.05, 32: 93.89},
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_features_on_cub(name: str, shared_data: Path) -> None:
    weights = shared_data / "bvlc_googlenet.caffemodel" if name == "googlenet-bvlc" else None
    model = pretrained(name, weights, precision="float32")
    test = data.load("cub", shared_data)["test"]
    assert len(test) == 5924
    recall = recall_at_k(model.encode(list(test.images)), test.labels, FROZEN[name])
    assert recall == pytest.approx(FROZEN[name], abs=0.2)
