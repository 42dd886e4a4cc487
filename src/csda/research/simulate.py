"""Simulate the review page on images with known labels.

Some labels are drawn, a probe is trained on frozen features, an order of the page chooses the next images, their labels
are added, and so on. Each order begins with the same labels and is scored on the same test images. The regularisation
of the probe is chosen by cross-validation on the first labels of a seed and kept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from csda import metrics
from csda.config import RunConfig
from csda.data.prepared import PreparedData, prepare_data
from csda.errors import explained
from csda.features import open_features
from csda.files import write_csv, write_whole
from csda.models.weights import read_weights
from csda.presets import configure
from csda.progress import Reporter
from csda.report.figures import PALETTE, STYLE
from csda.research.grid import WIDTH, write_grid
from csda.research.summary import describe_making, format_points, say_making
from csda.review.learning import Learned, align, learn, learn_again, leave_out
from csda.review.ordering import DEFAULTS, Pool, audit_order, interleave, rank
from csda.review.ordering import ORDERS as MEANINGS

ORDERS = ("random", "information", "mix", "uncertainty", "disagreement", "rare", "diversity")


@dataclass(frozen=True, slots=True)
class Plan:
    """The first number of labels, the number to add at a time, and the last number."""

    first: int = 200
    step: int = 100
    most: int = 800


def simulate(
    data: str, plan: Plan, seeds: Sequence[int], orders: Sequence[str] = ORDERS, reporter: Reporter | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row for each seed, order and number of labels: AUC, MCA, and the labels of the rarest class."""
    reporter = reporter or Reporter()
    for seed in seeds:
        config = configure(
            {"data": data, "preset": "features", "method": "linear-probe", "labels": str(plan.first), "seed": seed}
        )
        prepared = prepare_data(config, reporter)
        features = frozen_features(config, prepared, reporter)
        begun: dict[int, dict[str, Any]] = {}
        for order in orders:
            yield from _replay(prepared, features, plan, seed, order, begun)


FIGURES = ("mca", "auc")


