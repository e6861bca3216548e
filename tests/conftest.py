"""Fixtures that many tests share."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no real data at ../shared/data")
    return SHARED
