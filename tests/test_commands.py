"""Every command on the site and in the README is run, in the order of its page, in a folder with small images.

A training is made small by settings that the command does not give itself. A table is written from the committed runs
(`--only-finished`). What cannot run here names the test in tests/ that runs it, or for make and pip the one that checks
what they would run: `ELSEWHERE`.
"""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from csda import cli, training
from csda.methods import METHODS
from csda.progress import Reporter
from csda.research.experiments import read_experiment
from csda.review.session import Session
from csda.runs import Run

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(
    path
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    if "templates" not in path.relative_to(ROOT).parts and path.name not in ("cli.md", "settings.md")
)

ELSEWHERE = {
    r"make (env|test|docs|demo|attack)( .*)?": "test_docs.py::test_make_has_the_targets_that_pages_name",
    r"pip install csda-.*\.whl": "research/test_wheel.py::"
    "test_an_environment_with_what_the_wheel_declares_runs_the_demonstration",
    r"pip install .*": "test_docs.py::test_the_extras_that_pages_name_exist",
    r"python docs/reference/generate\.py": "test_docs.py::test_generated_pages_are_current",
    r"python -m csda\.research\.explain .*": "test_docs.py::test_pictures_are_current",
    r"(TRITON_INTERPRET=1 )?pytest tests/fast": "fast/test_convolution.py",
    r"pytest tests/test_method_contract\.py .*": "test_add_a_method.py::test_the_five_steps_lead_to_a_trained_method",
    r"csda train .*mean-teacher.*": "test_add_a_method.py::test_the_five_steps_lead_to_a_trained_method",
    r"csda train .*vgg_small.*": "test_add_a_backbone.py::test_the_steps_lead_to_a_trained_network",
    r"csda .*pad_ufes.*": "test_add_a_source.py::test_the_three_steps_lead_to_a_source",
    r"csda pseudo-counts .*": "test_add_a_command.py::test_the_three_steps_lead_to_a_command",
    r"torchrun .*": "test_distributed.py::test_two_processes_train_what_one_does",
    r"csda demo.*": "research/test_wheel.py::test_an_environment_with_what_the_wheel_declares_runs_the_demonstration",
    r"csda weights get .*": "models/test_download.py::test_the_commands",
    r"csda train .*=mobilenet_v2 .*": "test_pretrained_training.py::test_a_run_begins_with_the_weights",
    r"csda train .*weights=my_weights.*": "test_pretrained_training.py::test_a_run_begins_with_the_weights_of_a_file",
    r"csda train .*=timm:.*": "models/test_adapters.py::test_a_run_fetches_once_and_predicts_without",
    r"csda reproduce .*--fresh.*": "research/test_reproduce.py::test_a_fresh_table_has_runs_of_one_commit_alone",
    r"csda reproduce fig\d.*": "research/test_reproduce.py::test_a_figure_is_drawn_from_the_folders",
    r"csda reproduce strong_choice": "research/test_reproduce.py::"
    "test_every_run_of_every_experiment_has_a_configuration",
    r"csda compare.*": "research/test_estimators.py::test_a_command_writes_runs_summary_and_where_they_are_from",
}

SMALL = {
    "epochs": "2",
    "warm_up_epochs": "1",
    "steps_per_epoch": "1",
    "image_size": "32",
    "batch_size": "8",
    "unlabeled_batch_size": "8",
    "threads": "1",
    "tensorboard": "false",
    "thumbnails": "false",
    "lr_warm_up": "0",
}
BENCH = {
    "memory": ["my_images", "--preset", "quick"],
    "step": ["--rounds", "1", "--seconds", "0"],
    "recipe": ["--rounds", "1", "--seconds", "0"],
    "scale": ["--rounds", "1", "--seconds", "0"],
    "data": ["my_images"],
    "predict": ["--images", "8", "--rounds", "1"],
    "features": ["my_images", "--rounds", "1", "--set", "labels=30"],
}
"""What makes each benchmark small."""

WRITTEN: set[str] = set()
"""Tables and kinds of exported models that have been written already; once is enough."""

COLOURS = {"melanoma": (150, 90, 90), "naevus": (90, 150, 90), "rare": (90, 90, 150)}


