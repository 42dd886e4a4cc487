"""`csda data check`: what it finds, what it calls a problem, and its page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csda.data import load_dataset, synthetic
from csda.data.check import Report, check, run_check, write_page
from csda.data.splits import make_split
from csda.errors import DataError
from csda.presets import configure
from csda.training import train


def make_class(root: Path, name: str, count: int, grey: bool = False) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for number in range(count):
        rng = np.random.default_rng([number, len(name), *name.encode()])
        pixels = rng.integers(0, 255, (12, 16 + number % 2) if grey else (12, 16 + number % 2, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    make_class(tmp_path / "images", "healthy", 12)
    make_class(tmp_path / "images", "ill", 6)
    make_class(tmp_path / "images", "unlabeled", 4)
    return tmp_path / "images"


def fact(report: Report, name: str) -> str:
    return dict(report.facts)[name]


def test_a_sound_folder(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = check(load_dataset(images))
    assert [(count.name, count.images) for count in report.counts] == [("healthy", 12), ("ill", 6)]
    assert fact(report, "Images") == "22"
    assert fact(report, "Labeled") == "18, 4 unlabeled"
    assert fact(report, "Sizes") == "16 to 17 wide, 12 high; 50% are 16×12"
    assert fact(report, "Colour") == "22 in colour, 0 grey"
    assert (report.problems, report.duplicates, report.unreadable) == ((), (), ())
    assert run_check(images) == 0
    output = capsys.readouterr().out
    assert "Nothing would stop a training." in output
    assert re.search(r"healthy +12", output)


def test_grey(tmp_path: Path) -> None:
    make_class(tmp_path, "a", 5, grey=True)
    make_class(tmp_path, "b", 5, grey=True)
    assert fact(check(load_dataset(tmp_path)), "Colour") == "all grey"


def test_grey_stored_in_colour(tmp_path: Path) -> None:
    for folder in (make_class(tmp_path, "a", 5, grey=True), make_class(tmp_path, "b", 5)):
        for path in folder.iterdir():
            with Image.open(path) as image:
                image.convert("RGB").save(path)
    assert fact(check(load_dataset(tmp_path)), "Colour") == "5 in colour, 5 grey"


def test_duplicates_by_content(images: Path) -> None:
    shutil.copy(images / "ill/02.png", images / "healthy/again.png")
    shutil.copy(images / "ill/03.png", images / "ill/again.png")
    report = check(load_dataset(images))
    assert {tuple(record.id for record in same) for same in report.duplicates} == {
        ("healthy/again.png", "ill/02.png"),
        ("ill/03.png", "ill/again.png"),
    }
    assert fact(report, "Duplicates") == "2"
    assert any(remark.startswith("duplicates with different labels: 1") for remark in report.remarks)
    assert report.problems == ()


def test_unreadable_files_are_listed_and_stop_when_many(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (images / "ill/05.png").write_bytes((images / "ill/05.png").read_bytes()[:50])
    (images / "ill/text.png").write_text("no image")
    report = check(load_dataset(images), max_unreadable=0.5)
    assert [record.id for record, _ in report.unreadable] == ["ill/05.png", "ill/text.png"]
    assert report.problems == ()
    assert run_check(images) == 1
    output = capsys.readouterr().out
    assert f"{images / 'ill/text.png'}: is not an image in a known format" in output
    assert "Would stop a training: 2 of 23 images" in output


def test_all_problems_are_named(images: Path) -> None:
    make_class(images, "single", 1)
    (images / "ill/empty.png").write_bytes(b"")
    report = check(load_dataset(images))
    assert fact(report, "Too small to split") == "single (1)"
    assert len(report.problems) == 2
    assert "cannot be read" in report.problems[0]
    assert "class single has 1 labeled image" in report.problems[1]


def test_what_cannot_be_loaded_is_a_problem_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_check(tmp_path / "nowhere") == 1
    (tmp_path / "image.png").write_bytes(b"")
    assert run_check(tmp_path) == 1
    assert capsys.readouterr().out.count("Would stop a training: ") == 2


def test_groups_that_cross(tmp_path: Path) -> None:
    make_class(tmp_path, "pictures", 30)
    rows = "".join(f"{n:02d}.png,{'ab'[n % 2]},patient {n % 3}\n" for n in range(30))
    (tmp_path / "labels.csv").write_text("image,label,group\n" + rows)
    report = check(load_dataset(tmp_path))
    assert fact(report, "Groups") == "3, of up to 10 images"
    assert not any("groups also occur in training" in remark for remark in report.remarks)
    parts = "".join(f"{row},{('train', 'train', 'val', 'test')[n // 8]}\n" for n, row in enumerate(rows.splitlines()))
    (tmp_path / "labels.csv").write_text("image,label,group,split\n" + parts)
    remarks = check(load_dataset(tmp_path)).remarks
    assert any("3 of 3 test groups also occur in training" in remark for remark in remarks)


def test_drawn_set() -> None:
    report = check(synthetic.load(images=300))
    assert report.problems == ()
    assert fact(report, "Formats").startswith("drawn")


def test_page(images: Path, tmp_path: Path) -> None:
    shutil.move(images / "ill", images / 'ill <script>alert("x")</script>')
    (images / "healthy/broken <i>.png").write_text("no image")
    page = tmp_path / "new" / "page.html"
    assert run_check(images, html=page) == 1
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "broken &lt;i&gt;.png" in text
    assert "ill &lt;script&gt;" in text
    assert text.count('src="data:image/jpeg;base64,') == 8 + 6 + 4
    assert not re.search(r'(src|href)="(?!data:)', text)


def test_page_that_cannot_be_written(images: Path) -> None:
    report = check(load_dataset(images))
    with pytest.raises(DataError, match="name another file"):
        write_page(report, images / "ill/00.png/page.html")


def test_nothing_is_written(images: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in images.rglob("*")}
    run_check(images)
    assert {path: path.stat().st_mtime_ns for path in images.rglob("*")} == before


def test_published_counts(tmp_path: Path) -> None:
    """The layout of HAM10000 with a handful of its images."""
    folder = make_class(tmp_path, "HAM10000_images_part_1", 30)
    rows = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"ISIC_{number:07d}.png")
        rows.append(f"HAM_{number // 2},ISIC_{number:07d},{('mel', 'nv', 'df')[number % 3]},histo,50,male,back")
    (tmp_path / "HAM10000_metadata.csv").write_text("\n".join(rows))
    report = check(load_dataset(tmp_path))
    shown = {count.name: (count.images, count.published) for count in report.counts}
    assert shown["MEL"] == (10, 1113)
    assert shown["groups"] == (15, 7470)
    assert any("9 of 9 counts differ from the published ones" in remark for remark in report.remarks)
    assert report.problems


def test_real_sets(real_data: Path, tmp_path: Path) -> None:
    report = check(load_dataset(real_data / "ham10000"))
    assert "all counts are as published" in report.remarks
    assert report.problems == ()
    assert report.unreadable == ()
    assert fact(report, "Sizes") == "all 200×150"
    write_page(report, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_the_example_of_duplicates_in_two_parts_is_one(images: Path) -> None:
    dataset = load_dataset(images)
    parts = {record.id: part for part, members in make_split(dataset).parts() for record in members}
    first, second = [name for name, part in parts.items() if part == "labeled" and name.startswith("healthy")][:2]
    other = next(name for name, part in parts.items() if part == "test" and name.startswith("healthy"))
    for name in (second, other):
        shutil.copy(images / first, images / name)
    (remark,) = [text for text in check(load_dataset(images)).remarks if "different parts" in text]
    assert other in remark


def test_a_method_that_needs_unlabeled_images_is_refused_as_by_a_training(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(images / "unlabeled")
    config = configure({"data": str(images), "method": "self-train"})
    assert run_check(images, config=config, needs_unlabeled=True) == 1
    shown = capsys.readouterr().out
    with pytest.raises(DataError) as refused:
        train(images, method="self-train", out=images.parent / "run", settings={"preset": "quick"})
    assert f"Would stop a training: {refused.value}" in shown
    assert "Nothing would stop" not in shown
    assert run_check(images, config=configure({"data": str(images), "method": "baseline"})) == 0
