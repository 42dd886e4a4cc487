"""The demonstration on drawn images: labels alone, then pretrained features, then unlabeled images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from csda.errors import RunError
from csda.presets import lacks_weights
from csda.progress import Reporter
from csda.report import write_comparison, write_report
from csda.report.tables import comparison_table
from csda.runs import Run
from csda.training import train


class Part(NamedTuple):
    """One training, and the text that is printed before it."""

    method: str
    preset: str
    settings: dict[str, Any]
    note: str


_FEATURES = {"image_size": 96}
PARTS = (
    Part("baseline", "quick", {}, "1 of 3. A small network learns from the labeled images alone."),
    Part("linear-probe", "features", _FEATURES, "2 of 3. The control: pretrained features, logistic regression."),
    Part(
        "self-train",
        "features",
        _FEATURES,
        "3 of 3. The regression continues to train, on the unlabeled images as well.",
    ),
)
REMARK = "This is one seed, and seeds differ. `csda reproduce pretrained` trains ten, and the method csda as well."

WITHOUT_WEIGHTS = (
    Part("baseline", "quick", {}, "1 of 2. A small network learns from the labeled images alone."),
    Part("csda", "quick", {}, "2 of 2. The same network learns from the unlabeled images, too."),
)
REMARK_WITHOUT_WEIGHTS = (
    "This is one seed, and seeds differ. Over ten of them (results/demo in the sources) csda gains in MCA, but the "
    "queue alone gains as much: on these pictures alignment adds nothing. Pretrained features do more for rare "
    "classes: pip install 'csda[pretrained]' shows it."
)


def run_demo(out: Path, seed: int, reporter: Reporter, settings: Mapping[str, Any] | None = None) -> Path:
    """Train the runs in turn, print the differences and write a report. Finished runs are not trained again.

    `settings` apply to all runs, for a shorter or longer demonstration.
    """
    parts, remark = (WITHOUT_WEIGHTS, REMARK_WITHOUT_WEIGHTS) if lacks_weights({}) else (PARTS, REMARK)
    runs = [_train(part, out, seed, reporter, settings or {}) for part in parts]
    # The control comes first, because differences are to the first run.
    ordered = runs if len(runs) == 2 else [runs[1], runs[2], runs[0]]
    page = write_comparison([run.folder for run in ordered], out / "report.html", title="What each step brings")
    for pair in _pairs(runs):
        Console().print(comparison_table(pair))
    print(f"Report: {page}")
    print(remark)
    return page


def _train(part: Part, out: Path, seed: int, reporter: Reporter, settings: Mapping[str, Any]) -> Run:
    reporter.note(part.note)
    run = train(
        method=part.method,
        preset=part.preset,
        seed=seed,
        out=out / part.method,
        settings=part.settings | dict(settings),
        resume=True,
        reporter=reporter,
    )
    if run.settings.seed != seed:
        raise RunError(f"{out}: has a demonstration with seed {run.settings.seed}; give another --out")
    write_report(run.folder)
    return run


def _pairs(runs: Sequence[Run]) -> list[Sequence[Run]]:
    return [runs[place : place + 2] for place in range(len(runs) - 1)]
