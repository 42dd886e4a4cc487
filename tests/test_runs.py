"""The run folder: whole files, honest refusals, and names of classes that are no trap."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score

from csda import runs, training
from csda.data.splits import SplitRow
from csda.errors import RunError
from csda.files import write_csv
from csda.runs import Run, held
from tiny import COUNTS, InterruptedReporter, train_tiny

FILES = {
    "config.toml",
    "environment.json",
    "manifest.json",
    "split.csv",
    "truth.csv",
    "metrics.jsonl",
    "history.npz",
    "predictions.csv",
    "pseudo_labels.csv",
    "calibration.json",
    "checkpoint.pt",
    "model.safetensors",
    "result.json",
    "tensorboard",
    "thumbnails.npz",
}


@pytest.fixture(scope="module")
def interrupted(tiny_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped after its second epoch; tests work on copies."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(folder.parent / "cache"))
        with pytest.raises(KeyboardInterrupt):
            train_tiny(tiny_images, folder, reporter=InterruptedReporter(2))
    return folder


@pytest.fixture
def stopped(interrupted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "stopped"))


def test_a_finished_run_has_its_files_and_nothing_else(tiny_run: Run) -> None:
    assert {entry.name for entry in tiny_run.folder.iterdir()} == FILES
    assert list((tiny_run.folder / "tensorboard").glob("events.out.tfevents.*"))


def test_result_is_what_scikit_learn_finds_in_the_predictions(tiny_run: Run) -> None:
    with (tiny_run.folder / "predictions.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    classes = header[4:]
    assert classes == sorted(COUNTS)
    test = [line for line in lines if line[1] == "test"]
    truth, predicted = [line[2] for line in test], [line[3] for line in test]
    probs = np.array([line[4:] for line in test], dtype=float)
    areas = [roc_auc_score([label == name for label in truth], probs[:, k]) for k, name in enumerate(classes)]
    assert tiny_run.result["auc"] == pytest.approx(np.mean(areas), abs=1e-12)
    assert tiny_run.result["mca"] == pytest.approx(recall_score(truth, predicted, average="macro"), abs=1e-12)
    assert predicted == [classes[k] for k in probs.argmax(axis=1)]


def test_predictions_are_those_of_the_best_validation_epoch(tiny_run: Run) -> None:
    best = tiny_run.result["best_epoch"]
    areas = [row["val_auc"] for row in tiny_run.metrics]
    assert areas.index(max(areas)) == best - 1
    for part in ("val", "test"):
        probs, labels = tiny_run.predictions.part(part)
        # Nine digits give the float32 back.
        np.testing.assert_array_equal(probs.astype(np.float32), tiny_run.history[f"{part}_probs"][best - 1])
        np.testing.assert_array_equal(labels, tiny_run.labels_of(part))


def test_split_and_truth_name_every_image_once(tiny_run: Run) -> None:
    rows = tiny_run.split
    assert len({row.id for row in rows}) == len(rows) == sum(COUNTS.values())
    unlabeled = {row.id for row in rows if row.split == "unlabeled"}
    assert tiny_run.truth.keys() == unlabeled
    for row in rows:
        assert (row.label == "") == (row.split == "unlabeled")
        assert row.id.startswith(row.label or tiny_run.truth[row.id])


@pytest.mark.parametrize("names", [("id", "split", "label", "predicted"), ("a,b", 'c "d"', "ünï", "x y")])
def test_predictions_are_read_whatever_a_class_is_called(names: tuple[str, ...], tmp_path: Path) -> None:
    split = [SplitRow("one", "val", names[3], ""), SplitRow("two", "test", names[0], "")]
    run = _written_run(tmp_path, names, split)
    probs = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    rows = [["one", "val", names[3], names[3], *probs[0]], ["two", "test", names[0], names[0], *probs[1]]]
    run.finish([], rows, [], {})
    predictions = Run(run.folder).predictions
    assert predictions.ids == ["one", "two"]
    assert predictions.splits.tolist() == ["val", "test"]
    assert predictions.labels.tolist() == [3, 0]
    np.testing.assert_array_equal(predictions.probs, probs)


def test_metrics_are_json_also_where_a_figure_is_not_defined(tmp_path: Path) -> None:
    run = _written_run(tmp_path, ("a", "b"))
    first = {"epoch": 1, "loss": 0.5, "pseudo_mca": float("nan"), "test_auc": np.float64("inf")}
    run.write_epoch(first, {"x": np.zeros(2)}, [])
    run.write_epoch({"epoch": 2, "loss": 0.25}, {"x": np.zeros(2)}, [first])
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"epoch": 1, "loss": 0.5, "pseudo_mca": None, "test_auc": None},
        {"epoch": 2, "loss": 0.25},
    ]
    assert Run(run.folder).metrics[0]["pseudo_mca"] is None


def test_history_has_nan_where_an_epoch_lacks_an_array(tiny_run: Run) -> None:
    history = tiny_run.history
    assert history["epochs"].tolist() == [1, 2, 3]
    assert np.isnan(history["queue_counts"][0]).all()
    assert np.isfinite(history["queue_counts"][1:]).all()
    for name in ("labeled_marginals", "unlabeled_marginals", "aligned_marginals", "temperatures", "flips"):
        assert history[name].shape[0] == 3, name


def test_checkpoint_loads_with_weights_only(tiny_run: Run) -> None:
    state = torch.load(tiny_run.folder / "checkpoint.pt", weights_only=True)
    assert state["epoch"] == 3
    assert {"model", "method", "optimizer", "best_weights"} <= state.keys()


# --- checkpoints that are none ---------------------------------------------------------------------------------------


class Trap:
    """Runs code when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def _list(path: Path) -> None:
    torch.save([1, 2], path)


