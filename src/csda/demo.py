"""The demonstration: labels alone against labels with unlabeled images, on pictures that the package draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from csda.errors import RunError
from csda.progress import Reporter
from csda.report import write_comparison, write_report
from csda.report.tables import comparison_table
from csda.training import train

METHODS = ("baseline", "csda")
REMARK = (
    "This is one seed, and seeds differ. Over ten of them (results/demo in the sources) csda gains in MCA, but the "
    "queue alone gains as much: on these pictures alignment adds nothing."
)


def run_demo(out: Path, seed: int, reporter: Reporter, settings: Mapping[str, Any] | None = None) -> Path:
    """Train each method, print the comparison and write its report; runs that are already there are kept.

    `settings` are settings of both runs, for a shorter or longer demonstration.
    """
    runs = []
    for method in METHODS:
        reporter.note(f"Training {method}")
        run = train(
            method=method,
            preset="quick",
            seed=seed,
            out=out / method,
            settings=settings,
            resume=True,
            reporter=reporter,
        )
        if run.settings.seed != seed:
            raise RunError(f"{out}: holds a demonstration with seed {run.settings.seed}; give another --out")
        write_report(run.folder)
        runs.append(run)
    page = write_comparison([run.folder for run in runs], out / "report.html", title="Labels alone, and with CSDA")
    Console().print(comparison_table(runs))
    print(f"Report: {page}")
    print(REMARK)
    return page
