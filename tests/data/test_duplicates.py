"""Images that are there twice are named where that misleads, by a training as by `csda data check`."""

from __future__ import annotations

import shutil
from pathlib import Path

from csda.data import check as check_module
from csda.data import load_dataset
from csda.progress import Reporter
from tiny import train_tiny


class Notes(Reporter):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def _pair(remark: str) -> tuple[str, str]:
    first, _, second = remark.partition(": ")[2].partition(", ")[2].removesuffix(" for one").partition(" = ")
    return first, second


def test_duplicates_across_parts_are_mentioned_by_a_training(tiny_images: Path, tmp_path: Path) -> None:
    images = Path(shutil.copytree(tiny_images, tmp_path / "images"))
    for number in range(20):
        shutil.copy(images / "common" / f"{number:02d}.png", images / "common" / f"again{number:02d}.png")
    shutil.copy(images / "rare" / "00.png", images / "label" / "rare00.png")
    reporter = Notes()
    run = train_tiny(images, tmp_path / "run", epochs=2, steps_per_epoch=1, reporter=reporter)
    remarks = {text.partition(":")[0]: text for text in reporter.said if text.startswith("duplicates")}
    assert set(remarks) == {"duplicates with different labels", "duplicates in different parts of the split"}
    assert set(remarks.values()) <= set(run.remarks)

    first, second = _pair(remarks["duplicates in different parts of the split"])
    assert (images / first).read_bytes() == (images / second).read_bytes()
    parts = {row.id: row.split.replace("unlabeled", "train").replace("labeled", "train") for row in run.split}
    assert parts[first] != parts[second]
    alike = [
        number for number in range(20) if parts[f"common/{number:02d}.png"] != parts[f"common/again{number:02d}.png"]
    ]
    across = len(alike) + (parts["rare/00.png"] != parts["label/rare00.png"])
    assert remarks["duplicates in different parts of the split"].startswith(
        f"duplicates in different parts of the split: {across}, "
    )
    assert set(_pair(remarks["duplicates with different labels"])) == {"rare/00.png", "label/rare00.png"}
    said = check_module.check(load_dataset(images)).remarks
    assert any(text.startswith("duplicates in different parts of the split: ") for text in said)


def test_no_duplicates_no_remark(tiny_images: Path, tmp_path: Path) -> None:
    reporter = Notes()
    train_tiny(tiny_images, tmp_path / "run", epochs=2, steps_per_epoch=1, reporter=reporter)
    assert not [text for text in reporter.said if text.startswith("duplicates")]
