"""Find existing runs: finished run folders, and rows of tables whose run folders were deleted.

A run is identified by its settings and the content of its data, not by its table or the name of a folder, so a row in
several tables is trained once. Run folders are not kept with the results. runs.csv has a row for each run, and
meta.json the complete settings, so another machine trains only what is missing.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from csda import metrics
from csda.config import CIRCUMSTANCES, RunConfig
from csda.data import load_dataset, split_files
from csda.data.content import content_digest, hash_contents
from csda.presets import configure
from csda.research.summary import average
from csda.runs import Run

Identity = dict[str, Any]
Contents = Mapping[str, str]
"""Digests of `data` and, if lists or the source itself divide it, of `split`."""

READING = ("source", "uncertain", "image_column", "label_column", "group_column", "split_column")
"""Settings of how a data set is read."""

LATER = {
    "pretrained": False,
    "frozen": False,
    "feature_stages": 0,
    "feature_views": "plain",
    "probe_share": 0.0,
    "aspect": "squash",
    "weight_decay": 0.0,
    "schedule": "steps",
    "lr_warm_up": 0,
    "zoom": 1.0,
    "enlarge": 1.0,
    "border": "zeros",
    "color": 0.0,
    "mixup_alpha": 0.0,
    "adjust": False,
    "average": 0.0,
    "choose": "best",
    "test_flips": False,
    "test_middle": False,
    "against": "unlabeled",
    "shrinkage": 0.0,
    "basis": "diagonal",
    "shift": "none",
    "guess_temperature": 1.0,
    "guesses_from": "network",
    "folds": 5,
    "fold_network": "head",
    "fold_epochs": 4,
}
"""Settings that were added after the first tables, with the value of all earlier runs.

At this value they are left out of an identity, so that earlier runs keep their digest.
"""

PLACES = ("data", "labels", "split", "split_by", "split_seed", "seed")
"""Settings with their own columns in a table, or given by the split."""

FIGURES = ("auc", "mca", "auc_last20", "mca_last20", "auc_prior", "mca_prior")
"""Figures of the result of a run on the test images."""

TEXTS = ("method", "labels", "split", "settings", "images", "commit", "machine", "torch", "date")
"""Columns of runs.csv that are text."""


class ContentFinder:
    """Computes digests of the data sets and lists of configurations; each is read once."""

    def __init__(self) -> None:
        self._digest_set, self._digest_lists = cache(_digest_set), cache(_digest_lists)

    def __call__(self, config: RunConfig) -> Contents:
        """Digests of the whole data set as `data`, and of its division as `split`: lists, or its own parts.

        A drawn data set has one digest for all seeds.
        """
        data, parts = self._digest_set(config.data, *(getattr(config, name) for name in READING))
        split = self._digest_lists(config.split) if config.split else parts
        return {"data": data} | ({"split": split} if split else {})


def _digest_set(data: str, *reading: Any) -> tuple[str, str | None]:
    dataset = load_dataset(data, **dict(zip(READING, reading, strict=True)))
    parts = sorted((record.id, record.part) for record in dataset.records if record.part)
    # Files are read again, because file times may be wrong.
    contents = hash_contents(dataset, fresh=True)
    return content_digest(dataset, contents), digest(parts) if parts else None


def _digest_lists(split: str) -> str:
    return digest([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in split_files(split)])


def recall_contents(about: Mapping[str, Any], split: str) -> Contents:
    """The digests of a split in meta.json, if the images are not available."""
    own = about["splits"].get(split, {})
    return {"data": own.get("data", about["data"])} | ({"split": own["split"]} if "split" in own else {})


def identify(config: RunConfig, contents: Contents) -> Identity:
    """The identity of a run: its resolved settings, and digests of its data instead of names."""
    values = config.model_dump(mode="json", exclude_none=True, exclude={"data", "split", *CIRCUMSTANCES})
    own = values.pop("method_settings")
    values = {name: value for name, value in (values | own).items() if name not in LATER or value != LATER[name]}
    return {**contents, **values}


def agree(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two runs compute the same; a setting that the older of them did not know yet has its default, or the
    value that `LATER` names."""
    if any(ours.get(name) != theirs.get(name) for name in ("method", "labels", "seed")):
        return False
    filled = {**_defaults(ours["method"]), **theirs}
    return all(filled.get(name) == ours.get(name) for name in ours.keys() | theirs.keys())