def _text(path: Path) -> None:
    path.write_text("no checkpoint")


def _pickled_code(path: Path) -> None:
    path.write_bytes(pickle.dumps(Trap(path.parent / "trap")))


def _saved_code(path: Path) -> None:
    torch.save({"format": runs._CHECKPOINT_FORMAT, "model": Trap(path.parent / "trap")}, path)


def _save(state: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(runs.seal_archive(buffer.getvalue()))


def _other_config(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["config"] = state["config"].replace("seed = 0", "seed = 1")
    _save(state, path)


def _unknown_setting(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    state["config"] = "speed = 3\n" + state["config"]
    _save(state, path)


DAMAGES = [
    _truncate,
    _empty,
    _flip,
    _foreign,
    _list,
    _text,
    _pickled_code,
    _saved_code,
    _other_config,
    _unknown_setting,
]


def test_a_checkpoint_with_its_settings_in_another_form_goes_on(stopped: Path, tiny_images: Path) -> None:
    """As files had them before a library wrote them: lists in one line."""
    path = stopped / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    state["config"], changed = re.subn(
        r"\[\n([^\]]*?),\n\]", lambda match: f"[{' '.join(match[1].split())}]", state["config"]
    )
    assert changed
    _save(state, path)
    assert train_tiny(tiny_images, stopped, resume=True).finished


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_torn_or_foreign_checkpoint_is_refused(
    damage: Callable[[Path], None], stopped: Path, tiny_images: Path
) -> None:
    damage(stopped / "checkpoint.pt")
    kept = (stopped / "model.safetensors").read_bytes()
    with pytest.raises(RunError, match=r"checkpoint\.pt: .*; delete checkpoint\.pt to start this run from the beg"):
        train_tiny(tiny_images, stopped, resume=True)
    assert not (stopped / "trap").exists()
    assert (stopped / "model.safetensors").read_bytes() == kept
    assert not (stopped / "result.json").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "history/00001.npz"])
def test_a_checkpoint_without_its_epochs_is_refused(name: str, stopped: Path, tiny_images: Path) -> None:
    (stopped / name).unlink()
    with pytest.raises(RunError, match=r"lacks epochs that checkpoint\.pt has; delete checkpoint\.pt"):
        train_tiny(tiny_images, stopped, resume=True)


def test_the_way_out_leads_out(stopped: Path, tiny_images: Path, tiny_run: Run) -> None:
    (stopped / "checkpoint.pt").unlink()
    train_tiny(tiny_images, stopped, resume=True)
    assert (stopped / "predictions.csv").read_bytes() == (tiny_run.folder / "predictions.csv").read_bytes()


def test_any_flipped_byte_is_noticed_or_harmless(tmp_path: Path) -> None:
    run = _written_run(tmp_path, ("a", "b"))
    weights = torch.arange(600.0)
    run.save_checkpoint({"model": {"weights": weights}, "epoch": 0})
    path = run.folder / "checkpoint.pt"
    whole = path.read_bytes()
    generator = random.Random(0)
    noticed = 0
    for position in generator.sample(range(len(whole)), 200):
        content = bytearray(whole)
        content[position] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        try:
            state = run.load_checkpoint()
        except RunError:
            noticed += 1
        else:
            assert state is not None
            assert torch.equal(state["model"]["weights"], weights)
            assert state["epoch"] == 0
    assert noticed > 100


def test_the_best_model_goes_back_to_the_checkpoint(stopped: Path, tiny_images: Path, tiny_run: Run) -> None:
    """A model file from after the checkpoint, as a kill between the two leaves it, is not mixed with older epochs."""
    state = torch.load(stopped / "checkpoint.pt", weights_only=True)
    weights = {name: torch.zeros_like(value) for name, value in state["best_weights"].items()}
    Run(stopped).write_model(weights, {"csda": "{}"})
    train_tiny(tiny_images, stopped, resume=True)
    assert (stopped / "model.safetensors").read_bytes() == (tiny_run.folder / "model.safetensors").read_bytes()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RunError, match=r"no config\.toml here, so this is not a run folder"):
            Run(folder)


