"""Connect to Ray: a cluster, or the cores and GPUs of this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from csda.errors import ConfigError


@contextmanager
def joined_ray(*modules: str) -> Iterator[Any]:
    """A context with Ray and these modules of it: the cluster of RAY_ADDRESS, or one started here."""
    try:
        ray = import_module("ray")
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise ConfigError(f"--launcher ray needs Ray ({error}): pip install 'csda[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(f"Ray cannot be reached ({error}); is RAY_ADDRESS, if set, that of a cluster?") from None
    try:
        yield ray
    finally:
        ray.shutdown()
