"""Trainings as a program makes them: repeatable, resumable, and blind to what nobody labeled."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import csda
from csda import environment, metrics, trainer
from csda.config import RunConfig
from csda.data import prepared
from csda.data.prepared import prepare_data
from csda.data.records import Split
from csda.errors import ConfigError, DataError, RunError
from csda.methods import METHODS
from csda.presets import configure
from csda.progress import Reporter, format_duration
from csda.research.ledger import read_line
from csda.runs import Run
from csda.trainer import Trainer
from csda.training import _hold_new_folder, update
from tiny import LABELS, QUEUE, SETTINGS, make_images, train_tiny


class Notes(Reporter):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.steps = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self) -> None:
        self.steps += 1

    def epoch(self, row: Mapping[str, Any]) -> None:
        self.rows.append(dict(row))


class Stop(Notes):
    """Presses Ctrl-C when the first epoch has ended."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt


def _bytes(run: Run, name: str = "predictions.csv") -> bytes:
    return (run.folder / name).read_bytes()


def _trainer(images: Path, **chosen: Any) -> Trainer:
    config = configure(SETTINGS | QUEUE | {"data": str(images), "labels": LABELS} | chosen)
    return Trainer(config, prepare_data(config, Reporter()))


# --- repeatable ----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_numbers_and_another_others(
    tiny_images: Path, tiny_run: Run, tmp_path: Path
) -> None:
    again = train_tiny(tiny_images, tmp_path / "again")
    for name in ("predictions.csv", "pseudo_labels.csv", "split.csv", "model.safetensors"):
        assert _bytes(again, name) == _bytes(tiny_run, name), name
    other = train_tiny(tiny_images, tmp_path / "other", seed=1)
    assert _bytes(other, "split.csv") != _bytes(tiny_run, "split.csv")
    assert _bytes(other) != _bytes(tiny_run)
    same_split = train_tiny(
        tiny_images, tmp_path / "same", seed=1, split=str(tiny_run.folder / "split.csv"), labels=LABELS
    )
    assert [row.id for row in same_split.split] == [row.id for row in tiny_run.split]
    assert _bytes(same_split) != _bytes(tiny_run)