def write_simulation(rows: Sequence[Mapping[str, Any]], plan: Plan, data: str, command: str, out: Path) -> Path:
    """Write steps.csv with all rows, summary.csv, figure.svg, meta.json and page.md into a folder; return the page."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
    columns = ("order", "seed", "labels", "mca", "auc", "rarest")
    write_csv(out / "steps.csv", columns, [[_short(row[name]) for name in columns] for row in rows])
    lines = summarise(rows)
    write_csv(out / "summary.csv", list(lines[0]), [[_short(value) for value in line.values()] for line in lines])
    write_grid(_draw(rows), out / "figure.svg", "MCA against the number of labels, by order")
    meta = {
        **describe_making(command),
        "data": Path(data).name,
        "first": plan.first,
        "step": plan.step,
        "most": plan.most,
        "seeds": sorted({row["seed"] for row in rows}),
        "preset": "features",
        "method": "linear-probe",
    }
    write_whole(out / "meta.json", json.dumps(meta, indent=1) + "\n")
    return write_whole(out / "page.md", format_page(lines, meta))


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each order: MCA and AUC with all labels and averaged over the steps after the first, and the lead of
    this average over random order, with the 95 % interval over seeds.
    """
    seeds = sorted({row["seed"] for row in rows})
    first, most = min(row["labels"] for row in rows), max(row["labels"] for row in rows)
    table = {(row["order"], row["seed"], row["labels"]): row for row in rows}
    steps = sorted({row["labels"] for row in rows} - {first})

    def over_steps(order: str, name: str) -> npt.NDArray[np.float64]:
        return np.array([np.mean([table[order, seed, labels][name] for labels in steps]) for seed in seeds])

    lines = []
    for order in dict.fromkeys(row["order"] for row in rows):
        line: dict[str, Any] = {"order": order, "seeds": len(seeds), "labels": most}
        for name in FIGURES:
            line[f"{name}_last"] = float(np.mean([table[order, seed, most][name] for seed in seeds]))
            line[f"{name}_mean"] = float(over_steps(order, name).mean())
            gaps = over_steps(order, name) - over_steps("random", name)
            low, high = metrics.paired_interval(gaps)
            line |= {f"{name}_gap": float(gaps.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
        line["rarest_last"] = float(np.mean([table[order, seed, most]["rarest"] for seed in seeds]))
        lines.append(line)
    return lines


def format_page(lines: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """page.md, from the lines of summary.csv and meta.json."""

    def points(line: Mapping[str, Any], name: str) -> str:
        if line["order"] == "random":
            return "–"
        gap, low, high = (format_points(line[f"{name}_{part}"]) for part in ("gap", "low", "high"))
        return f"{gap} [{low}, {high}]"

    table = "\n".join(
        f"| {line['order']} | {line['mca_mean']:.3f} | {points(line, 'mca')} | {line['mca_last']:.3f} | "
        f"{line['auc_mean']:.3f} | {points(line, 'auc')} | {line['rarest_last']:.1f} |"
        for line in lines
    )
    orders = "\n".join(f"- {line['order']}: {MEANINGS[line['order']]}" for line in lines)
    by_order = {line["order"]: line for line in lines}
    begun = by_order[_first(by_order)]
    if begun["order"] == "random":
        verdict = "Random order is all that was replayed."
    else:
        sure = begun["mca_low"] > 0
        verdict = (
            f"The review page begins with `{begun['order']}`, which is {points(begun, 'mca')} points ahead of random "
            f"order in MCA{', with an' if sure else ': its'} interval {'' if sure else 'is not '}above zero"
            f"{'.' if sure else ', so it may be no better than random order.'}"
        )
    best = max(lines, key=lambda line: float(line["mca_gap"]))
    head = (
        "order", "MCA, mean over the steps", "ahead of random, points", f"MCA with {meta['most']}",
        "AUC, mean", "ahead, points", "labels of the rarest class",
    )  # fmt: skip
    return f"""# Which image to label next

{say_making(meta)}

The loop of the review page on {meta["data"]}, whose labels are known: {meta["first"]} drawn labels, then
{meta["step"]} more at a time up to {meta["most"]}, {len(meta["seeds"])} seeds, each with its own split. What is learned
is a linear probe on the frozen features of the preset `features`; its
regularisation is chosen on the first labels of a seed and kept. As on the page, one image in five is drawn at random
whatever the order is. Scores are on the test images of the split.

| {" | ".join(head)} |
|{"---|" * len(head)}
{table}

{verdict} Furthest ahead on these seeds is `{best["order"]}`; the best of several looks better than it is. Intervals are
95 % bootstrap intervals over the {len(meta["seeds"])} seeds: with few of them they are too narrow rather than too wide.

{orders}

![MCA against labels](figure.svg)
"""


def _draw(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """MCA against the number of labels, a line for each order."""
    import matplotlib

    colours = [PALETTE[name] for name in ("grey", "olive", "blue", "vermilion", "green", "pink", "amber")]
    labels = sorted({row["labels"] for row in rows})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        axes = figure.add_subplot()
        orders = dict.fromkeys(row["order"] for row in rows)
        for order, colour in zip(orders, colours, strict=False):
            chosen = [row for row in rows if row["order"] == order]
            means = [np.mean([row["mca"] for row in chosen if row["labels"] == at]) for at in labels]
            wide = order in (_first(orders), "random")
            axes.plot(labels, means, color=colour, label=order, linewidth=2.4 if wide else 1.3)
        axes.set(xlabel="labels", ylabel="MCA on test images, mean over seeds")
        axes.legend(frameon=False, ncols=2)
    return figure


def _first(orders: Container[str]) -> str:
    """The order that the page begins with, of those that were compared."""
    return next(order for order in DEFAULTS if order in orders)


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def frozen_features(config: RunConfig, prepared: PreparedData, reporter: Reporter) -> npt.NDArray[np.float32]:
    """Features [N, W] of all images of a data set, by the frozen network of the configuration."""
    import torch

    weights = read_weights(config.backbone, config.pretrained, config.weights)
    assert weights is not None
    return open_features(config, prepared, weights, torch.device("cpu"), reporter).array


def _replay(
    prepared: PreparedData,
    features: npt.NDArray[np.float32],
    plan: Plan,
    seed: int,
    order: str,
    begun: dict[int, dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Simulate one order. The probe of the first labels is the same for all orders, and is kept in `begun`."""
    dataset, split = prepared.dataset, prepared.split
    place = {record.id: row for row, record in enumerate(dataset.records)}
    labeled = [place[record.id] for record in split.labeled]
    pool = [place[record.id] for record in split.unlabeled if record.id in split.truth]
    test = np.array([place[record.id] for record in split.test])
    training = np.array([*labeled, *pool])
    num_classes = len(dataset.classes)
    truth = prepared.encode(dataset.records)
    groups = [record.group for record in dataset.records]
    test_labels = truth[test]
    rarest = int(np.bincount(truth[training], minlength=num_classes).argmin())
    while True:
        count = len(labeled)
        if count == plan.first and begun:
            known = begun[0]
        else:
            started = time.perf_counter()
            own = np.array(labeled)
            if begun:
                learned = learn_again(begun[0]["learned"], features[own], truth[own])
            else:
                # Features are standardised over all images, also unlabeled ones.
                rows = {row: position for position, row in enumerate(training.tolist())}
                positions = np.array([rows[row] for row in labeled])
                own_groups = [groups[row] for row in labeled]
                learned = learn(features[training], positions, truth[own], num_classes, own_groups, seed)
            probs = learned.predict(features[test])
            known = {
                "learned": learned,
                "auc": metrics.auc(probs, test_labels),
                "mca": metrics.mca(probs, test_labels),
                "seconds": time.perf_counter() - started,
            }
            if count == plan.first:
                begun[0] = known
        rare = int((truth[labeled] == rarest).sum())
        figures = {name: known[name] for name in ("auc", "mca", "seconds")}
        yield {"order": order, "seed": seed, "labels": count, **figures, "rarest": rare}
        wanted = min(plan.step, plan.most - count, len(pool))
        if wanted <= 0:
            return
        chosen = _choose(order, known["learned"], features, labeled, pool, truth, groups, seed)[:wanted]
        labeled += chosen
        taken = set(chosen)
        pool = [row for row in pool if row not in taken]


def _choose(
    order: str,
    learned: Learned,
    features: npt.NDArray[np.float32],
    labeled: Sequence[int],
    pool: Sequence[int],
    truth: npt.NDArray[np.int64],
    groups: Sequence[str | None],
    seed: int,
) -> list[int]:
    """Rows of the pool in the order of the page, including those drawn for the audit."""
    own, labels = features[list(labeled)], truth[list(labeled)]
    probs = learned.predict(features[list(pool)])
    aligned = None
    if order == "disagreement":
        aligned = align(leave_out(learned, own, labels, [groups[row] for row in labeled], seed), labels, probs)
    described = Pool(
        [str(row) for row in pool],
        probs,
        np.bincount(labels, minlength=probs.shape[1]),
        other=aligned,
        features=features[list(pool)],
        labeled_features=own,
        groups=[groups[row] for row in pool],
        labeled_groups={groups[row] for row in labeled},
        seed=seed,
    )
    shown, _ = interleave(rank(order, described), audit_order([f"{seed} {name}" for name in described.names]))
    return [pool[position] for position in shown]
