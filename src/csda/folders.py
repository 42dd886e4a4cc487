"""The cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def default_cache() -> Path:
    """`$CSDA_CACHE`, or `csda` in the user's cache folder."""
    if folder := os.environ.get("CSDA_CACHE"):
        return Path(folder).expanduser()
    return user_cache_path("csda", appauthor=False)
