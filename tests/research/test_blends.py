"""Blends change the unlabeled images of a split, and nothing else."""

from __future__ import annotations

import csv
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from csda.config import RunConfig
from csda.data.prepared import load_configured, split_configured
from csda.data.records import Split
from csda.errors import ConfigError, DataError
from csda.presets import configure
from csda.progress import Reporter
from csda.research import reproduce
from csda.research.blends import SPLIT, Blend, make_blend
from tiny import SMALL_GRID

GRID = (
    """
title = "Blends"
preset = "quick"
seeds = [0]
"""
    + SMALL_GRID
    + """
[splits.plain]
data = "own"
labels = "15"
split_seed = 3

[splits.blended]
data = "own"
labels = "15"
split_seed = 3

[blends.blended]
strangers = "others"
kept = { rare = 2.0 }

[[rows]]
method = "baseline"

[[rows]]
method = "self-train"
"""
)


def _config(images: Path, **more: Any) -> RunConfig:
    return configure({"data": str(images), "labels": "15", "method": "baseline", **more})


def _split(config: RunConfig) -> Split:
    return split_configured(load_configured(config), config)


def _of_blend(folder: Path) -> Split:
    return _split(_config(folder, split=str(folder / SPLIT)))


def _contents(root: Path, split: Split, part: str) -> list[bytes]:
    return sorted((root / record.id).read_bytes() for record in getattr(split, part))


@pytest.fixture
def others(tmp_path: Path) -> Path:
    for name in ("p", "q"):
        (tmp_path / "others" / name).mkdir(parents=True)
        for number in range(10):
            shade = (number, 255 - number, 40 * (name == "q"))
            Image.new("RGB", (32, 32), shade).save(tmp_path / "others" / name / f"{number}.png")
    return tmp_path / "others"


def test_unlabeled_images_are_thinned_and_repeated_by_class(tiny_images: Path, tmp_path: Path) -> None:
    config = _config(tiny_images)
    before = _split(config)
    classes = load_configured(config).classes
    counts = Counter(classes[label] for label in before.truth.values())
    thinned, doubled = (name for name, _ in counts.most_common(2))
    after = _of_blend(made := make_blend(Blend(kept={thinned: 0.3, doubled: 2.0}), config, None, tmp_path / "made"))
    for part in ("labeled", "val", "test"):
        assert _contents(made, after, part) == _contents(tiny_images, before, part)
    found = Counter(classes[label] for label in after.truth.values())
    assert found[doubled] == 2 * counts[doubled]
    assert 0 < found[thinned] < 0.7 * counts[thinned]
    assert {name: found[name] for name in counts if name not in (thinned, doubled)} == {
        name: count for name, count in counts.items() if name not in (thinned, doubled)
    }
    assert set(_contents(made, after, "unlabeled")) <= set(_contents(tiny_images, before, "unlabeled"))


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_strangers_are_a_share_of_the_unlabeled_images(
    share: float, tiny_images: Path, others: Path, tmp_path: Path
) -> None:
    config = _config(tiny_images)
    before = _split(config)
    after = _of_blend(made := make_blend(Blend(strangers="others", share=share), config, others, tmp_path / "made"))
    added = len(after.unlabeled) - len(before.unlabeled)
    assert added == round(share * len(after.unlabeled)) > 0
    assert len(after.truth) == len(before.truth)  # a stranger has no class
    strange = {path.read_bytes() for path in others.rglob("*.png")}
    assert sum(image in strange for image in _contents(made, after, "unlabeled")) == added
    assert not strange & {image for part in ("labeled", "val", "test") for image in _contents(made, after, part)}


def test_a_blend_is_made_once(tiny_images: Path, others: Path, tmp_path: Path) -> None:
    config, blend = _config(tiny_images), Blend(strangers="others")
    made = make_blend(blend, config, others, tmp_path / "made")
    (made / "kept").touch()
    assert make_blend(blend, config, others, tmp_path / "made") == made
    assert (made / "kept").exists()
    assert make_blend(Blend(strangers="others", share=0.2), config, others, tmp_path / "made") != made
    assert make_blend(blend, _config(tiny_images, split_seed=5), others, tmp_path / "made") != made
    assert len(list((tmp_path / "made").iterdir())) == 3  # nothing half-made is left


def test_what_cannot_be_blended_is_refused(tiny_images: Path, others: Path, tmp_path: Path) -> None:
    config = _config(tiny_images)
    with pytest.raises(ConfigError, match="no class is called 'nevus'"):
        make_blend(Blend(kept={"nevus": 0.5}), config, None, tmp_path / "made")
    with pytest.raises(DataError, match=r"20 other images are too few: a share of 0\.9 takes"):
        make_blend(Blend(strangers="others", share=0.9), config, others, tmp_path / "made")
    with pytest.raises(DataError, match="folders with one class per image alone"):
        make_blend(Blend(), configure({"labels": "15"}), None, tmp_path / "made")
    assert not list(tmp_path.glob("made/*/labels.csv"))


def test_a_grid_trains_on_its_blends(
    tiny_images: Path, others: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "_train_all", lambda cells, *_: [cell.train() for cell in cells])
    sets = tmp_path / "sets"
    shutil.copytree(tiny_images, sets / "own")
    shutil.copytree(others, sets / "others")
    (tmp_path / "grid.toml").write_text(GRID)

    def make(**options: Any) -> dict[str, bytes]:
        reproduce.reproduce(
            [str(tmp_path / "grid.toml")],
            data=str(sets),
            runs=tmp_path / "runs",
            out=tmp_path / "results",
            reporter=Reporter(),
            **options,
        )
        return {file.name: file.read_bytes() for file in (tmp_path / "results" / "grid").iterdir()}

    made = make()
    lines = list(csv.DictReader(made["runs.csv"].decode().splitlines()))
    assert len(lines) == 4
    assert b"missing" not in made["page.md"]
    images = {(line["split"], line["images"]) for line in lines}
    assert len(images) == len({digest for _, digest in images}) == 2
    # Lines alone are enough, with the images and without.
    shutil.rmtree(tmp_path / "runs")
    assert make() == made
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(sets)
    assert make(only_finished=True) == made


def test_a_blend_needs_a_split_with_its_own_data(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID.replace("[blends.blended]", "[blends.other]"))
    with pytest.raises(ConfigError, match="blend other: no split of this name has its own data and labels"):
        reproduce.read_experiment(str(tmp_path / "grid.toml"))