def test_an_unfinished_run_says_how_to_go_on(stopped: Path) -> None:
    for name in ("history", "predictions", "result"):
        with pytest.raises(RunError, match=f"the run has not finished: `csda train --out {stopped} --resume`"):
            getattr(Run(stopped), name)


def test_a_damaged_file_is_named(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    for name in ("history.npz", "model.safetensors", "result.json", "environment.json"):
        (run.folder / name).write_bytes((run.folder / name).read_bytes()[:-40] + b"\0" * 10)
    for name in ("metrics.jsonl", "split.csv", "truth.csv"):
        (run.folder / name).write_text((run.folder / name).read_text().rpartition(",")[0])
    for read in ("history", "result", "environment", "metrics", "split", "truth", "read_weights"):
        with pytest.raises(RunError, match=rf"{run.folder}/\S+: .*restore|{run.folder}/\S+, row \d+: .*restore"):
            getattr(run, read)()


def test_flipped_bytes_in_the_history_are_noticed(tiny_run: Run, tmp_path: Path) -> None:
    run = Run(shutil.copytree(tiny_run.folder, tmp_path / "run"))
    path = run.folder / "history.npz"
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("test_probs.npy")
    content = bytearray(path.read_bytes())
    content[member.header_offset + len(member.filename) + 60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"history\.npz: damaged"):
        _ = run.history


def test_a_full_disk_keeps_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "table.csv"
    write_csv(path, ("a",), [["old"]])
    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(RunError, match=r"table\.csv: no space left on device; free some space"):
        write_csv(path, ("a",), [["new"]] * 10_000)
    assert path.read_text() == "a\nold\n"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "cache"] == ["table.csv"]