def test_the_estimate_of_the_time_changes_nothing(
    tiny_images: Path, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, measured = Trainer._epoch_seconds, []

    def measure_and_round(held: Trainer) -> float:
        measured.append(measure(held))
        return 40.0

    monkeypatch.setattr(Trainer, "_epoch_seconds", measure_and_round)
    reporter = Notes()
    run = train_tiny(tiny_images, tmp_path / "run", reporter=reporter)
    assert _bytes(run) == _bytes(tiny_run)
    assert reporter.notes[-1] == (
        f"No GPU: preset quick, 3 epochs of 4 steps on 32×32 images, about 2 min 0 s; the run is in {run.folder}"
    )
    assert measured[0] > 0
    assert reporter.steps == 12
    assert any("validation images choose the epoch, which is almost random" in note for note in reporter.notes)


def test_where_nobody_reads_it_no_time_is_estimated(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_epoch_seconds", lambda held: pytest.fail("estimated"))
    train_tiny(tiny_images, tmp_path / "run", method="baseline")


def test_the_estimate_is_near_the_truth(tiny_images: Path) -> None:
    held = _trainer(tiny_images, steps_per_epoch=30)
    before = {name: value.clone() for name, value in held.model.state_dict().items()}
    estimate = held._epoch_seconds()
    for name, value in held.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    held.begin_epoch(1)
    held.method.begin(held.model, held.parts.labeled, held.parts.unlabeled)
    actual = sum(trainer._seconds(update, held, held.step, *inputs) for inputs in held.sample(1))
    actual += trainer._seconds(lambda: held.evaluate(guesses=True))
    assert 0.2 * actual < estimate < 5 * actual


def test_the_first_step_does_not_count_for_the_estimate(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long, for memory and kernels are made ready: half a minute there was told as 27 minutes in all."""
    durations = {"warm_up": 0.1, "step": 0.3, "predict": 0.2}
    calls: dict[str, int] = {}

    def clock(function: Any, *inputs: Any) -> float:
        name = "predict" if not inputs else "step" if len(inputs[1]) else "warm_up"
        calls[name] = calls.get(name, 0) + 1
        return 30.0 if calls[name] == 1 else durations[name]

    monkeypatch.setattr(trainer, "_seconds", clock)
    reporter = Notes()
    run = train_tiny(tiny_images, tmp_path / "run", reporter=reporter)
    counts = {part: sum(row.split == part for row in run.split) for part in ("unlabeled", "val", "test")}
    batch = min(run.config["eval_batch_size"], counts["test"])
    epoch = 4 * 0.1 + (counts["val"] + counts["test"]) / batch * 0.2
    guessing = 4 * 0.2 + counts["unlabeled"] / batch * 0.2
    expected = format_duration(3 * epoch + 2 * guessing)
    assert f"about {expected}; " in reporter.notes[-1]


def test_no_label_of_an_unlabeled_image_reaches_the_training(
    tiny_images: Path, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_dataset = prepared.split_dataset

    def scramble(*arguments: Any, **options: Any) -> Split:
        split = split_dataset(*arguments, **options)
        assert all(record.label is None for record in split.unlabeled)
        ids, labels = list(split.truth), list(split.truth.values())
        return replace(split, truth=dict(zip(ids, labels[7:] + labels[:7], strict=True)))

    monkeypatch.setattr(prepared, "split_dataset", scramble)
    run = train_tiny(tiny_images, tmp_path / "run")
    assert _bytes(run, "truth.csv") != _bytes(tiny_run, "truth.csv")
    for name in ("predictions.csv", "pseudo_labels.csv", "model.safetensors"):
        assert _bytes(run, name) == _bytes(tiny_run, name), name


# --- resuming -----------------------------------------------------------------------------------------------


def test_resuming_where_nothing_is_starts_from_the_beginning(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "new", resume=True)
    assert _bytes(run) == _bytes(tiny_run)


def test_resuming_before_the_first_checkpoint_starts_from_the_beginning(
    tiny_images: Path, tiny_run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, reporter=Stop(), checkpoint_seconds=1000)
    assert not (out / "checkpoint.pt").exists()
    run = train_tiny(tiny_images, out, resume=True, checkpoint_seconds=1000)
    assert _bytes(run) == _bytes(tiny_run)
    assert [row["epoch"] for row in run.metrics] == [1, 2, 3]


def test_a_finished_run_stays_as_it_is(tiny_images: Path, tiny_run: Run) -> None:
    reporter = Notes()
    written = (tiny_run.folder / "result.json").stat().st_mtime_ns
    run = train_tiny(tiny_images, tiny_run.folder, resume=True, reporter=reporter, tensorboard=True)
    assert run.folder == tiny_run.folder
    assert reporter.notes == [f"{run.folder}: this run has already finished"]
    assert (tiny_run.folder / "result.json").stat().st_mtime_ns == written


def test_other_settings_are_listed_and_stop_a_resume(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    changes = {"epochs": 5, "delta": 0.5, "seed": 3, "tensorboard": True}
    with pytest.raises(RunError) as caught:
        train_tiny(tiny_images, tiny_run.folder, resume=True, **changes)
    message = str(caught.value)
    for difference in ("epochs: 3 → 5", "delta: 0.25 → 0.5", "seed: 0 → 3"):
        assert difference in message
    assert str(tiny_run.folder) in message
    assert "tensorboard" not in message
    with pytest.raises(RunError, match="method: 'csda' → 'baseline'"):
        csda.train(tiny_images, method="baseline", out=tiny_run.folder, resume=True, reporter=Reporter())
    with pytest.raises(ConfigError, match="--resume needs --out"):
        csda.train(tiny_images, resume=True)


def test_a_run_goes_on_with_its_data_however_the_way_there_is_written(
    tiny_images: Path, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_images, tmp_path / "img")
    out = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(Path("img"), out, reporter=Stop())
    assert json.loads((out / "environment.json").read_text())["data_digest"] == tiny_run.environment["data_digest"]
    shutil.move("img", "moved")
    for way in ("img", "./img", str(tmp_path / "img")):
        with pytest.raises(DataError, match="there is no such folder"):
            csda.train(way, out=out, resume=True, reporter=Reporter())
    run = csda.train("./moved", out=out, resume=True, reporter=Reporter())
    assert _bytes(run) == _bytes(tiny_run)
    assert run.settings.data == "img"
    again = csda.train(tiny_images, out=out, resume=True, reporter=Reporter())
    assert again.finished


def test_a_run_does_not_go_on_with_other_data(tiny_images: Path, tmp_path: Path) -> None:
    images, other = (shutil.copytree(tiny_images, tmp_path / name) for name in ("img", "other"))
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(images, out, reporter=Stop())
    kept = (images / "common/03.png").read_bytes()
    for folder in (images, other):
        shutil.copy(folder / "rare/00.png", folder / "common/03.png")
    with pytest.raises(DataError, match="img: images, labels or groups are not those that the run began with; restore"):
        csda.train(out=out, resume=True, reporter=Reporter())
    with pytest.raises(RunError, match="begun with other settings: data: "):
        csda.train(other, out=out, resume=True, reporter=Reporter())
    (images / "common/03.png").write_bytes(kept)
    assert csda.train(out=out, resume=True, reporter=Reporter()).finished
    with pytest.raises(RunError, match="begun with other settings: data: "):
        csda.train(other, out=out, resume=True, reporter=Reporter())


def test_a_run_without_a_digest_is_known_by_its_path(tiny_images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, reporter=Stop())
    environment = json.loads((out / "environment.json").read_text())
    del environment["data_digest"]
    (out / "environment.json").write_text(json.dumps(environment))
    (out / "manifest.json").unlink()
    copied = shutil.copytree(tiny_images, tmp_path / "copied")
    with pytest.raises(RunError, match="begun with other settings: data: "):
        csda.train(copied, out=out, resume=True, reporter=Reporter())
    assert csda.train(tiny_images, out=out, resume=True, reporter=Reporter()).finished


def test_a_run_of_an_older_version_goes_on(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    """Settings that this version did not have then have their defaults: those of the run and those of the method."""
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, reporter=Stop())
    settings = tomllib.loads((out / "config.toml").read_text())
    del settings["aspect"], settings["method_settings"]["shift"], settings["method_settings"]["folds"]
    (out / "config.toml").write_text(tomli_w.dumps(settings))
    (out / "manifest.json").unlink()
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    torch.save(state | {"format": "csda-checkpoint-2", "config": tomli_w.dumps(settings)}, out / "checkpoint.pt")
    for changed in ({"shift": 1.0}, {"folds": 4}, {"aspect": "pad"}):
        with pytest.raises(RunError, match=f"begun with other settings: {next(iter(changed))}: "):
            csda.train(out=out, resume=True, settings=changed)
    assert _bytes(csda.train(out=out, resume=True)) == _bytes(tiny_run)
    assert csda.train(out=out, resume=True).finished


def test_a_resumed_run_needs_no_settings_and_knows_its_epochs(tiny_images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, reporter=Stop(), eval_batch_size=4)
    reporter = Notes()
    run = csda.train(out=out, resume=True, reporter=reporter)
    assert "2 of 3 epochs left of 4 steps" in reporter.notes[-1]
    assert [row["epoch"] for row in reporter.rows] == [2, 3]
    assert [row["epoch"] for row in run.metrics] == [1, 2, 3]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_resumes_to_the_same_predictions(method: str, tiny_images: Path, tmp_path: Path) -> None:
    """And to the same losses: a queue that is too long for one push to replace would show in them if it were lost."""
    queue = {"capacity": 48, "gamma": 0.0} if "capacity" in METHODS[method].settings.model_fields else {}
    whole = train_tiny(tiny_images, tmp_path / "whole", method=method, **queue)
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, method=method, reporter=Stop(), **queue)
    run = train_tiny(tiny_images, out, method=method, resume=True, **queue)
    assert _bytes(run) == _bytes(whole)
    assert [row.get("loss") for row in run.metrics] == [row.get("loss") for row in whole.metrics]


def test_upper_bound_trains_on_the_truth(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    run = train_tiny(tiny_images, tmp_path / "run", method="upper-bound")
    labeled = {row.id: row.label for row in run.split if row.split == "labeled"}
    expected = {row.id: row.label for row in tiny_run.split if row.split == "labeled"} | tiny_run.truth
    assert labeled == expected
    assert not any(row.split == "unlabeled" for row in run.split)
    assert run.truth == {}
    for part in ("val", "test"):
        ids = [[row.id for row in one.split if row.split == part] for one in (run, tiny_run)]
        assert ids[0] == ids[1]
    assert len((run.folder / "pseudo_labels.csv").read_text().splitlines()) == 1


def test_an_interrupted_run_with_changed_images_is_refused(tiny_images: Path, tmp_path: Path) -> None:
    images, out = Path(shutil.copytree(tiny_images, tmp_path / "images")), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(images, out, reporter=Stop())
    (images / "rare" / "03.png").unlink()
    with pytest.raises(DataError, match=r"split\.csv, row \d+: 'rare/03\.png' is no image of"):
        train_tiny(images, out, resume=True)


# --- settings -----------------------------------------------------------------------------------------------


def test_quick_is_what_a_machine_without_a_gpu_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert configure({}).preset == "quick"
    assert configure({"preset": "paper"}).preset == "paper"
    assert configure({}).precision == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    assert configure({}).preset == "default"
    assert configure({}).precision == "bf16"
    assert configure({"precision": "tf32"}).precision == "tf32"
    assert configure({"device": "cpu"}).precision == "float32"


def test_a_setting_given_twice_is_refused(tiny_images: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seed is given twice"):
        csda.train(tiny_images, seed=1, out=tmp_path / "run", settings={"seed": 2})


def test_prior_correction_divides_by_the_labeled_frequencies(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    # With one epoch both runs choose the same.
    plain = train_tiny(tiny_images, tmp_path / "plain", epochs=2)
    corrected = train_tiny(tiny_images, tmp_path / "corrected", epochs=2, prior_correction="labeled")
    labels = plain.labels_of("labeled")
    divided = plain.predictions.probs / (np.bincount(labels) / len(labels))
    expected = divided / divided.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(corrected.predictions.probs, expected, rtol=1e-5)
    assert not np.allclose(corrected.predictions.probs, plain.predictions.probs, atol=1e-3)
    assert corrected.result["mca"] == plain.result["mca_prior"]
    assert corrected.result["mca_prior"] == corrected.result["mca"], "divided once, not twice"
    with corrected.folder.joinpath("predictions.csv").open(newline="") as file:
        chosen = [row[3] for row in csv.reader(file)][1:]
    assert chosen == [plain.classes[k] for k in expected.argmax(axis=1)]


@pytest.mark.parametrize("epochs", [256, 40, 3])
def test_learning_rate_falls_after_50_and_125_of_256_epochs(epochs: int, tiny_images: Path) -> None:
    held = _trainer(tiny_images, epochs=epochs, lr=1.0)
    rates = [held.begin_epoch(epoch) for epoch in range(1, epochs + 1)]
    first, second = math.ceil(epochs * 50 / 256), math.ceil(epochs * 125 / 256)
    expected = [1.0] * first + [0.1] * (second - first) + [0.01] * (epochs - second)
    assert rates == pytest.approx(expected)
    assert held.optimizer.param_groups[0]["lr"] == rates[-1]


@pytest.mark.parametrize("ramp", ["epoch", "step"])
def test_progress_grows_by_epoch_or_by_step(ramp: str, tiny_images: Path) -> None:
    held = _trainer(tiny_images, ramp=ramp, epochs=2)
    values = []
    for epoch in (1, 2):
        held.begin_epoch(epoch)
        values += [float(progress) for _, _, progress in held.sample(epoch)]
    assert len(set(values)) == (2 if ramp == "epoch" else 8)
    assert values == sorted(values)
    assert values[-1] == 1.0


def test_folders_have_the_names_of_what_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configure({"method": "vcq", "seed": 4})
    with ExitStack() as stack:
        assert _hold_new_folder(config, stack) == Path("runs/synthetic-vcq-4")
        assert _hold_new_folder(config, stack) == Path("runs/synthetic-vcq-4-2")
        assert _hold_new_folder(RunConfig(data=".."), stack).parts[0] == "runs"
    assert not Path("runs").exists()


def test_environment_tells_where_a_run_was_made(tiny_run: Run) -> None:
    environment = tiny_run.environment
    assert environment["csda"] == csda.__version__
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == 1
    assert environment["classes"] == list(tiny_run.classes)


def test_without_git_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.source_commit() is None


def test_without_git_the_commit_is_what_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CSDA_COMMIT", "abc")
    assert environment.source_commit() == "abc"


def test_seeds_share_a_split_that_has_its_own(tiny_images: Path) -> None:
    def split(**chosen: int) -> object:
        config = configure({"data": str(tiny_images), "labels": "15", "image_size": 32, **chosen})
        return prepare_data(config, Reporter()).split.parts()

    assert split(seed=0, split_seed=5) == split(seed=1, split_seed=5) == split(seed=5)
    assert split(seed=0) != split(seed=0, split_seed=5)


def test_the_commit_of_somebody_elses_checkout_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\necho {tmp_path}\necho 0123456789abcdef\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert environment.source_commit() is None


def test_a_package_that_was_changed_since_its_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        made = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return made.stdout.strip()

    module = tmp_path / "src" / "csda" / "environment.py"
    module.parent.mkdir(parents=True)
    module.write_text("one\n")
    (tmp_path / "notes").write_text("one\n")
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    monkeypatch.setattr(environment, "__file__", str(module))
    commit = git("rev-parse", "HEAD")
    assert environment.source_commit() == commit
    (tmp_path / "notes").write_text("two\n")
    assert environment.source_commit() == commit
    module.write_text("two\n")
    assert environment.source_commit() == f"{commit}+changed"
    module.write_text("one\n")
    module.with_name("another.py").write_text("")
    assert environment.source_commit() == f"{commit}+changed"


# --- data that cannot be trained on --------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_loss_that_is_not_finite_stops_with_a_way_out(epochs: int, tiny_images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError, match=r"not finite in epoch \d; give a lower lr than 100\.0"):
        train_tiny(tiny_images, out, epochs=epochs, lr=100)
    assert not (out / "result.json").exists()
    assert not (out / "predictions.csv").exists()


def _split_csv(path: Path, run: Run, **parts: str) -> Path:
    """The run's split with the part of some classes changed."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "split", "label"))
        for row in run.split:
            label = row.id.partition("/")[0]
            part = parts.get(f"{row.split}_{label}", row.split)
            writer.writerow((row.id, part, "" if part == "unlabeled" else label))
    return path


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"labeled_rare": "unlabeled"}, "no labeled image of rare"),
        ({f"val_{name}": "test" for name in ("common", "label", "rare")}, "has no validation image"),
        ({f"test_{name}": "val" for name in ("common", "label", "rare")}, "has no test image"),
        ({"val_rare": "test", "val_label": "test"}, "validation images are all of one class"),
    ],
    ids=["class without label", "no validation", "no test", "one class in validation"],
)
def test_a_split_that_cannot_be_trained_on_is_refused(
    parts: dict[str, str], message: str, tiny_images: Path, tiny_run: Run, tmp_path: Path
) -> None:
    split = _split_csv(tmp_path / "mine.csv", tiny_run, **parts)
    with pytest.raises(DataError, match=message):
        train_tiny(tiny_images, tmp_path / "run", split=str(split))
    assert not (tmp_path / "run").exists()