def _commands(page: Path) -> list[str]:
    """The lines of a page's shell blocks, then the commands within its sentences that name more than a subcommand."""
    text = page.read_text(encoding="utf-8")
    blocks = [code for language, code in FENCE.findall(text) if language in ("sh", "bash", "console")]
    lines = [line for code in blocks for line in code.splitlines()]
    inline = re.findall(r"`((?:csda|make|python|pytest|pip|torchrun|TRITON_\w+=1) [^`]+)`", FENCE.sub("", text))
    names = re.compile(r"csda (data|cache|labels|weights) \w+")  # a command that is spoken of, not called
    inline = [line for line in inline if len(line.split()) > 2 and not names.fullmatch(line)]
    inline = [line for line in inline if not re.search(r"…|\b[A-Z]{3,}\b(?!=)", line)]
    found = [line.partition("  #")[0].removeprefix("$ ").strip() for line in [*lines, *inline]]
    return list(dict.fromkeys(line for line in found if line and not line.startswith("#")))


def _elsewhere(command: str) -> str | None:
    return next((test for pattern, test in ELSEWHERE.items() if re.fullmatch(pattern, command)), None)


WITH_COMMANDS = [page for page in PAGES if _commands(page)]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes and unlabeled images, enough for 300 labels beside validation and test."""
    folder, generator = tmp_path_factory.mktemp("site") / "my_images", np.random.default_rng(0)
    for name, colour in {**COLOURS, "unlabeled": (110, 110, 110)}.items():
        (folder / name).mkdir(parents=True)
        for number in range(30 if name == "unlabeled" else 160):
            pixels = generator.normal(generator.normal(colour, 35), 40, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number:03d}.jpg")
    return folder


@pytest.fixture(scope="session")
def finished(images: Path) -> Path:
    """A finished run on them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSDA_CACHE", str(images.parent / "cache"))
        _run(_make_small(["csda", "train", str(images), "--out", str(images.parent / "finished")]), patch)
    return images.parent / "finished"


