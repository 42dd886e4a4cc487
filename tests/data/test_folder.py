"""Anybody's own images: the layouts that work, and one sentence for each that cannot."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csda.data import load_dataset, split_dataset
from csda.data.folder import load
from csda.data.records import Dataset
from csda.errors import DataError

MakeImages = Callable[..., Path]


@pytest.fixture
def images(tmp_path: Path, make_images: MakeImages) -> Path:
    return make_images(tmp_path / "set", [f"{name}.png" for name in "abcdef"])


def labels(dataset: Dataset) -> dict[str, object]:
    return {record.id: record.label for record in dataset.records}


# --- one folder a class ---------------------------------------------------------------------------------------------


def test_one_folder_a_class(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(
        tmp_path, ["nv/1.png", "nv/deep/2.JPG", "bcc/1.png", "unlabeled/x.png", "loose.tif", "nv/notes.doc"]
    )
    (root / ".DS_Store").touch()
    dataset = load_dataset(root)
    assert (dataset.name, dataset.classes, dataset.multi_label) == ("folder", ("bcc", "nv"), False)
    assert labels(dataset) == {
        "nv/1.png": 1,
        "nv/deep/2.JPG": 1,
        "bcc/1.png": 0,
        "unlabeled/x.png": None,
        "loose.tif": None,
    }
    assert dataset.remarks == ("left out: 1 file without an image's name, nv/notes.doc for one",)
    assert all(record.path is not None and record.path.is_file() for record in dataset.records)


def test_classes_in_folders_of_parts(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path, ["Train/a/1.png", "train/b/2.png", "valid/a/3.png", "test/b/4.png", "unlabeled/5.png"])
    found = {record.id: (record.label, record.part) for record in load(root).records}
    assert found == {"Train/a/1.png": (0, "train"), "train/b/2.png": (1, "train"), "valid/a/3.png": (0, "val"),
                     "test/b/4.png": (1, "test"), "unlabeled/5.png": (None, "unlabeled")}  # fmt: skip


def test_dicom_without_suffix_is_an_image(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path, ["a/1.png", "b/1.png"])
    (root / "a" / "1.2.840.113").write_bytes(bytes(128) + b"DICM")
    (root / "a" / "README").write_text("none")
    assert set(labels(load(root))) == {"a/1.png", "a/1.2.840.113", "b/1.png"}


def test_a_folder_one_level_too_high_names_the_one_below(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path, ["set/cat/1.png", "set/dog/1.png"])
    with pytest.raises(DataError, match=f"in one class, set; did you mean the folder {tmp_path / 'set'}\\?"):
        load(tmp_path)
    make_images(tmp_path / "one", ["cat/1.png"])
    with pytest.raises(DataError, match="in one class, cat; add another class"):
        load(tmp_path / "one")


def test_a_column_is_refused_where_there_is_no_table(tmp_path: Path, make_images: MakeImages) -> None:
    make_images(tmp_path, ["cat/1.png", "dog/1.png"])
    with pytest.raises(DataError, match="no CSV here with the column `grade`; add it, or leave label_column out"):
        load(tmp_path, label_column="grade")
    with pytest.raises(DataError, match="no CSV here with the column `patient`; add it, or leave group_column out"):
        load(tmp_path, group_column="patient")


def test_folders_of_the_same_names_in_all_classes_are_remarked(tmp_path: Path, make_images: MakeImages) -> None:
    two = make_images(tmp_path / "two", [f"{top}/{name}/1.png" for top in ("left", "right") for name in ("cat", "dog")])
    (remark,) = load(two).remarks
    assert remark == "the folders of all 2 classes have the same folders inside: cat, dog; are these the classes?"
    assert load(make_images(tmp_path / "odd", ["cat/p1/1.png", "cat/p2/1.png", "dog/p3/1.png"])).remarks == ()


def test_gastrovision_as_a_plain_folder(real_data: Path) -> None:
    dataset = load_dataset(real_data / "gastrovision4")
    assert dataset.name == "folder"
    count = Counter(dataset.classes[record.label] for record in dataset.records if isinstance(record.label, int))
    assert count == {"large_bowels": 1467, "colon_polyps": 820, "normal_esophagus": 140, "erythema": 15}
    split = split_dataset(dataset, labels="10%")
    assert {part: len(records) for part, records in split.parts()} == {
        "labeled": 171, "unlabeled": 1539, "val": 244, "test": 488,
    }  # fmt: skip
    for part in (split.labeled, split.val, split.test):
        assert {record.label for record in part} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no images"),
        (["1.png", "2.png"], "has images but no labels; put them into one folder per class, or add a CSV"),
        (["unlabeled/1.png"], "has images but no labels"),
        (["nv/1.png", "NV /2.png"], "'nv' differs from 'NV ' .* only in case or blanks"),
        (["a|b/1.png", "c/2.png"], "cannot be called 'a|b'"),
        (["a\nb/1.png", "c/2.png"], "holds control characters"),
    ],
)
def test_folders_that_cannot_be(names: list[str], message: str, tmp_path: Path, make_images: MakeImages) -> None:
    with pytest.raises(DataError, match=message):
        load(make_images(tmp_path / "set", names))


# --- a table --------------------------------------------------------------------------------------------------------


def test_table_with_groups_and_parts(images: Path) -> None:
    (images / "labels.csv").write_text(
        "image,label,group,split\na.png,nv,p1,train\nb,bcc,p1,Test\nc.png,,p2,\n./d.png,nv,,validation\nset/e.png,bcc,p3,\n"
    )
    found = {record.id: (record.label, record.group, record.part) for record in load_dataset(images).records}
    assert found == {
        "a.png": (1, "p1", "train"), "b.png": (0, "p1", "test"), "c.png": (None, "p2", None),
        "d.png": (1, None, "val"), "e.png": (0, "p3", None), "f.png": (None, None, None),
    }  # fmt: skip


def test_columns_of_other_names(images: Path) -> None:
    (images / "meta.csv").write_text("file,dx,patient,age\na,nv,1,60\nb,bcc,2,50\n")
    dataset = load_dataset(images, image_column="file", label_column="dx", group_column="patient")
    assert labels(dataset)["a.png"] == 1
    assert dataset.records[0].group == "1"
    with pytest.raises(DataError, match="no column `image` among file, dx, patient, age; rename the column"):
        load(images)
    with pytest.raises(DataError, match="no column `fold`"):
        load(images, image_column="file", label_column="dx", split_column="fold")


def test_several_labels_in_a_cell(images: Path) -> None:
    (images / "labels.csv").write_text("image,label\na,edema|mass\nb,mass\nc,(none)\nd,\n")
    dataset = load(images)
    assert (dataset.classes, dataset.multi_label) == (("edema", "mass"), True)
    assert [record.label for record in dataset.records] == [(0, 1), (1,), (), None, None, None]


def test_one_column_a_label(images: Path) -> None:
    (images / "labels.csv").write_text("image,mass,edema,group\na,1,0,p\nb,1.0,1,p\nc,0,0,q\nd,,,q\n")
    dataset = load(images)
    assert (dataset.classes, dataset.multi_label) == (("mass", "edema"), True)
    assert [record.label for record in dataset.records] == [(0,), (0, 1), (), None, None, None]


def test_named_columns_of_flags(images: Path) -> None:
    (images / "labels.csv").write_text("image,age,mass,sex,edema\na,60,1,0,0\nb,50,0,1,1\n")
    assert load(images, label_column="edema,mass").classes == ("edema", "mass")
    with pytest.raises(DataError, match=r"no column `label` among .*columns of 0 and 1 separated by commas"):
        load(images)


def test_one_of_several_tables_is_named(images: Path) -> None:
    for name in ("one.csv", "two.csv"):
        (images / name).write_text("image,label\na,nv\nb,bcc\n")
    with pytest.raises(DataError, match=r"has several CSV files \(one.csv, two.csv\); name the one"):
        load_dataset(images)
    assert load_dataset(images / "two.csv").classes == ("bcc", "nv")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,label\nz.png,nv\n", "row 2: no image is called 'z.png'"),
        ("image,label\na,nv\n../a.png,nv\n", "row 3: '../a.png' is outside of"),
        ("image,label\n/etc/a.png,nv\n", "row 2: '/etc/a.png' is outside of"),
        ("image,label\na,nv\nb,bcc\na.png,bcc\n", r"row 4: differs from row 2 for a.png"),
        ("image,label\na,nv\nb, NV\n", "row 3: class ' NV' differs from 'nv' .*row 2. only in case or blanks"),
        ("image,label,split\na,nv,holdout\n", "row 2: 'holdout' is not a part"),
        ("image,x,y\na,1,0\nb,1,\n", "row 3: '' in column `y`; write 0 or 1"),
        ("image,label\na,\nb,\n", "no row has a label"),
        ("image,label\n,nv\n", "row 2: no image is called ''"),
        ("image,label\n", "no row has a label"),
    ],
)
def test_table_that_cannot_be(text: str, message: str, images: Path) -> None:
    (images / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        load(images)


def test_flag_that_is_none(images: Path) -> None:
    (images / "labels.csv").write_text("image,x,y\na,1,0\nb,1,maybe\n")
    with pytest.raises(DataError, match="row 3: 'maybe' in column `y`"):
        load(images, label_column="x,y")


def test_rows_that_agree_are_one(images: Path) -> None:
    (images / "labels.csv").write_text("image,label\na,nv\nb,bcc\na.png,nv\n")
    assert len(load(images).records) == 6


def test_name_that_two_files_have(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path, ["x/1.png", "y/1.png", "2.png"])
    (root / "labels.csv").write_text("image,label\n1.png,a\n")
    with pytest.raises(DataError, match=r"row 2: '1.png' could be x/1.png or y/1.png; give the path below"):
        load(root)
    (root / "labels.csv").write_text("image,label\nx\\1.png,a\ny/1,b\n")
    with pytest.raises(DataError, match="row 3: no image is called 'y/1'"):
        load(root)


# --- names and links ------------------------------------------------------------------------------------------------


def test_unusual_file_names(tmp_path: Path, make_images: MakeImages) -> None:
    names = ["with space.png", "Müller ☂ 医.png", "a..b.png", "x" * 200 + ".png", 'comma, "quote".png', "-rf.png"]
    root = make_images(tmp_path, [f"{'ab'[i % 2]}/{name}" for i, name in enumerate(names)])
    assert {name.partition("/")[2] for name in labels(load(root))} == set(names)


def test_composed_and_decomposed_names_are_the_same(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path, [unicodedata.normalize("NFD", "é.png"), "b.png"])
    (root / "labels.csv").write_text(unicodedata.normalize("NFC", "image,label\né.png,x\nb.png,y\n"), encoding="utf-8")
    assert sorted(record.label for record in load(root).records if record.label is not None) == [0, 1]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_link_that_leaves_the_folder(kind: str, tmp_path: Path, make_images: MakeImages) -> None:
    outside = make_images(tmp_path / "outside", ["1.png"])
    root = make_images(tmp_path / "set", ["a/1.png", "b/1.png"])
    (root / "a" / "link.png").symlink_to(outside / "1.png" if kind == "file" else outside)
    with pytest.raises(DataError, match=r"link.png is a link that leaves .*set; put the files themselves"):
        load(root)


def test_links_within_the_folder_and_in_a_ring(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path / "set", ["a/1.png", "b/1.png"])
    (root / "b" / "2.png").symlink_to(root / "a" / "1.png")
    (root / "b" / "ring").symlink_to(root)
    (tmp_path / "alias").symlink_to(root)
    assert labels(load(tmp_path / "alias")) == {"a/1.png": 0, "b/1.png": 1, "b/2.png": 1}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_folder_that_may_not_be_read(tmp_path: Path, make_images: MakeImages) -> None:
    root = make_images(tmp_path / "set", ["a/1.png"])
    (root / "a").chmod(0)
    try:
        with pytest.raises(DataError, match="a cannot be read: Permission denied"):
            load(root)
    finally:
        (root / "a").chmod(stat.S_IRWXU)


def test_nothing_is_written_into_the_folder(images: Path) -> None:
    (images / "labels.csv").write_text(
        "image,label\n" + "".join(f"{n},{'xy'[i % 2]}\n" for i, n in enumerate("abcdef"))
    )
    before = {path.name: path.stat().st_mtime_ns for path in [images, *images.iterdir()]}
    images.chmod(0o555)
    try:
        split_dataset(load_dataset(images), labels=2)
    finally:
        images.chmod(0o755)
    assert {path.name: path.stat().st_mtime_ns for path in [images, *images.iterdir()]} == before


cell = st.sampled_from(
    ["a", "b.png", "c", "nv", "bcc", "NV", "nv|bcc", "0", "1", "", "(none)", "test", "..", "|", '"', "é"]
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(["image", "label", "group", "split", "x"]), min_size=1, max_size=4),
    st.lists(st.lists(cell | st.text(max_size=4), min_size=1, max_size=4), max_size=5),
)
def test_any_table_is_read_or_refused_with_its_place(header: list[str], rows: list[list[str]]) -> None:
    with TemporaryDirectory() as folder:
        for name in "abc":
            (Path(folder) / f"{name}.png").touch()
        text = "\n".join(",".join(row) for row in [header, *rows])
        (Path(folder) / "labels.csv").write_text(text, encoding="utf-8")
        try:
            dataset = load(Path(folder))
        except DataError as error:
            message = str(error)
        else:
            assert len(dataset.records) == 3
            assert dataset.classes or dataset.multi_label
            return
    assert "labels.csv" in message
