"""Run folders as the program writes them, filled with drawn predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csda import metrics
from csda.report import write_report

CLASSES = ("melanoma", "nevus", "basal cell carcinoma", "keratosis", "benign keratosis", "dermatofibroma", "vascular")
FREQUENCIES = np.array([0.11, 0.67, 0.05, 0.033, 0.11, 0.0115, 0.0155])


def write_rows(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def sharpen(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return (exponents / exponents.sum(-1, keepdims=True)).astype(np.float32)


def confuse(labels: np.ndarray, frequencies: np.ndarray, epochs: int, bias: float, skill: float, seed: int) -> Any:
    """Probabilities [epochs, N, n] of a model that learns, leaning to frequent classes as strongly as `bias` says."""
    n, generator = len(frequencies), np.random.default_rng(seed)
    noise = generator.normal(scale=1.3, size=(len(labels), n))
    steps = []
    for epoch in range(1, epochs + 1):
        learned = skill * (1 - np.exp(-4 * epoch / epochs))
        wobble = generator.normal(scale=0.35, size=noise.shape)
        steps.append(sharpen(learned * np.eye(n)[labels] + noise + wobble + bias * np.log(frequencies)))
    return np.stack(steps)


def write_run(
    folder: Path,
    method: str = "csda",
    seed: int = 0,
    classes: tuple[str, ...] = CLASSES,
    epochs: int = 12,
    test_seed: int = 0,
    labeled: int = 150,
    grouped: bool = False,
    truth: bool = True,
) -> Path:
    """A finished run of `method`; everything but `baseline` has pseudo-labels."""
    n, semi = len(classes), method not in ("baseline", "upper-bound")
    frequencies = FREQUENCIES / FREQUENCIES.sum() if n == len(FREQUENCIES) else np.full(n, 1 / n)
    generator = np.random.default_rng(100 + test_seed)
    sizes = {"labeled": labeled, "unlabeled": 1200, "val": 10 * n, "test": 350}
    parts = {
        part: np.r_[np.arange(n), generator.choice(n, size - n, p=frequencies)]
        if part != "val"
        else np.arange(size) % n
        for part, size in sizes.items()
    }
    bias, skill = (0.6, 2.2) if semi else (1.0, 2.0)
    probs = {part: confuse(parts[part], frequencies, epochs, bias, skill, 10 * seed + k) for k, part in
             enumerate(("val", "test", "unlabeled"))}  # fmt: skip
    val_auc = [metrics.auc(step, parts["val"]) for step in probs["val"]]
    best = int(np.argmax(val_auc))

    folder.mkdir(parents=True)
    settings = {"method": method, "data": "synthetic", "preset": "quick", "seed": seed, "epochs": epochs}
    settings |= {"steps_per_epoch": 40, "image_size": 32, "batch_size": 64, "unlabeled_batch_size": 64, "lr": 0.0128}
    table = {"capacity": 256, "gamma": 1.0, "delta": 0.25, "refresh": "epoch"} if semi else {}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    lines += ["", "[method_settings]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    (folder / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    environment = {"csda": "0.1.0", "python": "3.11.9", "torch": "2.13.0", "numpy": "2.4.6", "platform": "Linux x86_64"}
    environment |= {"device": "cpu", "device_name": "two cores", "threads": 2, "commit": None}
    environment |= {"classes": list(classes), "multi_label": False, "remarks": ["drawn for this test"]}
    environment |= {"command": f"csda train --method {method}", "started": "2026-01-05T09:30:00+00:00"}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")

    ids = {part: [f"{part}-{i:04d}" for i in range(size)] for part, size in sizes.items()}
    rows, known = [], []
    for part, labels in parts.items():
        for i, (identity, label) in enumerate(zip(ids[part], labels, strict=True)):
            group = f"lesion-{i % 300 if part in ('labeled', 'test') else f'{part}-{i}'}" if grouped else ""
            rows.append((identity, part, "" if part == "unlabeled" else classes[label], group))
            known += [(identity, classes[label])] if part == "unlabeled" else []
    write_rows(folder / "split.csv", ("id", "split", "label", "group"), rows)
    if truth:
        write_rows(folder / "truth.csv", ("id", "label"), known)

    history: dict[str, Any] = {
        "epochs": np.arange(1, epochs + 1),
        "val_probs": probs["val"],
        "test_probs": probs["test"],
    }
    if semi:
        guesses = probs["unlabeled"].argmax(-1)
        decay = np.linspace(1, 0, epochs)[:, None]
        counts = np.stack([np.minimum(np.bincount(g, minlength=n), 60) for g in guesses]).astype(float)
        labeled_marginals = np.stack([(1 - d) * np.eye(n) * 0.6 + (0.4 + 0.6 * d) / n for d in decay])
        history |= {
            "labeled_marginals": labeled_marginals,
            "unlabeled_marginals": 0.8 * labeled_marginals + 0.2 * frequencies,
            "aligned_marginals": 0.95 * labeled_marginals + 0.05 * frequencies,
            "temperatures": 0.3 + 0.6 * decay * (1 - frequencies),
            "queue_counts": counts,
            "pseudo_confusion": np.stack([metrics.confusion(parts["unlabeled"], g, n) for g in guesses]).astype(float),
            "flips": 0.05 + 0.3 * decay * (1 - frequencies),
        }
        for key in set(history) - {"epochs", "val_probs", "test_probs"}:
            history[key][0] = 0 if key in ("queue_counts", "pseudo_confusion") else np.nan
        if not truth:
            history["pseudo_confusion"][:] = 0
    np.savez(folder / "history.npz", **history)

    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for e in range(epochs):
            row = {
                "epoch": e + 1,
                "loss": 2 / (e + 1),
                "labeled_loss": 1 / (e + 1),
                "unlabeled_loss": None,
                "lr": 0.0128,
            }
            row |= {"seconds": 1.9, "val_auc": val_auc[e], "val_mca": metrics.mca(probs["val"][e], parts["val"])}
            row |= {"test_auc": metrics.auc(probs["test"][e], parts["test"])}
            row |= {"test_mca": metrics.mca(probs["test"][e], parts["test"])}
            if semi and e:
                row |= {"flip_rate": float(history["flips"][e].mean()), "queue_filled": float(counts[e].sum() / 256)}
                if truth:
                    row["pseudo_accuracy"] = float((guesses[e] == parts["unlabeled"]).mean())
                    row["pseudo_mca"] = metrics.mca(probs["unlabeled"][e], parts["unlabeled"])
            file.write(json.dumps(row) + "\n")

    rows = []
    for part in ("val", "test"):
        for identity, label, row in zip(ids[part], parts[part], probs[part][best], strict=True):
            rows.append((identity, part, classes[label], classes[row.argmax()], *(f"{value:.6f}" for value in row)))
    write_rows(folder / "predictions.csv", ("id", "split", "label", "predicted", *classes), rows)

    rows = [
        (identity, classes[row.argmax()], f"{row.max():.6f}", *(f"{value:.6f}" for value in row))
        for identity, row in zip(ids["unlabeled"], probs["unlabeled"][best], strict=True)
    ]
    write_rows(folder / "pseudo_labels.csv", ("id", "predicted", "confidence", *classes), rows)

    test_auc = [metrics.auc(step, parts["test"]) for step in probs["test"]]
    test_mca = [metrics.mca(step, parts["test"]) for step in probs["test"]]
    corrected = metrics.prior_corrected(probs["test"][best], np.bincount(parts["labeled"], minlength=n) / labeled)
    result = {"best_epoch": best + 1, "auc": test_auc[best], "mca": test_mca[best], "seconds": 1.9 * epochs}
    result |= {"auc_last20": float(np.mean(test_auc[-20:])), "mca_last20": float(np.mean(test_mca[-20:]))}
    result |= {"prior_auc": metrics.auc(corrected, parts["test"]), "prior_mca": metrics.mca(corrected, parts["test"])}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def baseline_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `baseline`, not to be changed."""
    return write_run(tmp_path_factory.mktemp("runs") / "baseline", "baseline")