@pytest.fixture
def world(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the pages speak of, in the current folder."""
    (tmp_path / "my_images").symlink_to(images)
    (tmp_path / "new_images").symlink_to(images / "rare")
    (tmp_path / "more_images").symlink_to(images / "naevus")
    (tmp_path / "other_clinic").symlink_to(images)
    (tmp_path / "gastrovision4").symlink_to(images)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CSDA_CACHE", str(images.parent / "cache"))
    return tmp_path


def _make_table(folder: Path, images: Path) -> None:
    """A folder of images with a CSV whose columns have other names."""
    folder.mkdir()
    with (folder / "labels.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "diagnosis", "patient_id"])
        for name in COLOURS:
            for number in range(20):
                shutil.copy(images / name / f"{number:03d}.jpg", folder / f"{name}{number}.jpg")
                writer.writerow([f"{name}{number}.jpg", name if number < 15 else "", f"patient-{number}"])


def _label_one(session: Session, *_: object, **__: object) -> None:
    """In place of the server: label an image, as somebody would on the page."""
    session.decide([int(np.flatnonzero(~session.given)[0])], "label", [0])


def _make_ham10000(world: Path, images: Path) -> None:
    """The layout of HAM10000 and lists like the published ones, with few images."""
    folder, lists = world / "HAM10000" / "HAM10000_images_part_1", world / "lists"
    folder.mkdir(parents=True)
    lists.mkdir()
    codes = ("mel", "nv", "bcc", "akiec", "bkl", "df", "vasc")
    rows = [(f"ISIC_{number:07d}", codes[number % 7]) for number in range(84)]
    for name, _ in rows:
        shutil.copy(images / "rare" / "000.jpg", folder / f"{name}.jpg")
    with (world / "HAM10000" / "HAM10000_metadata.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([["lesion_id", "image_id", "dx"], *([name, name, code] for name, code in rows)])
    parts = {"Train800": rows[:28], "Train_unl800": rows[28:56], "Val": rows[56:70], "Test": rows[70:]}
    for part, own in parts.items():
        lines = [" ".join([f"{name}.jpg", *("1" if code == each else "0" for each in codes)]) for name, code in own]
        (lists / f"{part}.txt").write_text("\n".join(lines) + "\n")


def _make_small(words: list[str]) -> list[str]:
    """A training with settings that make it small, unless the command gives them."""
    method = words[words.index("--method") + 1] if "--method" in words else "csda"
    known = METHODS[method].settings.model_fields
    small = SMALL | {key: "16" for key in ("capacity", "refresh_batch_size") if key in known}
    if "--resume" in words:
        return words  # with the settings that the run began with
    given = {word.partition("=")[0] for word in words}
    return [*words, *_assign({key: value for key, value in small.items() if key not in given})]


def _assign(settings: dict[str, str]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def _shorten(words: list[str], done: set[str]) -> list[str] | None:
    """A grid as the table of its committed runs, one of those that it names; None where all were written before."""
    names = list(takewhile(lambda word: not word.startswith("-"), words[2:]))
    for name in names:
        read_experiment(name)
    left = [name for name in names if name not in done]
    done |= set(left[:1])
    return [*words[:2], left[0], *words[2 + len(names) :], "--only-finished"] if left else None


def _run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    code: object = None
    try:
        cli.main()
    except SystemExit as ending:
        code = ending.code
    assert not code, shlex.join(words)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_run(
    page: Path,
    world: Path,
    images: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("csda.report.write_report", lambda folder, **_: folder / "report.html")  # see `finished`
    monkeypatch.setattr("csda.review.server.serve", _label_one)
    monkeypatch.setattr("csda.research.bench.timing.WARM_UP", 1)
    for command in _commands(page):
        if _elsewhere(command) is not None:
            continue
        words = shlex.split(command, comments=True)
        assert words[0] == "csda", f"{page.name}: nothing runs `{command}`"
        needed = [name for name in ("timm", "monai") if f"backbone={name}:" in command]
        if words[1] == "export":
            kind = words[words.index("--to") + 1]
            needed += [kind] * (kind != "torch")
        if not all(map(find_spec, needed)) or (words[1] == "export" and kind in WRITTEN):
            continue
        if "label_column=" in command:
            (world / "my_images").unlink()
            _make_table(world / "my_images", images)
        elif "HAM10000" in command:
            _make_ham10000(world, images)
        if words[1] == "train":
            out = Path(words[words.index("--out") + 1]) if "--out" in words else None
            if out is not None and "--resume" not in words and out.exists():
                shutil.rmtree(out)
            if out is not None and "--resume" in words and not out.exists():
                _run(_make_small(["csda", "train", "my_images", "--out", str(out)]), monkeypatch)
            words = _make_small(words)
        elif words[1] == "bench":
            words = [*words, *BENCH[words[2]], *_assign({} if words[2] in ("data", "memory") else SMALL)]
        elif words[1] == "reproduce":
            words = _shorten(words, WRITTEN) or []
        elif words[1] in ("evaluate", "predict", "report", "review", "export"):
            for folder in map(Path, words[2:] if words[1] == "report" else words[2:3]):
                if not folder.exists() and folder.suffix == "" and not str(folder).startswith("-"):
                    shutil.copytree(finished, folder)
            if words[1] == "export":
                WRITTEN.add(kind)
            elif words[1] == "review":
                words = [*words, "--no-features"]
                if "--classes" in words:  # the folder has no review yet
                    shutil.rmtree("runs/my_images-review", ignore_errors=True)
        elif words[1:3] == ["labels", "export"]:
            (world / "my_images").unlink()  # which all tests share
            shutil.copytree(images, world / "my_images")
        if words:
            _run(words, monkeypatch)
        if "label_column=" in command:
            shutil.rmtree(world / "my_images")
            (world / "my_images").symlink_to(images)
    capsys.readouterr()


def test_the_python_of_the_readme(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [code for language, code in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"]
    train = training.train

    def train_small(data: str, *, method: str, out: str) -> Run:
        small = {key: json.loads(value) for key, value in SMALL.items()}
        return train(data, method=method, out=out, settings=small, reporter=Reporter())

    monkeypatch.setattr(training, "train", train_small)
    exec(code, {})
    assert "melanoma" in capsys.readouterr().out
    assert (world / "run" / "result.json").is_file()


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_what_runs_elsewhere_does(test: str) -> None:
    path, _, name = test.partition("::")
    names = {
        node.name for node in ast.parse((ROOT / "tests" / path).read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert names if not name else name in names


def test_the_pages_have_commands() -> None:
    commands = {command for page in PAGES for command in _commands(page)}
    assert sum(_elsewhere(command) is None for command in commands) > 30
    assert [each for each in ELSEWHERE if not any(re.fullmatch(each, command) for command in commands)] == []
