"""The replay of the review: what is learned from, which images are chosen, what the table says."""

from __future__ import annotations

import numpy as np
import pytest

from csda.data import load_dataset, split_dataset
from csda.data.prepared import PreparedData
from csda.research import simulate
from csda.research.simulate import Plan, summarise


def test_a_replay_learns_from_what_it_chose_and_never_from_test_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders begin with the same labels; each step adds that many; one image in five is the audit's."""
    dataset = load_dataset("synthetic", seed=0)
    split = split_dataset(dataset, labels="60", seed=0)
    prepared = PreparedData(dataset, np.empty(0, np.uint8), split, (), "")
    place = {record.id: row for row, record in enumerate(dataset.records)}
    truth = prepared.encode(dataset.records)
    # Features that say the class, and the row by which a test knows the image.
    generator = np.random.default_rng(1)
    features = np.eye(len(dataset.classes))[truth] + generator.normal(0, 0.4, (len(truth), len(dataset.classes)))
    features = features.astype(np.float32)
    chosen: list[list[int]] = []
    original = simulate._choose

    def watch(*arguments: object) -> list[int]:
        chosen.append(original(*arguments)[:20])  # type: ignore[arg-type]
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(simulate, "_choose", watch)
    begun: dict[int, dict[str, object]] = {}
    rows = [
        row
        for order in ("random", "rare")
        for row in simulate._replay(prepared, features, Plan(60, 20, 100), 0, order, begun)
    ]
    assert [(row["order"], row["labels"]) for row in rows] == [
        (order, labels) for order in ("random", "rare") for labels in (60, 80, 100)
    ]
    assert rows[0]["mca"] == rows[3]["mca"]
    allowed = {place[record.id] for record in split.unlabeled}
    for first, second in (chosen[:2], chosen[2:]):
        assert len({*first, *second}) == 40
        assert {*first, *second} <= allowed
    # The audit's images are the same, whatever the order.
    assert chosen[0][4::5] == chosen[2][4::5]
    counts = np.bincount(truth[[place[record.id] for record in (*split.labeled, *split.unlabeled)]])
    labeled = [place[record.id] for record in split.labeled]
    assert rows[5]["rarest"] == (truth[[*labeled, *chosen[2], *chosen[3]]] == counts.argmin()).sum()


def test_the_summary_pairs_seeds() -> None:
    generator = np.random.default_rng(2)
    rows = [
        {
            "order": order,
            "seed": seed,
            "labels": labels,
            "rarest": seed,
            **dict(zip(("mca", "auc"), values, strict=True)),
        }
        for order in ("random", "mix")
        for seed in range(4)
        for labels in (20, 30, 40)
        for values in [generator.random(2).tolist()]
    ]
    line = summarise(rows)[1]
    table = {(row["order"], row["seed"], row["labels"]): row for row in rows}
    gaps = [
        sum(table["mix", seed, labels]["mca"] - table["random", seed, labels]["mca"] for labels in (30, 40)) / 2
        for seed in range(4)
    ]
    assert line["mca_gap"] == pytest.approx(sum(gaps) / 4)
    assert line["mca_low"] < line["mca_gap"] < line["mca_high"]
    assert line["mca_last"] == pytest.approx(sum(table["mix", seed, 40]["mca"] for seed in range(4)) / 4)
