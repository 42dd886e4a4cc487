"""Predictions for many files: in bounded memory, going on where they stopped, and over workers that die."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import csda
from csda import predict
from csda.data.records import Pixels
from csda.errors import DataError, RunError
from csda.files import lock
from csda.inference import ImageFiles, partial_of, predict_table
from csda.runs import Run
from tiny import train_tiny


def _names(*given: str | Path) -> list[str]:
    return [str(path) for path in ImageFiles(given)]


def test_folders_patterns_and_lists_name_the_same_files(tiny_images: Path, tmp_path: Path) -> None:
    folder = tiny_images / "rare"
    expected = sorted(str(path) for path in folder.iterdir())
    assert _names(folder) == expected
    assert _names(folder / "*.png") == expected
    assert _names(tiny_images / "**" / "0*.png") == sorted(str(path) for path in tiny_images.rglob("0*.png"))
    assert _names(*expected) == expected
    shutil.copytree(folder, tmp_path / "here")
    (tmp_path / "list.txt").write_text(f"here/00.png\n\n{expected[1]}\n")
    (tmp_path / "list.csv").write_text(f"image,label\nhere/00.png,\n{expected[1]},x\n")
    for listing in ("list.txt", "list.csv"):
        assert _names(tmp_path / listing) == [str(tmp_path / "here" / "00.png"), expected[1]]
    (tmp_path / "wrong.csv").write_text("file\na.png\n")
    with pytest.raises(DataError, match="no column `image` among file"):
        _names(tmp_path / "wrong.csv")
    with pytest.raises(DataError, match="no images there"):
        ImageFiles([tmp_path / "*.jpg"]).count()
    with pytest.raises(DataError, match="an empty name instead of images"):  # not the current folder
        ImageFiles([folder, ""])
    for wrong in ("imagse", "list.tsv", "lst.csv"):
        with pytest.raises(DataError, match=f"{wrong}: does not exist; correct the name"):
            ImageFiles([folder, tmp_path / wrong]).count()
    assert ImageFiles([folder, tmp_path / "absent.png"]).count() == len(expected) + 1  # it gets a row that says so


def test_no_more_than_a_few_batches_are_ever_in_memory(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, lock = csda.load(tiny_run.folder), threading.Lock()
    asked, read, most = 0, 0, 0

    def paths() -> Iterator[Path]:
        nonlocal asked
        for number in range(2000):
            asked += 1
            yield Path(f"{number}.png")

    def read_image(path: Path, size: int, channels: int, aspect: str) -> Pixels:
        nonlocal read
        with lock:
            read += 1
        return np.full((size, size, channels), int(path.stem) % 256, np.uint8)

    monkeypatch.setattr(predict, "read_image", read_image)
    batch, found = 16, []
    for done, outcome in enumerate(predictor.stream(paths(), batch, jobs=2)):
        found.append(outcome)
        most = max(most, asked - done, read - done)
    assert [outcome.path.name for outcome in found] == [f"{number}.png" for number in range(2000)]
    assert most <= (predict.AHEAD + 3) * batch
    expected = predictor.predict(np.full((1, 32, 32, 3), 5, np.uint8))[0]
    for number in (5, 261, 1797):
        np.testing.assert_allclose(found[number].probs, expected, atol=1e-5)


def test_files_are_decoded_while_the_network_computes(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, later = csda.load(tiny_run.folder), threading.Event()

    def read_image(path: Path, size: int, channels: int, aspect: str) -> Pixels:
        if int(path.stem) >= 8:
            later.set()
        return np.zeros((size, size, channels), np.uint8)

    monkeypatch.setattr(predict, "read_image", read_image)
    overlapped: list[bool] = []
    handle = predictor.model.register_forward_hook(lambda *_: overlapped.append(later.wait(10)))
    list(predictor.stream((Path(f"{number}.png") for number in range(16)), 8, jobs=1))
    handle.remove()
    assert overlapped[0]


def _rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_table_that_was_cut_off_goes_on_where_it_stopped(tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    images, run = shutil.copytree(tiny_images, tmp_path / "images"), tiny_run.folder
    (images / "common" / "05.png").write_bytes(b"no image")
    whole, out = tmp_path / "whole.csv", tmp_path / "table.csv"
    counts = predict_table(run, [images], whole)
    assert counts == (62, 1)
    stop = """
