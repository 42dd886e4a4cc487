"""Finds existing runs: finished run folders, and lines of tables whose run folders are gone.

A run is known by what it computes, not by the table that it was trained for, so that a row which stands in several
tables is trained once; and its data by its content, not by the name of a folder. Run folders are not kept with the
results. runs.csv has a line for each run, and meta.json the complete settings behind the lines, so that another machine
trains only what is missing.
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
from csda.research.summary import average
from csda.runs import Run
from csda.training import configure

Identity = dict[str, Any]
Contents = Mapping[str, str]
"""Digests that stand for `data` and, where it is divided by lists or by itself, for `split`."""

READING = ("source", "uncertain", "image_column", "label_column", "group_column", "split_column")
"""Settings that say how a set is read."""

LATER = {
    "pretrained": False,
    "frozen": False,
    "feature_stages": 0,
    "probe_share": 0.0,
    "aspect": "squash",
    "weight_decay": 0.0,
    "schedule": "steps",
    "lr_warm_up": 0,
    "zoom": 1.0,
    "border": "zeros",
    "color": 0.0,
    "mixup_alpha": 0.0,
    "adjust": False,
    "average": 0.0,
    "choose": "best",
    "test_flips": False,
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
"""Settings that came after the first tables, with the value that all runs had before; at that value they are left out
of an identity, so that the settings of those tables keep their digest."""

PLACES = ("data", "labels", "split", "split_by", "split_seed", "seed")
"""Settings that a line of a table has columns for, or that its split stands for."""

FIGURES = ("auc", "mca", "auc_last20", "mca_last20", "auc_prior", "mca_prior")
"""What the result of a run holds of the test images."""

TEXTS = ("method", "labels", "split", "settings", "images", "commit", "machine", "torch", "date")
"""Columns of runs.csv that hold no number."""


class ContentFinder:
    """Finds the contents of the sets and lists that configurations name; each is read once."""

    def __init__(self) -> None:
        self._digest_set, self._digest_lists = cache(_digest_set), cache(_digest_lists)

    def __call__(self, config: RunConfig) -> Contents:
        """Digests of the whole set as `data`, and of what divides it as `split`: lists, or parts that it names itself.

        A drawn set stands for all seeds that it is drawn with.
        """
        data, parts = self._digest_set(config.data, *(getattr(config, name) for name in READING))
        split = self._digest_lists(config.split) if config.split else parts
        return {"data": data} | ({"split": split} if split else {})


def _digest_set(data: str, *reading: Any) -> tuple[str, str | None]:
    dataset = load_dataset(data, **dict(zip(READING, reading, strict=True)))
    parts = sorted((record.id, record.part) for record in dataset.records if record.part)
    # A table is of the images that there are, whatever the times of the files say.
    contents = hash_contents(dataset, fresh=True)
    return content_digest(dataset, contents), digest(parts) if parts else None


def _digest_lists(split: str) -> str:
    return digest([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in split_files(split)])


def recall_contents(about: Mapping[str, Any], split: str) -> Contents:
    """What meta.json says of the data on a split, for when the images are not available."""
    own = about["splits"].get(split, {})
    return {"data": own.get("data", about["data"])} | ({"split": own["split"]} if "split" in own else {})


def identify(config: RunConfig, contents: Contents) -> Identity:
    """What a run computes: its resolved settings, and the contents of its data instead of their names."""
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
    """Twelve digits that stand for a content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def locate(runs: Path, split: str, config: RunConfig, contents: Contents, commit: str | None = None) -> Path:
    """The folder of a run that computes the same, the last begun of those that have finished, or a new one. With a
    `commit` only runs that were begun at it count.

    Its path says what it is, and has the digests of its data and lists, which its files do not tell.
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
    """Which images are in which part, and their labels: two runs with the same were given the same."""
    return digest(sorted((row.id, row.split, row.label) for row in run.split))


def read_line(run: Run) -> dict[str, Any]:
    """A line of runs.csv, from the small files of a run; numbers have the digits that the file keeps."""
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
    """A line of a table's runs.csv and what its run computed."""

    table: str
    identity: Identity
    line: dict[str, Any]


def read_recorded(results: Path, commit: str | None = None) -> list[Recorded]:
    """Every run that the tables in a folder tell of, or those of a commit alone."""
    recorded = []
    for table in sorted(results.glob("*/runs.csv")):
        described = table.with_name("meta.json")
        about = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
        with table.open(newline="", encoding="utf-8") as file:
            for cells in csv.DictReader(file):
                cells.pop("preset", None)  # of a row, and this may become a line of another one
                line = {name: text if name in TEXTS else _number(text) for name, text in cells.items()}
                if line.get("settings") in about.get("settings", {}) and commit in (None, line["commit"]):
                    places = {"data": about["data"], "labels": line["labels"], "seed": line["seed"]}
                    identity = about["settings"][line["settings"]] | places | about["splits"][line["split"]]
                    recorded.append(Recorded(table.parent.name, identity, line))
    return recorded


def settings_alone(identity: Mapping[str, Any]) -> Identity:
    """An identity without data, budget, split and seed: what the runs of one row share."""
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
    """As it stands in the file; what is not defined is left empty."""
    return None if np.isnan(value) else float(f"{value:.6g}")


def _by_group(run: Run) -> dict[str, float | None]:
    """What groups with images in several parts do to the figures; None where no test image is of such a group.

    `auc_unseen` and `mca_unseen` are of the test images whose group is in neither the labeled nor the unlabeled part,
    and `mca_leak` is what the MCA owes to those whose group has a labeled image.
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
    """mean_i share_i · (recall_i of the `known` images − recall_i of others), NaN where a class has no others.

    Others are of groups with `several` images where class i has such, since an object that was taken more than once
    may be a harder one.
    """
    here, alike, others = (metrics.recall(probs[x], labels[x]) for x in (known, several & ~known, ~known))
    present, images = np.unique(labels, return_counts=True)
    share = np.bincount(labels[known], minlength=probs.shape[1])[present] / images
    gain = (here - np.where(np.isnan(alike), others, alike))[present]
    return float(np.where(share > 0, share * gain, 0.0).mean())
