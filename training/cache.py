"""Where what can be made again is kept between runs: translations, generated games, unpacked models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$UNDERTOW_CACHE, else undertow/ in the user's cache folder."""
    chosen = os.environ.get("UNDERTOW_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "undertow")
