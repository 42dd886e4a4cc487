"""Mistakes and odd circumstances end in one sentence, or in nothing at all: never in a traceback."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from commands import Command, is_one_sentence
from csda import runs, training
from csda.data import content, load_dataset
from csda.data.cache import digest
from csda.data.decode import UnreadableError, read_image
from csda.errors import CsdaError, DataError
from csda.predict import load
from csda.presets import configure
from csda.progress import Reporter
from csda.research.ledger import ContentFinder
from csda.runs import Run
from tiny import arguments, train_tiny


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr=1e308", "lr = 1e+308"),
        ("capacity=1000000000000", "capacity = 1000000000000"),
        ("threads=100000", "threads = 100000"),
        ("lr=nan", "lr = nan"),
        ("image_size=1000000", "image_size = 1000000"),
    ],
)
def test_settings_beyond_all_measure(
    setting: str, message: str, csda: Command, tiny_images: Path, tmp_path: Path
) -> None:
    answer = csda("train", tiny_images, "--out", tmp_path / "run", "--set", setting)
    assert is_one_sentence(answer), answer
    assert answer[2].startswith(f"csda: {message}")
    assert not (tmp_path / "run").exists()


def test_more_threads_than_cores_are_not_started(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", wanted.append)
    train_tiny(tiny_images, tmp_path / "run", epochs=2, steps_per_epoch=1, threads=1024)
    assert wanted == [len(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation"),
    ],
    ids=["Python", "torch on the CPU", "torch on a GPU"],
)
def test_no_memory_is_told_in_a_sentence(
    error: Exception, csda: Command, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(training, "update", fail)
    code, _, said = csda(*arguments(tiny_images, tmp_path / "run", {"tensorboard": "false"}, "--quiet"))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("csda: out of memory (")
    monkeypatch.undo()
    assert train_tiny(tiny_images, tmp_path / "run", resume=True).finished


def test_other_errors_of_torch_are_not_taken_for_it(csda: Command, tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(training, "train", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        csda("train", "--out", tmp_path / "run")


class FolderRemover(Reporter):
    """Removes the event files after the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def epoch(self, row: Mapping[str, Any]) -> None:
        if row["epoch"] == 1:
            shutil.rmtree(self.folder)


def test_event_files_removed_midway(
    tiny_images: Path, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    run = train_tiny(
        tiny_images, tmp_path / "run", tensorboard=True, reporter=FolderRemover(tmp_path / "run" / "tensorboard")
    )
    assert failures == []
    assert len(list((run.folder / "tensorboard").iterdir())) == 1
    assert (run.folder / "predictions.csv").read_bytes() == (tiny_run.folder / "predictions.csv").read_bytes()


def test_libtiff_says_nothing_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, "TIFF", compression="tiff_adobe_deflate")
    content = bytearray(file.getvalue())
    content[200:400] = bytes(200)
    path = tmp_path / "a.tif"
    path.write_bytes(content)
    with pytest.raises(UnreadableError, match=str(path)):
        read_image(path, 16, 3)
    assert capfd.readouterr().err == ""


EXPERIMENTS = {
    'title = 3\nlabels = ["1"]\nrows = [{method = "csda", blah = 3}]\n': (
        "title = 3: give a text; seeds: missing; rows.0.blah: unknown; correct it"
    ),
    'title = "t"\nlabels = ["1"]\nseeds = [0]\nrows = []\n[splits]\na = {x = [1]}\n': "splits.a.x = [1]: ",
    "title = ": "not a TOML file (",
    "title = '\udcff'": "not a TOML file (",
}