def test_a_test_part_of_one_class_has_no_auc_and_says_so(tiny_images: Path, tiny_run: Run, tmp_path: Path) -> None:
    split = _split_csv(tmp_path / "mine.csv", tiny_run, test_rare="val", test_label="val")
    out = tmp_path / "run"
    whole = train_tiny(tiny_images, tmp_path / "whole", split=str(split))
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, out, split=str(split), reporter=Stop())
    run = train_tiny(tiny_images, out, split=str(split), resume=True)
    assert run.result["auc"] is run.result["auc_last20"] is None
    assert run.result | {"seconds": 0} == whole.result | {"seconds": 0}
    assert any("test part has no image of" in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ({"labels": "1000"}, DataError, "1000"),
        ({"labels": "2"}, DataError, "cannot cover every class|at least"),
        ({"labels": "100%"}, DataError, "no unlabeled images for method 'csda'"),
        ({"labels": "some"}, ConfigError, "`some` is not a number of images"),
        ({"source": "radiology"}, ConfigError, "source = 'radiology' is unknown"),
        ({"device": "tpu"}, ConfigError, "device = 'tpu' is unknown"),
        ({"device": "cuda"}, ConfigError, "device = 'cuda' is not available here"),
        ({"backbone": "vgg"}, ConfigError, "backbone = 'vgg' is unknown"),
        ({"image_size": 31}, ConfigError, "image_size = 31"),
        ({"data": "nowhere"}, DataError, "nowhere: there is no such folder"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    chosen: dict[str, Any], error: type[Exception], message: str, tiny_images: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | QUEUE | {"data": str(tiny_images), "labels": LABELS} | chosen
    with pytest.raises(error, match=message):
        csda.train(out=tmp_path / "out" / "run", settings=settings, reporter=Reporter())
    assert not (tmp_path / "out").exists()


def test_an_impossible_device_is_refused_before_images_are_decoded(
    tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "open_pixels", lambda *arguments, **options: pytest.fail("decoded"))
    for changes in ({"device": "cuda"}, {"backbone": "vgg"}, {"image_size": 31}):
        with pytest.raises(ConfigError):
            train_tiny(tiny_images, tmp_path / "run", **changes)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty"):
        train_tiny(tiny_images, tmp_path / "full")


def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    images = make_images(tmp_path / "images")
    (images / "common" / "05.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1 of 62 images .* cannot be read"):
        train_tiny(images, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    run = train_tiny(images, tmp_path / "run", max_unreadable=0.1)
    assert any("05.png" in remark for remark in run.remarks)
    assert all(row.id != "common/05.png" for row in run.split)


def test_several_labels_an_image(tmp_path: Path) -> None:
    images = make_images(tmp_path / "images")
    names = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    several = (("(none)", "cold", "red|cold")[i % 3] for i in range(len(names)))
    rows = [f"{name},{labels}" for name, labels in zip(names, several, strict=True)]
    (images / "labels.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    run = train_tiny(images, tmp_path / "run", epochs=2)
    assert run.multi_label
    assert run.classes == ("cold", "red")
    probs, labels = run.predictions.part("test")
    assert labels.shape == probs.shape
    assert run.result["auc"] == pytest.approx(metrics.auc(probs, labels), abs=1e-6)
    assert run.result["mca"] == pytest.approx(metrics.mca(probs, labels), abs=1e-6)
    assert "pseudo_auc" not in run.metrics[0]
    assert 0 <= run.metrics[1]["pseudo_auc"] <= 1
    line = read_line(run)
    assert line["multi_label"] == 1
    assert line["pseudo_auc"] == pytest.approx(run.metrics[1]["pseudo_auc"], abs=1e-5)
    corrected = train_tiny(images, tmp_path / "corrected", epochs=2, prior_correction="labeled")
    share = np.asarray(run.labels_of("labeled")).mean(axis=0)
    odds = run.predictions.probs / (1 - run.predictions.probs) / (share / (1 - share))
    np.testing.assert_allclose(corrected.predictions.probs, odds / (1 + odds), rtol=1e-4)
    assert corrected.result["mca"] == run.result["mca_prior"]
    first = next(path for path in sorted(images.rglob("*.png")))
    plain, divided = (csda.load(each.folder).predict([first], calibrated=False)[0] for each in (run, corrected))
    np.testing.assert_allclose(divided / (1 - divided), plain / (1 - plain) / (share / (1 - share)), rtol=1e-4)


def test_figures_of_an_epoch_are_written_and_reported_alike(tiny_images: Path, tmp_path: Path) -> None:
    reporter = Notes()
    run = train_tiny(tiny_images, tmp_path / "run", reporter=reporter)
    assert json.loads(json.dumps(reporter.rows)) == run.metrics
    assert {"epoch", "lr", "loss", "labeled_loss", "val_auc", "val_mca", "test_auc", "test_mca", "seconds"} <= set(
        run.metrics[0]
    )
    assert {"pseudo_accuracy", "pseudo_mca", "flip_rate", "unlabeled_loss", "filled"} <= set(run.metrics[1])
