"""`python -m csda.research.estimators FOLDER`: the classifier beside those of scikit-learn, on features of real images.

The folder has one folder per class. Every method gets the same features of a frozen network, the same few labels, drawn
again for each seed, all other training images without one, and the same third of the images as a test.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from csda import metrics
from csda.classifier import CSDAClassifier
from csda.data.folder import load

Array = npt.NDArray[Any]
Row = dict[str, list[tuple[float, float]]]


def _regression(**settings: Any) -> LogisticRegression:
    return LogisticRegression(max_iter=2000, C=0.01, **settings)


ESTIMATORS: Mapping[str, Callable[[int], Any]] = {
    "LogisticRegression": lambda seed: _regression(),
    "LogisticRegression, balanced": lambda seed: _regression(class_weight="balanced"),
    "SelfTrainingClassifier": lambda seed: SelfTrainingClassifier(_regression(), threshold=0.9),
    "SelfTrainingClassifier, balanced": lambda seed: SelfTrainingClassifier(
        _regression(class_weight="balanced"), threshold=0.9
    ),
    "LabelSpreading": lambda seed: LabelSpreading(kernel="knn", n_neighbors=15, max_iter=100),
    "CSDAClassifier, method linear-probe": lambda seed: CSDAClassifier("linear-probe", random_state=seed),
    "CSDAClassifier": lambda seed: CSDAClassifier(random_state=seed),
}
"""Regressions are regularised for standardised features; those of scikit-learn get them standardised."""


def compare(features: Array, labels: Array, budgets: list[int], seeds: int) -> dict[int, Row]:
    """AUC and MCA on the test images of each estimator, for each number of labels and seed."""
    found: dict[int, Row] = {}
    for budget in budgets:
        found[budget] = {name: [] for name in ESTIMATORS}
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(labels))
            test, train = np.split(order, [len(order) // 3])
            partial = np.full(len(train), -1)
            # One image of each class at least, so that all methods know the same classes.
            kept = [int(np.flatnonzero(labels[train] == each)[0]) for each in np.unique(labels[train])]
            kept += [place for place in range(len(train)) if place not in kept][: budget - len(kept)]
            partial[kept] = labels[train[kept]]
            for name, make in ESTIMATORS.items():
                supervised = name.startswith("LogisticRegression")
                rows = np.flatnonzero(partial >= 0) if supervised else np.arange(len(train))
                model = make(seed)
                if not isinstance(model, CSDAClassifier):
                    model = make_pipeline(StandardScaler(), model)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    probs = model.fit(features[train[rows]], partial[rows]).predict_proba(features[test])
                found[budget][name].append((metrics.auc(probs, labels[test]), metrics.mca(probs, labels[test])))
    return found


def format_table(found: Mapping[int, Row]) -> str:
    """Markdown: mean ± deviation over the seeds."""
    lines = ["| | " + " | ".join(f"AUC, {each} labels | MCA, {each} labels" for each in found) + " |"]
    lines.append("|---|" + "---|" * (2 * len(found)))
    for name in ESTIMATORS:
        cells = []
        for rows in found.values():
            for values in zip(*rows[name], strict=True):
                cells.append(f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--labels", type=int, nargs="+", default=[50, 200])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--image-size", type=int, default=96)
    given = parser.parse_args()
    dataset = load(given.folder)
    records = [record for record in dataset.records if record.label is not None]
    labels = np.array([record.label for record in records])
    extract = CSDAClassifier(image_size=given.image_size)
    features = extract._features([record.path for record in records])
    print(format_table(compare(features, labels, given.labels, given.seeds)))


if __name__ == "__main__":
    main()