import os, signal
from csda import inference
inference.BATCH, write = 8, inference._PartialTable.write
def die(table, text):
    write(table, text)
    if "21.png" in text:
        write(table, "images/comm")
        os.kill(os.getpid(), signal.SIGKILL)
inference._PartialTable.write = die
from csda.cli import main
main()
"""
    words = ["predict", str(run), str(images), "--out", str(out), "-q"]
    killed = subprocess.run([sys.executable, "-c", stop, *words], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(_rows(partial_of(out))) == 1 + 24 + 1
    with pytest.raises(RunError, match=r"table\.csv\.partial: left by an interrupted call; give --resume"):
        predict_table(run, [images], out)
    with pytest.raises(RunError, match="begun with another model or other options"):
        predict_table(run, [images], out, resume=True, tta=True)
    with pytest.raises(RunError, match=r"begun with other images, such as .*common/00\.png"):
        predict_table(run, [images / "rare"], out, resume=True)
    # What was done is not looked at again.
    (images / "common" / "00.png").write_bytes(b"no image any more")
    assert predict_table(run, [images], out, resume=True) == (62, 1)
    assert out.read_text() == whole.read_text()
    assert {path.name for path in tmp_path.glob("table*")} == {"table.csv"}
    assert predict_table(run, [images], out, resume=True) == (62, 1)
    assert out.read_text() == whole.read_text()


def test_a_complete_table_is_resumed_only_for_the_same_images(tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    run, out = tiny_run.folder, tmp_path / "table.csv"
    images = sorted((tiny_images / "rare").iterdir())
    assert predict_table(run, images[:5], out) == (5, 0)
    written = out.read_bytes()
    with pytest.raises(RunError, match=r"table\.csv: complete, but without some of these images"):
        predict_table(run, images[:6], out, resume=True)
    for others in (images[:4], images[1:6]):
        with pytest.raises(RunError, match=r"table\.csv: begun with other images"):
            predict_table(run, others, out, resume=True)
    assert out.read_bytes() == written
    out.write_bytes(written.replace(b"rare,", b"else,", 1))
    with pytest.raises(RunError, match=r"table\.csv: not a table of this model"):
        predict_table(run, images[:5], out, resume=True)


def test_a_table_has_one_writer(tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    out = tmp_path / "table.csv"
    with partial_of(out).open("wb") as other:
        assert lock(other.fileno())
        with pytest.raises(RunError, match=r"table\.csv\.partial: another process is writing this table"):
            predict_table(tiny_run.folder, [tiny_images], out)
    assert predict_table(tiny_run.folder, [tiny_images], out) == (62, 0)


@pytest.fixture(scope="module")
def sure_run(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with enough validation images for sets."""
    folder = tmp_path_factory.mktemp("sure")
    rows = ["id,split,label,group"]
    for path in sorted(tiny_images.rglob("*.png")):
        number = int(path.stem)
        part = ("labeled", "val", "val", "test")[number % 4]
        rows.append(f"{path.parent.name}/{path.name},{part},{path.parent.name},")
    (folder / "split.csv").write_text("\n".join(rows) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder / "cache"))
        split, settings = str(folder / "split.csv"), {"method": "baseline", "labels": None, "epochs": 6, "lr": 0.1}
        return train_tiny(tiny_images, folder / "run", split=split, **settings)