def test_a_training_on_a_full_disk_resumes_when_there_is_space(
    tiny_images: Path, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    fsync = os.fsync
    left = 9

    def fill_up(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill_up)
        with pytest.raises(RunError, match=rf"{out}/\S+: no space left on device; free some space, then continue"):
            train_tiny(tiny_images, out)
    assert not list(out.rglob(".*"))
    train_tiny(tiny_images, out, resume=True)
    assert (out / "predictions.csv").read_bytes() == (tiny_run.folder / "predictions.csv").read_bytes()


def test_a_read_only_place_is_named(tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(RunError, match=rf"{out}: .*give another --out"):
            train_tiny(tiny_images, out)

    def refuse(self: Path, *arguments: object, **options: object) -> io.BytesIO:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(RunError, match=r"x\.csv: read-only file system; make it writable, or give another --out"):
            write_csv(tmp_path / "x.csv", ("a",), [])


def test_a_folder_in_use_is_left_alone(tiny_run: Run, tiny_images: Path, tmp_path: Path) -> None:
    before = {entry.name: entry.stat().st_mtime_ns for entry in tiny_run.folder.iterdir()}
    with pytest.raises(RunError, match=r"holds a run; give --resume to continue it, or another --out"):
        train_tiny(tiny_images, tiny_run.folder)
    assert {entry.name: entry.stat().st_mtime_ns for entry in tiny_run.folder.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "split.csv").write_text("precious")
    for resume in (False, True):
        with pytest.raises(RunError, match=r"mine: not empty, and not a run; give another --out"):
            train_tiny(tiny_images, tmp_path / "mine", resume=resume)
    assert (tmp_path / "mine" / "split.csv").read_text() == "precious"


def _written_run(folder: Path, classes: tuple[str, ...], split: Sequence[SplitRow] = ()) -> Run:
    from csda.presets import configure

    environment = {"classes": list(classes), "multi_label": False, "remarks": []}
    return Run.create(folder / "run", configure({}), environment, split, {})


def test_two_processes_do_not_train_one_run(tiny_images: Path, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", epochs=2)
    with held(run.folder), pytest.raises(RunError, match="another process is training"), held(run.folder):
        pass
    with held(run.folder):
        pass


def test_a_folder_is_looked_at_and_filled_under_its_lock(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def under_lock(name: str) -> None:
        original = getattr(training, name)

        def look(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            with pytest.raises(RunError, match="another process is training"), held(tmp_path / "run"):
                pass
            return original(*arguments, **options)

        monkeypatch.setattr(training, name, look)

    for name in ("require_unused", "prepare_data", "fit"):
        under_lock(name)
    train_tiny(tiny_images, tmp_path / "run", epochs=2)
    assert seen == ["require_unused", "prepare_data", "fit"]


def test_a_folder_in_which_nothing_was_written_is_removed_again(tmp_path: Path) -> None:
    with held(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run").is_dir()
    assert not (tmp_path / "new" / "run").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("precious")
    with held(tmp_path / "mine"):
        pass
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["notes"]


_START = """
import sys, time
from pathlib import Path
from typing import Any
from tiny import train_tiny
from csda.errors import RunError

print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
try:
    train_tiny(Path(sys.argv[1]), Path(sys.argv[2]), seed=int(sys.argv[4]), epochs=2)
except RunError as error:
    print(error)
    sys.exit(3)
"""


def test_of_trainings_that_start_at_once_on_one_folder_one_is_made(tiny_images: Path, tmp_path: Path) -> None:
    """They differ in their seed, so that files of two runs would show."""
    out, go = tmp_path / "run", tmp_path / "go"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _START, str(tiny_images), str(out), str(go), str(seed)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    go.touch()
    said = [process.communicate(timeout=120)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert sorted(codes) == [0, 3, 3, 3], said
    assert all("another process is training" in text or "holds a run" in text for text in said if text)
    winner = codes.index(0)
    alone = train_tiny(tiny_images, tmp_path / "alone", seed=winner, epochs=2)
    for name in ("config.toml", "split.csv", "predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert (out / name).read_bytes() == (alone.folder / name).read_bytes(), name
