"""Evaluate a run on labeled images from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from csda.data.csv_files import fold_name
from csda.data.prepared import load_configured
from csda.data.records import Dataset, Label, Record, encode_labels
from csda.data.store import refuse_unreadable
from csda.errors import DataError
from csda.predict import Predictor
from csda.presets import configure
from csda.report.transfer import External, measure_external
from csda.runs import Run


def evaluate_external(
    run: Run,
    data: str | Path,
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> External:
    """Predict every labeled image of a data set and score the predictions.

    `settings` say how to read the data set, as for a training: `source`, `label_column`, `max_unreadable` and so on.
    Classes are matched with those of the run by name; some may be missing.
    """
    config = configure({"data": str(data), **(settings or {})})
    dataset = load_configured(config)
    records = [record for record in dataset.records if record.label is not None and record.path is not None]
    if not records:
        raise DataError(f"{data}: no labeled image files; give images with labels")
    labels = _translate(dataset, records, run)
    predictor = Predictor(run, config.device)
    predictor.require_images()
    kept, probs, unreadable = [], [], []
    outcomes = predictor.stream((record.path for record in records if record.path is not None), calibrated=False)
    for position, outcome in enumerate(outcomes):
        if outcome.probs is None:
            problem = str(outcome.problem).removeprefix(f"{outcome.path}: ")
            unreadable.append((records[position], problem))
        else:
            kept.append(position)
            probs.append(outcome.probs)
        progress(position + 1, len(records))
    if unreadable:
        refuse_unreadable(dataset, unreadable, config.max_unreadable)
    remarks = tuple(f"{record.path}: {reason}; left out" for record, reason in unreadable)
    if Path(run.config["data"]).resolve() == Path(data).resolve():
        remarks = (*remarks, "this is the folder that the run was trained on, so these are not new images")
    encoded = encode_labels([labels[position] for position in kept], len(run.classes), run.multi_label)
    ids = [records[position].id for position in kept]
    name = Path(data).name or str(data)
    return measure_external(run, name, ids, encoded, np.stack(probs).astype(np.float64), remarks)


def _translate(dataset: Dataset, records: list[Record], run: Run) -> list[Label]:
    """Labels as indices into the classes of the run."""
    known = {fold_name(name): position for position, name in enumerate(run.classes)}
    if dataset.multi_label and not run.multi_label:
        raise DataError(f"{dataset.root}: its images have several labels, but the run has one class per image")
    places: list[int | None] = [known.get(fold_name(name)) for name in dataset.classes]
    used = {each for record in records for each in _members(record.label)}
    unknown = [dataset.classes[each] for each in sorted(used) if places[each] is None]
    if unknown:
        raise DataError(
            f"{dataset.root}: the run has no class {', '.join(unknown)}, only {', '.join(run.classes)}; "
            "rename or leave out these images"
        )
    labels: list[Label] = []
    for record in records:
        members = tuple(place for each in _members(record.label) if (place := places[each]) is not None)
        labels.append(tuple(sorted(members)) if run.multi_label else members[0])
    return labels


def _members(label: Label | None) -> tuple[int, ...]:
    return label if isinstance(label, tuple) else () if label is None else (label,)