@pytest.fixture(scope="session")
def csda_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of `csda` with its report, not to be changed."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "csda", "csda")
    write_report(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run(method, **settings)` writes a run folder named after its method and seed."""

    def make(method: str = "csda", seed: int = 0, **settings: Any) -> Path:
        return write_run(tmp_path / f"{method}-{seed}-{len(list(tmp_path.iterdir()))}", method, seed, **settings)

    return make


@pytest.fixture
def make_multi_label_run(make_run: Callable[..., Path]) -> Callable[[], Path]:
    """A run whose images have none, one or several of three labels."""

    def make() -> Path:
        names = ("effusion", "edema", "fracture")
        folder = make_run("baseline", classes=names, epochs=2)
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        (folder / "environment.json").write_text(json.dumps(environment | {"multi_label": True}), encoding="utf-8")
        generator = np.random.default_rng(5)
        for name, columns in (("split.csv", 4), ("predictions.csv", 7)):
            with (folder / name).open(newline="", encoding="utf-8") as file:
                header, *rows = csv.reader(file)
            for row in rows:
                if row[2]:
                    row[2] = "|".join(np.array(names)[generator.random(3) < 0.4]) or "(none)"
            assert len(header) == columns
            write_rows(folder / name, header, rows)
        return folder

    return make
