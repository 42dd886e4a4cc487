"""How a source is found, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from csda.data import SOURCES, load_dataset, split_dataset
from csda.data.splits import list_split
from csda.errors import ConfigError, DataError
from csda.files import write_csv


def test_drawn_set_is_the_default() -> None:
    assert load_dataset().name == load_dataset("synthetic").name == "synthetic"
    assert load_dataset(seed=1).records == load_dataset(None, "synthetic", seed=1).records


def test_source_can_be_named(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    root = make_images(tmp_path, [f"{name}/v_{i}.jpg" for i, name in enumerate(["Ulcer", "Polyp", "Other"])])
    assert load_dataset(root).name == "folder"
    assert load_dataset(root, "kvasir_capsule").records[0].group == "v"
    with pytest.raises(ConfigError, match=f"'nonsense' is unknown; choose one of {', '.join(SOURCES)}"):
        load_dataset(root, "nonsense")
    with pytest.raises(ConfigError, match="needs the folder of its images"):
        load_dataset(None, "folder")


def test_path_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        load_dataset(tmp_path / "nowhere")
    (tmp_path / "images.zip").touch()
    with pytest.raises(DataError, match=r"images.zip is a file; name the folder with the images, unpacked"):
        load_dataset(tmp_path / "images.zip")


def test_split_is_given_back(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    root = make_images(tmp_path / "set", [f"{name}/{i}.png" for name in "ab" for i in range(10)])
    dataset = load_dataset(root)
    split = split_dataset(dataset, labels=4, seed=5)
    write_csv(tmp_path / "split.csv", ("id", "split", "label", "group"), list_split(split, dataset.classes))
    again = load_dataset(root, split=tmp_path / "split.csv")
    assert split_dataset(again, split=tmp_path / "split.csv", labels=8, seed=9) == split


def test_split_that_is_nowhere_or_not_for_this_source(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    root = make_images(tmp_path / "set", ["a/1.png"])
    with pytest.raises(DataError, match="there is no such file or folder to read the split from"):
        load_dataset(root, split="nowhere.csv")
    (tmp_path / "lists").mkdir()
    with pytest.raises(DataError, match="the folder holds no list"):
        load_dataset(root, split=tmp_path / "lists")
    (tmp_path / "lists" / "Val.txt").touch()
    with pytest.raises(ConfigError, match="--split: the source folder has no published lists; give a CSV"):
        load_dataset(root, split=tmp_path / "lists")


def test_sources_need_neither_torch_nor_sklearn(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    root = make_images(tmp_path / "set", [f"{name}/{i}.png" for name in "ab" for i in range(10)])
    code = (
        "import sys; from csda.data import load_dataset, split_dataset;"
        f"split_dataset(load_dataset({str(root)!r}), labels=4);"
        "sys.exit(', '.join({'torch', 'sklearn', 'pydantic', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