def digest(content: object) -> str:
    """A hash of a content, 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def locate(runs: Path, split: str, config: RunConfig, contents: Contents, commit: str | None = None) -> Path:
    """The folder of a finished run with this identity, the latest, or a new folder. With a `commit` only runs that were
    started at it are used. The path has the digests of data and lists, which the files do not have.
    """
    identity = identify(config, contents)
    divided = f"{split}-{contents['split']}" if "split" in contents else split
    stem = _slug(f"{config.method}_{config.labels}_{divided}_{config.seed}")
    begun = [file.parent for file in runs.glob(f"*_{contents['data']}/{stem}_*/environment.json")]
    alike = [
        run
        for run in map(Run, begun)
        if agree(identity, identify(run.settings, contents)) and commit in (None, run.environment["commit"])
    ]
    if alike:
        return max(alike, key=lambda run: (run.finished, run.environment["started"], run.folder.name)).folder
    name = "_".join([stem, digest(identity), *([commit[:7]] if commit else [])])
    return runs / f"{_slug(Path(config.data).name)}_{contents['data']}" / name


def digest_split(run: Run) -> str:
    """A hash of the parts and labels of all images."""
    return digest(sorted((row.id, row.split, row.label) for row in run.split))


def read_line(run: Run) -> dict[str, Any]:
    """A row of runs.csv, from the small files of a run, with rounded numbers."""
    probs, labels = run.predictions.part("test")
    last = run.metrics[-20:]
    chosen = run.metrics[run.result["best_epoch"] - 1]
    figures = {figure: run.result.get(figure) for figure in (*FIGURES, "best_epoch", "seconds")}
    figures |= {f"val_{name}": chosen[f"val_{name}"] for name in ("auc", "mca")}
    figures |= {f"val_{name}_last20": average(last, f"val_{name}") for name in ("auc", "mca")}
    figures |= {name: last[-1].get(name) for name in ("pseudo_accuracy", "pseudo_mca", "flip_rate")}
    figures |= _by_group(run)
    if run.multi_label:
        figures |= {"multi_label": 1, "pseudo_auc": last[-1].get("pseudo_auc")}
    for prefix, values in (
        ("recall", metrics.recall(probs, labels)),
        ("class_auc", metrics.per_class_auc(probs, labels)),
    ):
        pairs = zip(run.classes, values.tolist(), strict=True)
        figures |= {f"{prefix}_{name}": value for name, value in pairs}
    environment = run.environment
    gpu = environment["device"].startswith("cuda")
    cores = "" if gpu else f", {environment['threads']} of {environment['cores']} cores"
    return {"method": "", "labels": "", "split": "", "seed": 0} | {
        **{name: _rounded(value) if isinstance(value, float) else value for name, value in figures.items()},
        "settings": "",
        "images": digest_split(run),
        "commit": environment["commit"] or "unknown",
        "machine": f"{environment['device_name']}{cores}",
        "torch": environment["torch"],
        "date": environment["started"][:10],
    }


@dataclass(frozen=True, slots=True)
class Recorded:
    """A row of a table's runs.csv and the identity of its run."""

    table: str
    identity: Identity
    line: dict[str, Any]


def read_recorded(results: Path, commit: str | None = None) -> list[Recorded]:
    """All runs in the tables of a folder, or only those of a commit."""
    recorded = []
    for table in sorted(results.glob("*/runs.csv")):
        described = table.with_name("meta.json")
        about = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
        with table.open(newline="", encoding="utf-8") as file:
            for cells in csv.DictReader(file):
                cells.pop("preset", None)  # columns of a table's row; the run may become part of another row
                line = {name: text if name in TEXTS else _number(text) for name, text in cells.items()}
                if line.get("settings") in about.get("settings", {}) and commit in (None, line["commit"]):
                    places = {"data": about["data"], "labels": line["labels"], "seed": line["seed"]}
                    identity = about["settings"][line["settings"]] | places | about["splits"][line["split"]]
                    recorded.append(Recorded(table.parent.name, identity, line))
    return recorded


def settings_alone(identity: Mapping[str, Any]) -> Identity:
    """An identity without data, budget, split and seed, which is common to the runs of a row."""
    return {name: value for name, value in identity.items() if name not in PLACES}


@cache
def _defaults(method: str) -> Identity:
    own = settings_alone(identify(configure({"method": method, "preset": "default"}), {}))
    return {name: value for name, value in own.items() if name not in LATER}


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-=" else "-" for c in text)


def _number(text: str) -> float | int | None:
    return None if not text else int(text) if text.lstrip("-").isdigit() else float(text)


def _rounded(value: float) -> float | None:
    """Round as in the file; undefined values are empty."""
    return None if np.isnan(value) else float(f"{value:.6g}")


def _by_group(run: Run) -> dict[str, float | None]:
    """The effect of groups with images in several parts; None if no test image is of such a group.

    `auc_unseen` and `mca_unseen` are of the test images whose group is in neither the labeled nor the unlabeled part,
    and `mca_leak` is the contribution to the MCA of those whose group has a labeled image.
    """
    probs, labels = run.predictions.part("test")
    groups = {row.id: row.group for row in run.split}
    own = [groups[name] for name in np.array(run.predictions.ids)[run.predictions.splits == "test"]]
    labeled, unlabeled = ({row.group for row in run.split if row.split == part} for part in ("labeled", "unlabeled"))
    sizes = Counter(groups.values())
    known, seen, several = (
        np.array([group != "" and group in chosen for group in own], dtype=bool)
        for chosen in (labeled, labeled | unlabeled, {group for group in sizes if sizes[group] > 1})
    )
    unseen = (probs[~seen], labels[~seen]) if seen.any() else None
    return {
        "auc_unseen": metrics.auc(*unseen) if unseen else None,
        "mca_unseen": metrics.mca(*unseen) if unseen else None,
        "mca_leak": _leak(probs, labels, known, several) if known.any() and labels.ndim == 1 else None,
    }


def _leak(
    probs: npt.NDArray[np.float64],
    labels: npt.NDArray[np.int64],
    known: npt.NDArray[np.bool_],
    several: npt.NDArray[np.bool_],
) -> float:
    """mean_i share_i · (recall_i of the `known` images − recall_i of others), NaN if a class has no others.

    Others are from groups with `several` images, if class i has such, because objects with several images may be
    harder.
    """
    here, alike, others = (metrics.recall(probs[x], labels[x]) for x in (known, several & ~known, ~known))
    present, images = np.unique(labels, return_counts=True)
    share = np.bincount(labels[known], minlength=probs.shape[1])[present] / images
    gain = (here - np.where(np.isnan(alike), others, alike))[present]
    return float(np.where(share > 0, share * gain, 0.0).mean())