@pytest.mark.parametrize("text", EXPERIMENTS, ids=range(len(EXPERIMENTS)))
def test_a_mistake_in_an_experiment(text: str, csda: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    answer = csda("reproduce", path)
    assert is_one_sentence(answer), answer
    assert answer[2].startswith(f"csda: {path}: {EXPERIMENTS[text]}")
    assert "pydantic" not in answer[2]


def test_a_pipe_in_the_place_of_an_experiment_or_a_review(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    for name in ("mine.toml", "review.json"):
        os.mkfifo(tmp_path / name)
    for words in (
        ("reproduce", tmp_path / "mine.toml"),
        ("labels", "export", tmp_path),
        ("train", tiny_images, "--labels-from", tmp_path, "--out", tmp_path / "run"),
    ):
        assert is_one_sentence(csda(*words)), words


def test_a_second_grid_on_the_same_runs(csda: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another process is training is named, with what to do; `reproduce` has no --resume."""
    text = 'title = "t"\nlabels = ["150"]\nseeds = [0]\nrows = [{method = "baseline"}]\n'
    (tmp_path / "mine.toml").write_text(text)
    monkeypatch.setattr("csda.research.reproduce.launch", _train_elsewhere)
    where = ("--runs", tmp_path / "runs", "--out", tmp_path / "tables")
    code, _, said = csda("reproduce", tmp_path / "mine.toml", *where)
    assert (code, said.count("\n")) == (2, 1)
    assert "another process is training this run; wait for it to end" in said
    assert "--resume" not in said


def _train_elsewhere(cells: Any, **_: object) -> Any:
    """Each cell while somebody else has its folder."""
    for cell in cells:
        with runs.held(cell.folder), pytest.raises(CsdaError) as refused:
            cell.train()
        yield cell, refused.value


def test_predictions_of_files_whose_names_are_not_utf8(
    csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path
) -> None:
    bad = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.png")
    shutil.copy(tiny_images / "rare" / "00.png", bad)
    missing = os.fsdecode(os.fsencode(tmp_path) + b"/\xfe.png")
    sound = tiny_images / "rare" / "01.png"
    code, printed, _ = csda("predict", tiny_run.folder, bad, missing, sound)
    rows = [line.split(",") for line in printed.splitlines()]
    assert code == 1
    assert [row[0] for row in rows[1:]] == [f"{tmp_path}/\\udcff.png", f"{tmp_path}/\\udcfe.png", str(sound)]
    assert [bool(row[1]) for row in rows[1:]] == [True, False, True]
    out = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.csv")
    code, printed, _ = csda("predict", tiny_run.folder, bad, "--out", out)
    assert (code, printed) == (0, f"1 predictions in {tmp_path}/\\udcff.csv\n")
    assert len(Path(out).read_text().splitlines()) == 2
    assert is_one_sentence(csda("predict", os.fsdecode(b"/\xff"), sound))
    folder = Path(shutil.copytree(tiny_images / "rare", tmp_path / "images"))
    shutil.copy(sound, os.fsdecode(os.fsencode(folder) + b"/\xff.png"))
    code, printed, _ = csda("predict", tiny_run.folder, folder)
    assert (code, printed.splitlines()[-1].split(",")[0]) == (0, f"{folder}/\\udcff.png")
    assert len(printed.splitlines()) == 1 + len(list(folder.iterdir()))


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
def test_nothing_but_a_file_is_replaced(
    kind: str, csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path
) -> None:
    """Where a device is overwritten, as root may, no program of the machine has it any more."""
    out, run = tmp_path / "out", tiny_run.folder
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "folder":
        out.mkdir()
    else:
        out.symlink_to(os.devnull)
    for words in (("predict", run, tiny_images / "rare"), ("report", run, run)):
        answer = csda(*words, "--out", out)
        assert is_one_sentence(answer), answer
        assert answer[2] == f"csda: {out}: not a regular file, and a file would replace it; give another --out\n"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        assert not out.is_file()


KEYS = ("classes", "multi_label", "image_size", "channels", "backbone")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_missing_in_the_description_of_a_model(
    key: str, csda: Command, tiny_run: Run, tiny_images: Path, tmp_path: Path
) -> None:
    """Of a model that knows neither itself nor a manifest, as older ones do."""
    folder = Path(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    (folder / "manifest.json").unlink()
    weights, description = Run(folder).read_weights()
    model = json.loads(description["csda"])
    del model[key], model["sha256"]
    save_file(weights, folder / "model.safetensors", metadata={"csda": json.dumps(model)})
    answer = csda("predict", folder, tiny_images / "rare" / "00.png")
    assert is_one_sentence(answer), answer
    assert f"{folder / 'model.safetensors'}: not a model of csda" in answer[2]


def test_one_path_is_one_image(tiny_run: Run, tiny_images: Path) -> None:
    image = tiny_images / "rare" / "00.png"
    predictor = load(tiny_run.folder)
    one = predictor.predict(str(image))
    assert one.shape == (1, len(tiny_run.classes))
    np.testing.assert_array_equal(one, predictor.predict([image]))
    with pytest.raises(DataError, match=r"a\.png: does not exist"):
        predictor.predict("a.png")


def test_a_folder_one_level_too_high_is_judged_alike(csda: Command, tiny_images: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_images, tmp_path / "above" / "set")
    expected = (
        f"{tmp_path / 'above'}: all images with a label are in one class, set; "
        f"did you mean the folder {tmp_path / 'above' / 'set'}?\n"
    )
    answer = csda("train", tmp_path / "above", "--out", tmp_path / "run")
    assert is_one_sentence(answer)
    assert answer[2] == f"csda: {expected}"
    code, printed, _ = csda("data", "check", tmp_path / "above")
    assert (code, printed) == (1, f"Would stop a training: {expected}")
    assert csda("data", "check", tmp_path / "above" / "set")[0] == 0


def test_a_table_is_of_the_contents_that_there_are(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing but the content of a file tells of a change, neither its size nor a time nor its inode."""
    images = Path(shutil.copytree(tiny_images, tmp_path / "images"))
    monkeypatch.setattr(content, "file_keys", lambda dataset: [digest(each.id.encode()) for each in dataset.records])
    config = configure({"data": str(images)})
    before = ContentFinder()(config)
    shutil.copy(images / "rare" / "01.png", images / "rare" / "00.png")
    assert content.content_digest(load_dataset(images)) == before["data"]  # what is remembered of it
    assert ContentFinder()(config) != before


@pytest.mark.parametrize(("words", "completion"), [("csda tr", "train"), ("csda data ", "check")])
def test_the_shell_completes(words: str, completion: str) -> None:
    asked = {"_CSDA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    program = "import sys; sys.argv = ['csda']; from csda.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"{completion}\n"