def test_rows_say_label_confidence_set_and_whether_they_are_unsure(
    sure_run: Run, tiny_images: Path, tmp_path: Path
) -> None:
    predict_table(sure_run.folder, [tiny_images], tmp_path / "table.csv")
    (header, *rows), classes = _rows(tmp_path / "table.csv"), sure_run.classes
    assert header == ["image", "predicted", "confidence", "unsure", "set", *classes, "error"]
    calibration = sure_run.calibration
    assert calibration is not None
    limits = np.array(calibration.level(0.9).limits)
    sizes = set()
    for row in rows:
        probs = np.array(row[5:-1], dtype=float)
        within = {name for name, score, limit in zip(classes, 1 - probs, limits, strict=True) if score < limit - 1e-3}
        beyond = {name for name, score, limit in zip(classes, 1 - probs, limits, strict=True) if score > limit + 1e-3}
        members = set(row[4].split("|"))
        assert within | {row[1]} <= members
        assert not members & (beyond - {row[1]})
        assert (row[3] == "yes") == (len(members) > 1)
        assert float(row[2]) == pytest.approx(probs.max(), abs=1e-4)
        sizes.add(len(members))
    assert len(sizes) > 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_ray_predicts_the_same_though_a_worker_is_killed(tiny_run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow")
    generator, images = np.random.default_rng(0), tmp_path / "images"
    images.mkdir()
    for number in range(8):
        Image.fromarray(generator.integers(0, 256, (600, 600, 3), dtype=np.uint8)).save(images / f"{number}.png")
    for number in range(8, 160):
        (images / f"{number:03d}.png").hardlink_to(images / f"{number % 8}.png")
    (images / "broken.png").write_bytes(b"no image")
    out, expected = tmp_path / "table.csv", tmp_path / "expected.csv"
    words = ["predict", str(tiny_run.folder), str(images), "--out", str(out), "-q", "--launcher", "ray", "--jobs", "2"]
    # Small blocks, so that both workers have some.
    code = "from csda import inference; inference.BATCH = 16; from csda.cli import main; main()"
    environment = os.environ | {"RAY_NUM_CPUS": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killed = 0
    while process.poll() is None and not killed:
        if partial_of(out).exists() and len(partial_of(out).read_bytes().splitlines()) > 16:
            for worker in _workers(process.pid)[:1]:
                os.kill(worker, signal.SIGKILL)
                killed += 1
        time.sleep(0.02)
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, killed) == (1, 1), errors
    assert "160 predictions" in said
    predict_table(tiny_run.folder, [images], expected)
    ours, theirs = _rows(out), _rows(expected)
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    for own, other in zip(ours[1:], theirs[1:], strict=True):
        assert own[-1] == other[-1]
        if not own[-1]:
            np.testing.assert_allclose(np.array(own[5:-1], float), np.array(other[5:-1], float), atol=2e-4)


def _workers(ancestor: int) -> list[int]:
    """Processes below one that predict for Ray."""
    parents, titles = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue

    def below(process: int) -> bool:
        while process > 1 and process != ancestor:
            process = parents.get(process, 0)
        return process == ancestor

    return [process for process, title in titles.items() if "RayWorker" in title and below(process)]


def test_predictions_of_several_labels_use_their_thresholds(tiny_run: Run) -> None:
    predictor = csda.load(tiny_run.folder)
    predictor.multi_label, predictor.calibration = True, _fitted()
    probs = np.array([[0.05, 0.9, 0.5], [0.5, 0.5, 0.5]])
    judged = predictor.judge(probs)
    thresholds = np.array(_fitted().thresholds)
    assert judged.labels == [tuple(np.flatnonzero(row >= thresholds).tolist()) for row in probs]
    assert judged.sets is not None
    assert all(set(label) <= set(members) for label, members in zip(judged.labels, judged.sets, strict=True))
    decided = probs >= thresholds
    np.testing.assert_allclose(judged.confidence, np.where(decided, probs, 1 - probs).min(axis=1))


def _fitted() -> Any:
    from csda.calibration import fit

    generator = np.random.default_rng(0)
    probs = generator.random((400, 3))
    return fit(probs, (generator.random((400, 3)) < probs).astype(np.int64))


def test_computing_waits_for_nobody_on_the_host(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probabilities of a batch are fetched after the next batch is on its way."""
    predictor, order = csda.load(tiny_run.folder), list[str]()
    launch, finish = predictor._launch, predictor._finish

    def launched(pixels: Pixels, tta: bool) -> torch.Tensor:
        order.append("launch")
        return launch(pixels, tta)

    def finished(computed: torch.Tensor, calibrated: bool) -> Any:
        order.append("finish")
        return finish(computed, calibrated)

    monkeypatch.setattr(predictor, "_launch", launched)
    monkeypatch.setattr(predictor, "_finish", finished)
    predictor.predict(np.zeros((12, 32, 32, 3), np.uint8), batch_size=4)
    assert order == ["launch", "launch", "finish", "launch", "finish", "finish"]
