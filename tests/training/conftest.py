from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def golden() -> dict:
    """Worked numbers made by an independent float64 reference."""
    return json.loads((Path(__file__).parents[1] / "golden" / "losses.json").read_text())
