"""From settings to records, pixels and split; what one bad file may change, and what is found before any is read."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from csda.config import RunConfig
from csda.data import load_dataset, prepared
from csda.data.check import check
from csda.data.prepared import PreparedData, prepare_data
from csda.data.splits import Begun, list_split
from csda.errors import ConfigError, DataError
from csda.progress import Reporter
from tiny import make_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images")


def prepare(images: Path, begun: Begun | None = None, **chosen: Any) -> PreparedData:
    settings = {"data": str(images), "labels": "15", "image_size": 32, "max_unreadable": 0.5} | chosen
    return prepare_data(RunConfig(**settings), Reporter(), begun=begun)


def parts(data: PreparedData) -> dict[str, str]:
    return {row.id: row.split for row in list_split(data.split, data.dataset.classes)}


@pytest.mark.parametrize("part", ["labeled", "unlabeled", "val", "test"])
def test_a_bad_file_changes_nothing_for_the_others(images: Path, part: str) -> None:
    whole = prepare(images)
    before = parts(whole)
    bad = next(image for image, place in before.items() if place == part and image.startswith("common"))
    (images / bad).write_bytes(b"no image")
    data = prepare(images)
    del before[bad]
    assert parts(data) == before
    assert data.split.truth == {image: label for image, label in whole.split.truth.items() if image != bad}
    assert any(bad in remark for remark in data.remarks)


def test_remarks_speak_of_what_is_left(images: Path) -> None:
    rows = [f"{path.relative_to(images)},{path.parent.name},{path.stem}" for path in sorted(images.rglob("*.png"))]
    (images / "labels.csv").write_text("\n".join(["image,label,group", *rows]))
    whole = prepare(images, split_by="image")
    pattern = r"split by image .* (\d+) test groups also occur in training"
    (total,) = re.findall(pattern, "\n".join(whole.remarks))
    groups = [record.group for record in whole.split.test]
    alone = next(record for record in whole.split.test if groups.count(record.group) == 1)
    (images / alone.id).write_bytes(b"no image")
    (left,) = re.findall(pattern, "\n".join(prepare(images, split_by="image").remarks))
    assert int(left) == int(total) - 1


@pytest.mark.parametrize(
    ("part", "kind", "message"),
    [
        ("labeled", "rare", "no labeled image of rare"),
        ("val", "", "no validation image"),
        ("test", "", "no test image"),
    ],
)
def test_a_part_that_bad_files_empty_is_refused(images: Path, part: str, kind: str, message: str) -> None:
    for image, place in parts(prepare(images)).items():
        if place == part and image.startswith(kind):
            (images / image).write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"images cannot be read, \S+ for one \(.*\), and without them: .*{message}"):
        prepare(images)


def test_the_check_divides_as_a_training_would(images: Path) -> None:
    """A class of three images has one in each part, and one that cannot be read is missing there alone."""
    for number in range(3, 40):
        (images / "rare" / f"{number:02d}.png").unlink(missing_ok=True)
    whole = parts(prepare(images, labels=None))
    rare = {place: image for image, place in whole.items() if image.startswith("rare")}
    (images / rare["test"]).write_bytes(b"no image")
    report = check(load_dataset(images), max_unreadable=0.5)
    assert report.problems == ()
    assert "the test part has no image of rare" in report.remarks
    (images / rare["labeled"]).write_bytes(b"no image")
    (problem,) = check(load_dataset(images), max_unreadable=0.5).problems
    assert "no labeled image of rare" in problem


def test_a_run_goes_on_with_all_of_its_images_or_not_at_all(images: Path) -> None:
    data = prepare(images)
    begun = Begun(images.parent / "split.csv", list(list_split(data.split, data.dataset.classes)), {})
    assert parts(prepare(images, begun)) == parts(data)
    (images / "common/00.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"common/00\.png: .*the run began with this image; restore it"):
        prepare(images, begun)
    without = Begun(begun.path, [row for row in begun.split if row.id != "common/00.png"], {})
    assert parts(prepare(images, without)) == {row.id: row.split for row in without.split}


@pytest.mark.parametrize("after", ["hash_contents", "open_pixels"])
@pytest.mark.parametrize("kind", ["other content", "gone"])
def test_a_file_that_changes_while_it_is_read_is_refused(
    kind: str, after: str, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the run would be of other pixels than its digest says."""
    read = getattr(prepared, after)

    def read_and_change(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        image = images / "common/00.png"
        image.unlink()
        if kind == "other content":
            shutil.copy(images / "common/01.png", image)
        return found

    monkeypatch.setattr(prepared, after, read_and_change)
    with pytest.raises(DataError, match=r"common/00\.png: changed while the images were read; start again when"):
        prepare(images)


@pytest.mark.parametrize(
    ("labels", "error"),
    [("abc", ConfigError), ("0", ConfigError), ("1000", DataError), ("2", DataError), ("50/class", DataError)],
)
def test_bad_labels_are_found_before_images_are_read(
    images: Path, labels: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in ("open_pixels", "content_digest"):
        monkeypatch.setattr(prepared, function, lambda *arguments, **options: pytest.fail("read"))
    with pytest.raises(error, match=r"ask for|not a number of images"):
        prepare(images, labels=labels)
