"""Compare `CSDAClassifier` with the classifiers of scikit-learn, on features of real images.

Every classifier gets the same features of a frozen network, the same few labels, all other training images unlabeled,
and the same test images: those of `csda train --labels` with the same seed and no validation part. C of every
regression is chosen by cross-validation on the labeled samples, as in `CSDAClassifier`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import LogisticRegression
from sklearn.semi_supervised import LabelSpreading, SelfTrainingClassifier

from csda import metrics
from csda.classifier import CSDAClassifier
from csda.data.prepared import PreparedData, prepare_data
from csda.errors import DataError, explained
from csda.files import write_csv, write_whole
from csda.presets import configure
from csda.probe import choose_strength
from csda.progress import Reporter
from csda.research.simulate import frozen_features
from csda.research.summary import describe_making, format_points, say_making

Array = npt.NDArray[Any]

OURS = "CSDAClassifier"
FIGURES = ("auc", "mca")


def compare(
    data: Sequence[str], budgets: Sequence[int], seeds: int, image_size: int, reporter: Reporter
) -> Iterator[dict[str, Any]]:
    """Yield a row for each data set, number of labels, seed and classifier: AUC and MCA on the test images."""
    for folder in data:
        for budget in budgets:
            for seed in range(seeds):
                chosen = {"data": folder, "labels": str(budget), "seed": seed, "val": "0", "image_size": image_size}
                config = configure({"preset": "features", "method": "linear-probe", **chosen})
                prepared = prepare_data(config, reporter)
                if prepared.dataset.multi_label:
                    raise DataError(f"{folder}: its images have several labels, but these classifiers predict one")
                features = frozen_features(config, prepared, reporter)
                about = {"data": Path(folder).name, "labels": budget, "seed": seed}
                for name, figures in score_estimators(prepared, features, seed):
                    yield {**about, "estimator": name, **figures}


def score_estimators(prepared: PreparedData, features: Array, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """AUC and MCA of each classifier on the test images of a split."""
    split, dataset = prepared.split, prepared.dataset
    place = {record.id: row for row, record in enumerate(dataset.records)}
    labeled, unlabeled, test = (
        np.array([place[record.id] for record in part], dtype=np.intp)
        for part in (split.labeled, split.unlabeled, split.test)
    )
    train, known = np.concatenate([labeled, unlabeled]), prepared.encode(split.labeled)
    partial = np.concatenate([known, np.full(len(unlabeled), -1)])
    values = features.astype(np.float64)
    # scikit-learn's classifiers need standardised features; CSDAClassifier standardises itself.
    scaled = (values - values[train].mean(axis=0)) / (values[train].std(axis=0) + 1e-12)
    labels, num_classes = prepared.encode(split.test), len(dataset.classes)
    for name, model in make_estimators(scaled[labeled], known, num_classes, seed).items():
        given = values if isinstance(model, CSDAClassifier) else scaled
        rows = slice(len(labeled)) if isinstance(model, LogisticRegression) else slice(None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as regressions that have not converged
            model.fit(given[train[rows]], partial[rows])
        probs = np.zeros((len(test), num_classes))
        probs[:, model.classes_] = model.predict_proba(given[test])
        yield name, {"auc": metrics.auc(probs, labels), "mca": metrics.mca(probs, labels)}


def make_estimators(scaled: Array, labels: Array, num_classes: int, seed: int) -> dict[str, Any]:
    """The classifiers by name, with regressions regularised for these labeled samples and other defaults unchanged."""
    alone = np.arange(len(labels))

    def regression(weights: str | None) -> LogisticRegression:
        strength = choose_strength(scaled, labels, num_classes, alone, "weights" if weights else "none", seed)
        return LogisticRegression(C=strength, class_weight=weights, max_iter=2000)

    return {
        "LogisticRegression": regression(None),
        "LogisticRegression, balanced": regression("balanced"),
        "SelfTrainingClassifier": SelfTrainingClassifier(regression(None)),
        "SelfTrainingClassifier, balanced": SelfTrainingClassifier(regression("balanced")),
        # The default kernel, rbf, has a width for few features and finds no neighbours among 1,280.
        "LabelSpreading": LabelSpreading(kernel="knn"),
        f"{OURS}, method linear-probe": CSDAClassifier("linear-probe", random_state=seed),
        f"{OURS}, method csda": CSDAClassifier("csda", random_state=seed),
        OURS: CSDAClassifier(random_state=seed),
    }


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each data set, number of labels and classifier: mean and standard deviation over seeds, and the lead of
    `CSDAClassifier` with its 95 % interval over seeds.
    """
    table = {(row["data"], row["labels"], row["estimator"], row["seed"]): row for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    lines = []
    for data, labels, name in dict.fromkeys((row["data"], row["labels"], row["estimator"]) for row in rows):
        line: dict[str, Any] = {"data": data, "labels": labels, "estimator": name, "seeds": len(seeds)}
        for figure in FIGURES:
            own, ours = (np.array([table[data, labels, each, seed][figure] for seed in seeds]) for each in (name, OURS))
            deviation = float(own.std(ddof=1)) if len(seeds) > 1 else float("nan")
            line |= {f"{figure}_mean": float(own.mean()), f"{figure}_std": deviation}
            low, high = metrics.paired_interval(ours - own)
            line |= {
                f"{figure}_gap": float((ours - own).mean()),
                f"{figure}_low": float(low),
                f"{figure}_high": float(high),
            }
        lines.append(line)
    return lines


def write_comparison(rows: Sequence[Mapping[str, Any]], command: str, image_size: int, out: Path) -> Path:
    """Write draws.csv with all rows, summary.csv, meta.json and page.md into a folder; return the page."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    lines = summarise(rows)
    for name, table in (("draws.csv", rows), ("summary.csv", lines)):
        cells = [[f"{value:.6g}" if isinstance(value, float) else value for value in row.values()] for row in table]
        write_csv(out / name, list(table[0]), cells)
    meta = {
        **describe_making(command),
        "scikit_learn": _version(),
        "image_size": image_size,
        "seeds": sorted({row["seed"] for row in rows}),
    }
    write_whole(out / "meta.json", json.dumps(meta, indent=1) + "\n")
    return write_whole(out / "page.md", format_page(lines, meta))


def format_page(lines: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """page.md, from the lines of summary.csv and meta.json."""

    def points(line: Mapping[str, Any], figure: str) -> str:
        if line["estimator"] == OURS:
            return "–"
        gap, low, high = (format_points(line[f"{figure}_{part}"]) for part in ("gap", "low", "high"))
        return f"{gap} [{low}, {high}]"

    table = "\n".join(
        f"| {line['data']} | {line['labels']} | {line['estimator']} | "
        + " | ".join(
            f"{100 * line[f'{figure}_mean']:.1f} ± {100 * line[f'{figure}_std']:.1f} | {points(line, figure)}"
            for figure in FIGURES
        )
        + " |"
        for line in lines
    )
    head = " | ".join(f"{figure.upper()}, mean ± std | {OURS} ahead" for figure in FIGURES)
    return f"""# CSDAClassifier beside the classifiers of scikit-learn

{say_making(meta)} scikit-learn {meta["scikit_learn"]}.

All classifiers learn from the same frozen features of images of {meta["image_size"]} pixels, with few labels, and are
scored on the test images of the split. Each of {len(meta["seeds"])} seeds has its own split. Differences are in points,
paired by seed, with 95 % intervals over seeds.

| data | labels | classifier | {head} |
|---|---|---|{"---|" * 2 * len(FIGURES)}
{table}
"""


def _version() -> str:
    import sklearn

    return str(sklearn.__version__)
