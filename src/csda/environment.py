"""Where a run was made: versions, commit, command and machine. Without torch."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import csda


def describe_environment() -> dict[str, Any]:
    """The environment of a run, as far as known without importing torch."""
    return {
        "csda": csda.__version__,
        "commit": source_commit(),
        "command": shlex.join(["csda", *sys.argv[1:]]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def source_commit() -> str | None:
    """The commit of the source checkout of the package, marked if the package was changed. Without git, CSDA_COMMIT."""
    here = Path(__file__).resolve().parent
    try:
        top, _, commit = _git(here, "rev-parse", "--show-toplevel", "HEAD").partition("\n")
        # An installed package may be inside the checkout of another project.
        if commit and Path(top).resolve() == here.parent.parent:
            return f"{commit}+changed" if _git(here, "--no-optional-locks", "status", "--porcelain", ".") else commit
    except OSError:
        pass
    return os.environ.get("CSDA_COMMIT")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()
