"""What `csda bench` measures, on sizes so small that only its arithmetic shows: no test knows how fast anything is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from csda.cli import app
from csda.data.decode import read_image
from csda.errors import ConfigError, DataError
from csda.methods import METHODS
from csda.models.alexnet import alexnet
from csda.presets import configure
from csda.research.bench import bench_data, bench_features, bench_memory, bench_predict, bench_scale, bench_step, keep
from csda.research.bench.memory import peak_memory
from csda.research.bench.noise import images_trained_on, make_data, open_trainer
from csda.research.bench.recipe import RECIPES, bench_recipe, count_recipe
from csda.research.bench.step import count_work
from csda.research.bench.timing import figure, ratios, time_in_turn
from csda.research.bench.torch_loader import _draw_files, _Images
from csda.research.bench.work import Work, average_work, inference_work, training_work
from csda.training import update
from tiny import COUNTS

TINY: dict[str, Any] = {
    "preset": "quick",
    "steps_per_epoch": 2,
    "batch_size": 8,
    "unlabeled_batch_size": 8,
    "capacity": 16,
    "refresh_batch_size": 512,
    "threads": 1,
    "labels": "15",
}


def is_figure(value: Any) -> bool:
    return value.keys() == {"mean", "std", "n"} and value["mean"] > 0 and value["std"] >= 0 and value["n"] >= 1


@pytest.fixture(autouse=True)
def _little_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.research.bench.timing.WARM_UP", 1)
    monkeypatch.setattr("csda.research.bench.step.STREAMED", 5000)
    monkeypatch.setattr("csda.research.bench.starts.SEEDS", 2)
    monkeypatch.setattr("csda.research.bench.starts.REPEATS", 1)
    monkeypatch.setattr("csda.research.bench.torch_loader.available_cores", lambda: 1)


def test_step_gives_every_figure(tmp_path: Path, tiny_images: Path) -> None:
    *earlier, figures = bench_step(TINY, data=tiny_images, rounds=1, seconds=600)
    stepping = [name for name, entry in METHODS.items() if entry.steps]
    assert len(earlier) == len(stepping) + 2
    step_ms = ("bare_step_ms", "loader_step_ms")
    whole = ("streamed_over_resident", "eight_seeds_speedup", "eight_seeds_speedup_csda", "second_start_s")
    assert all(is_figure(figures[name]) for name in (*step_ms, *whole))
    assert figures["machine"].keys() == {"device", "cores", "threads", "platform"}
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["left_out"] == []

    assert figures["method_step_ms"].keys() == set(stepping)
    assert all(is_figure(value) for value in figures["method_step_ms"].values())
    assert figures["method_over_bare"].keys() == set(stepping)
    assert min(figures["method_over_bare"].values()) > 0
    for step in (figures["bare_step"], figures["csda_step"]):
        assert min(step.values()) > 0

    keep(figures, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == figures


def test_parts_are_left_out_after_the_deadline(tmp_path: Path) -> None:
    *_, figures = bench_step(TINY, parts=["seeds", "loader"], rounds=1, seconds=0.0)
    assert figures["left_out"] == ["seeds", "loader"]
    assert is_figure(figures["method_step_ms"]["csda"])


def test_loader_draws_its_own_files_and_augments_them(tmp_path: Path) -> None:
    images = _Images(_draw_files(tmp_path), configure(TINY | {"flip": False}))
    assert len(images) == 512
    first, again = images[0], images[0]
    assert first.shape == (3, 32, 32)
    assert 0 <= first.min() < 0.2 < 0.8 < first.max() <= 1
    assert not first.equal(again)
    still = _Images(images.paths, configure(TINY | {"flip": False, "rotation": 0, "translation": 0}))
    pixels = read_image(images.paths[0], 32, 3)
    assert (still[0].permute(1, 2, 0) * 255 - torch.tensor(pixels)).abs().mean() < 3


def test_parts_and_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="'capacty' for method 'csda': did you mean capacity"):
        next(bench_step({"capacty": 3}))
    with pytest.raises(ConfigError, match=r"speed is not a part of this benchmark; choose among streamed, seeds"):
        next(bench_step(TINY, parts=["speed"]))
    with pytest.raises(ConfigError, match="method cannot be set, because the benchmark sets it"):
        next(bench_step(TINY | {"method": "vcq"}))
    with pytest.raises(ConfigError, match="resident_share cannot be set, because the benchmark sets it"):
        bench_scale(TINY | {"resident_share": 0.5})


@pytest.fixture
def _small_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.research.bench.scale.UNLABELED_COUNTS", (100, 5000))
    monkeypatch.setattr("csda.research.bench.scale.CLASS_COUNTS", (2, 1000))
    monkeypatch.setattr("csda.research.bench.scale.QUEUES", (0.25, 4))


@pytest.mark.usefixtures("_small_scale")
def test_scale_varies_one_thing_at_a_time() -> None:
    figures = bench_scale(TINY, rounds=1)
    assert figures["reference"] == {"unlabeled": 1024, "classes": 7, "capacity": 16}
    for name, values in (("unlabeled", "100 5000"), ("classes", "2 1000"), ("capacity", "4 64")):
        assert list(figures[f"{name}_step_ms"]) == list(figures[f"{name}_over_reference"]) == values.split()
        assert all(is_figure(value) for value in figures[f"{name}_step_ms"].values())
    assert figures["left_out"] == []
    left_out = ["unlabeled 100", "unlabeled 5000", "classes 2", "classes 1000", "capacity 4", "capacity 64"]
    assert bench_scale(TINY, rounds=1, seconds=0)["left_out"] == left_out


def test_data_gives_every_figure(tiny_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("csda.research.bench.decoding.REPEATS", 1)
    figures = bench_data(tiny_images)
    assert {"command", "commit", "date", "machine"} <= figures.keys()
    assert figures["images"] == sum(COUNTS.values())
    assert min(figures["speedup"], figures["warm_start_seconds"]) > 0


def test_memory_is_that_of_a_training_of_its_own(tiny_images: Path, tmp_path: Path) -> None:
    (figures,) = bench_memory(tiny_images, ["quick"], rounds=1)
    assert figures["images"] == sum(COUNTS.values())
    peak = figures["peak_megabytes"]["quick"]
    assert (peak["method"], peak["n"]) == ("csda", 1)
    assert 1 < peak["mean"] * 1e6 / peak_memory([sys.executable, "-c", "import torch"]) < 5
    with pytest.raises(ConfigError, match=r"preset quick failed: csda: .*missing"):
        next(bench_memory(tmp_path / "missing", ["quick"], rounds=1))
    with pytest.raises(ConfigError, match="preset = 'slow' is unknown; choose among paper, default"):
        next(bench_memory(None, ["slow"], rounds=1))


def test_peak_memory_is_that_of_the_command_alone() -> None:
    held = bytearray(300_000_000)  # of this process, which the command does not have
    measured = peak_memory([sys.executable, "-c", "bytearray(100_000_000)"])
    assert 100e6 < measured < 200e6 < len(held)


def test_features_give_every_figure(tiny_images: Path) -> None:
    few = {"labels": "15", "image_size": 32, "epochs": 2, "warm_up_epochs": 1, "steps_per_epoch": 1, "threads": 1}
    figures = bench_features(few | {"tensorboard": False}, tiny_images, rounds=1)
    assert figures["images"] == sum(COUNTS.values())
    assert 0 < figures["rate_of_bare"] < 10
    assert figures["training_share"] == figures["training_seconds"][0] / figures["feature_seconds"][0]
    with pytest.raises(DataError, match="no unlabeled images for method 'self-train'"):
        bench_features({"image_size": 32}, tiny_images, rounds=0)


@pytest.mark.parametrize(("method", "images"), [("baseline", 8), ("fixmatch", 16), ("vcq", 24), ("csda", 24)])
def test_bare_step_has_as_many_images_as_the_method_trains_on(method: str, images: int) -> None:
    trainer = open_trainer(method, TINY)
    seen = []
    trainer.model.student.register_forward_hook(
        lambda module, inputs, outputs: seen.append(len(outputs) if torch.is_grad_enabled() else 0)
    )
    trainer.engine.run(update, trainer, trainer.step, *next(trainer.sample(1)))
    assert sum(seen) == images_trained_on(trainer) == images


def test_pixels_of_a_file_are_streamed(tmp_path: Path) -> None:
    assert open_trainer("csda", TINY).parts.streamed == ()
    assert "unlabeled" in open_trainer("csda", TINY, file=tmp_path / "pixels").parts.streamed


def test_noise_has_all_classes_and_maps_large_sets_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pixels"
    data = make_data(32, classes=600, unlabeled=200_000, file=file)
    assert {record.label for record in data.split.labeled} == set(range(600))
    assert len(data.split.unlabeled) == 200_000
    assert {record.label for record in data.split.unlabeled} == {None}
    assert data.pixels[:4096].std() > 70
    assert not data.pixels[-5:].any()
    assert file.stat().st_blocks * 512 < file.stat().st_size / 10


def test_operations_are_those_that_torch_counts() -> None:
    network = nn.Sequential(alexnet(64, 3), nn.ReLU(), nn.Linear(256, 7))
    images = torch.randn(4, 3, 64, 64)
    with FlopCounterMode(display=False) as training:
        network(images).sum().backward()
    with FlopCounterMode(display=False) as inference, torch.no_grad():
        network(images)
    assert training_work(network, (4, 3, 64, 64), "float32").operations == training.get_total_flops()
    assert inference_work(network, (4, 3, 64, 64), "float32").operations == inference.get_total_flops()


def test_operations_are_those_of_the_paper() -> None:
    network = nn.Sequential(alexnet(128, 3), nn.ReLU(), nn.Linear(256, 7))
    assert inference_work(network, (1, 3, 128, 128), "float32").operations == 2 * 47_187_712


def test_bytes_of_a_small_network_by_hand() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 2, stride=2, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    # Three images of 4×4 values: 48 in, 24 out of the convolution and of the normalisation, 9 out of the linear layer.
    parameters = 4 * (8 + 4 + 27)
    assert average_work(network).bytes == 3 * parameters
    forward, backward = 48 + 24 + 24 + 9, 24 + 48 + 2 * 24 + 9 + 24 + 24
    assert training_work(network, (3, 1, 4, 4), "bf16").bytes == 2 * (forward + backward) + 6 * parameters
    assert inference_work(network, (3, 1, 4, 4), "float32").bytes == 4 * (48 + 24 + 24 + 9) + parameters


def test_a_csda_step_needs_more_than_the_bare_one() -> None:
    bare, full = count_work(configure({"preset": "default"}))
    assert bare.operations < full.operations < 1.3 * bare.operations
    assert bare.bytes < full.bytes < 1.6 * bare.bytes
    assert Work(1, 2) + Work(3, 4) == Work(4, 6)


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios({"a": [2.0, 4.0, 90.0], "b": [1.0, 4.0, 3.0], "c": [1.0]}, "a", "b") == [2.0, 1.0, 30.0]
    assert figure([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(2**0.5), "n": 2}
    assert figure([1.0]) == {"mean": 1.0, "std": 0.0, "n": 1}


def test_what_was_prepared_is_used_up_before_each_measurement() -> None:
    calls = []
    actions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = time_in_turn(actions, torch.device("cpu"), 2, prepared=3)
    assert "".join(calls) == "ab" + 2 * "aaaabbbb"
    assert [len(values) for values in times.values()] == [2, 2]


@pytest.mark.usefixtures("_small_scale")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, assignments = tmp_path / "scale.json", [f"--set={key}={value}" for key, value in TINY.items()]
    app(["bench", "scale", "--rounds", "1", *assignments, "--out", str(out)], standalone_mode=False)
    assert list(json.loads(out.read_text())["capacity_step_ms"]) == ["4", "64"]
    assert "capacity over reference: 64" in capsys.readouterr().out


def test_predictions_are_timed_beside_network_and_decoding(tiny_images: Path, tmp_path: Path) -> None:
    settings = {"preset": "quick", "image_size": 32}
    for data in (tiny_images, None):
        figures = bench_predict(settings, data=data, images=70, rounds=2)
        assert figures["settings"]["images"] == 70
        rates = figures["images_per_second"]
        assert rates.keys() == {"bare", "decode", "predict", "arrays"}
        assert all(rate["mean"] > 0 and rate["n"] == 2 for rate in rates.values())
        assert 0 < figures["predict_of_bare"] < figures["predict_of_limit"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images there"):
        bench_predict(settings, data=tmp_path / "empty")


def test_recipe_compares_each_training_with_plain_torch() -> None:
    small = {"preset": "quick", "image_size": 32, "steps_per_epoch": 2, "threads": 1}
    sizes = {name: (method, {"batch_size": 8} if method == "baseline" else {"batch_size": 8, "unlabeled_batch_size": 8})
             for name, (method, _) in RECIPES.items()}  # fmt: skip
    *_, figures = bench_recipe(small, rounds=1, recipes=sizes)
    assert figures["left_out"] == []
    for name, (method, _) in sizes.items():
        found = figures[name]
        assert found["method"] == method
        assert is_figure(found["step_ms"])
        assert is_figure(found["eager_step_ms"])
        assert found["recipe_s"] == pytest.approx(2 * found["step_ms"]["mean"])
        assert found["eager_over_ours"] == pytest.approx(found["eager_step_ms"]["mean"] / found["step_ms"]["mean"])
    *_, none = bench_recipe(small, rounds=1, seconds=0, recipes=sizes)
    assert none["left_out"] == list(sizes)


def test_a_recipe_with_unlabeled_images_counts_student_teacher_and_averages() -> None:
    alone = configure({"method": "baseline", "preset": "strong", "batch_size": 64, "pretrained": False})
    both = configure({"method": "self-train", "preset": "strong", "unlabeled_batch_size": 64, "batch_size": 64})
    one, two = count_recipe(alone), count_recipe(both)
    # Twice the images through the student, and a forward pass, a third of the operations, by the teacher.
    assert two.operations / one.operations == pytest.approx(2 + 1 / 3, rel=0.01)
    assert two.bytes > 2 * one.bytes
