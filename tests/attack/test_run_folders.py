"""Damaged run folders: a command works with unchanged numbers or ends with one sentence, whatever was damaged."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from commands import Command, is_one_sentence
from csda import runs
from csda.errors import RunError
from tiny import InterruptedReporter, arguments, train_tiny

MUTATIONS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "removed": lambda content, chance: None,
    "emptied": lambda content, chance: b"",
    "torn": lambda content, chance: content[: chance.randrange(1, len(content))],
    "a bit flipped": lambda content, chance: _flipped(content, chance),
    "a line removed": lambda content, chance: b"".join(_without(content.splitlines(keepends=True), chance)),
    "the last line removed": lambda content, chance: b"".join(content.splitlines(keepends=True)[:-1]),
    "undecodable": lambda content, chance: content[:9] + b"\xff\xfe\x80\0" + content[9:],
    "other digits": lambda content, chance: content.replace(b"1", b"7"),
    "words for numbers": lambda content, chance: content.replace(b"0", b"x"),
    "a list": lambda content, chance: b"[]",
    "another key": lambda content, chance: content.replace(b"e", b"i"),
}
FINAL = (
    "config.toml",
    "environment.json",
    "manifest.json",
    "split.csv",
    "truth.csv",
    "metrics.jsonl",
    "model.safetensors",
    "history.npz",
    "predictions.csv",
    "pseudo_labels.csv",
    "thumbnails.npz",
    "result.json",
)
UNFINISHED = (
    "config.toml",
    "environment.json",
    "manifest.json",
    "split.csv",
    "truth.csv",
    "metrics.jsonl",
    "model.safetensors",
    "checkpoint.pt",
    "history/00001.npz",
)
OF_A_MODEL = ("config.toml", "manifest.json", "model.safetensors", "result.json")
NUMBERS = ("predictions.csv", "pseudo_labels.csv", "model.safetensors")


def _flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _without(lines: list[bytes], chance: random.Random) -> list[bytes]:
    at = chance.randrange(len(lines))
    return lines[:at] + lines[at + 1 :]


@pytest.fixture(scope="module")
def place(small_network: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("runs")
        patch.setenv("CSDA_CACHE", str(place / "cache"))
        yield place


@pytest.fixture(scope="module")
def finished(place: Path, tiny_images: Path) -> Path:
    return train_tiny(tiny_images, place / "finished", backbone="small").folder


@pytest.fixture(scope="module")
def interrupted(place: Path, tiny_images: Path) -> Path:
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, place / "interrupted", reporter=InterruptedReporter(2), backbone="small")
    return place / "interrupted"


def _damaged(folder: Path, place: Path, names: tuple[str, ...]) -> Iterator[tuple[str, str, Path]]:
    """A copy of the folder for each file and mutation, with one file changed."""
    chance = random.Random(22)
    for name in names:
        whole = (folder / name).read_bytes()
        for mutation, change in MUTATIONS.items():
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder, place)
            content = change(whole, chance)
            if content == whole:
                continue
            (place / name).unlink()
            if content is not None:
                (place / name).write_bytes(content)
            yield name, mutation, place


def _reading(folder: Path, image: Path) -> list[tuple[object, ...]]:
    return [("evaluate", folder), ("predict", folder, image)]


def test_a_damaged_file_of_a_finished_run_is_refused_or_changes_nothing(
    csda: Command, finished: Path, tiny_images: Path, tmp_path: Path
) -> None:
    image = tiny_images / "rare" / "00.png"
    expected = [csda(*words) for words in _reading(finished, image)]
    refused = 0
    for name, mutation, folder in _damaged(finished, tmp_path / "run", FINAL):
        for words, answer in zip(_reading(folder, image), expected, strict=True):
            if words[0] == "predict" and name not in OF_A_MODEL and mutation != "a bit flipped":
                continue  # it does not look at them
            found = csda(*words)
            if is_one_sentence(found):
                refused += 1
            else:
                assert (found[0], found[1]) == (answer[0], answer[1]), (words[0], name, mutation)
    assert refused > 100


def test_a_damaged_file_is_refused_by_report_or_leaves_the_page_as_it_is(
    csda: Command, finished: Path, tmp_path: Path
) -> None:
    whole = Path(shutil.copytree(finished, tmp_path / "whole"))
    assert csda("report", whole)[0] == 0
    page = (whole / "report.html").read_bytes()
    pages = ("report.html", "figures/classes.svg")
    assert csda("report", "--verify", whole)[0] == 0
    for name, mutation, folder in _damaged(whole, tmp_path / "copy" / "whole", (*FINAL, *pages)):
        if mutation != "removed" or name not in pages:
            assert is_one_sentence(csda("report", "--verify", folder)), (name, mutation)
        # A page names its run by the folder, so the copies have the same name.
        if mutation == "a bit flipped" and name not in pages:
            (folder / "report.html").unlink()
            found = csda("report", folder)
            assert is_one_sentence(found) or (folder / "report.html").read_bytes() == page, (name, mutation)


def test_a_damaged_file_of_an_older_run_ends_in_a_sentence_or_in_numbers(
    csda: Command, finished: Path, tiny_images: Path, tmp_path: Path
) -> None:
    """Without a manifest there is no telling a changed digit; what is not of the right form is refused."""
    image = tiny_images / "rare" / "00.png"
    whole = Path(shutil.copytree(finished, tmp_path / "whole"))
    (whole / "manifest.json").unlink()
    names = tuple(name for name in FINAL if name != "manifest.json")
    for name, mutation, folder in _damaged(whole, tmp_path / "run", names):
        words = _reading(folder, image)[name == "model.safetensors"]
        found = csda(*words)
        assert is_one_sentence(found) or found[0] == 0, (words[0], name, mutation, found)
        if name in ("predictions.csv", "pseudo_labels.csv") and "removed" in mutation:
            assert words[0] == "predict" or name == "pseudo_labels.csv" or found[0] == 2, (name, mutation)


def test_a_damaged_file_of_a_stopped_run_is_refused_or_the_run_ends_as_it_would_have(
    csda: Command, interrupted: Path, finished: Path, tiny_images: Path, tmp_path: Path
) -> None:
    expected = {name: (finished / name).read_bytes() for name in NUMBERS}
    refused = 0
    for name, mutation, folder in _damaged(interrupted, tmp_path / "run", UNFINISHED):
        if (name, mutation) in {("config.toml", "removed"), ("environment.json", "removed")}:
            continue  # the folder is no run any more, or one that was cut off while it began
        if name == "model.safetensors" and mutation != "a bit flipped":
            continue  # the checkpoint has it, too, and all of these would be trained to their end
        settings = {"tensorboard": "false", "backbone": "small"}
        found = csda(*arguments(tiny_images, folder, settings, "--resume", "--quiet"))
        if found[0] == 0:
            assert {each: (folder / each).read_bytes() for each in NUMBERS} == expected, (name, mutation)
        else:
            assert found[0] == 2, (name, mutation, found)
            assert found[2].startswith("csda: "), (name, mutation, found)
            assert found[2].count("\n") == 1, (name, mutation, found)
            refused += 1
    assert refused > 50


def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(
    csda: Command, interrupted: Path, finished: Path, tmp_path: Path
) -> None:
    for whole, names in ((interrupted, UNFINISHED), (finished, FINAL)):
        for name in names:
            folder = Path(shutil.copytree(whole, tmp_path / "run"))
            (folder / name).unlink()
            os.mkfifo(folder / name)
            assert is_one_sentence(csda("report", "--verify", folder)), name
            shutil.rmtree(folder)


def test_an_interrupted_run_is_compared_with_its_checksums(csda: Command, interrupted: Path, tmp_path: Path) -> None:
    assert csda("report", "--verify", interrupted)[0] == 0
    for name, mutation, folder in _damaged(interrupted, tmp_path / "run", UNFINISHED):
        # Of a checkpoint what is read has checksums, and the rest of the archive has none.
        if mutation == "a bit flipped" and name != "checkpoint.pt":
            assert is_one_sentence(csda("report", "--verify", folder)), name


def test_a_damaged_directory_of_a_checkpoint_is_refused(interrupted: Path, tmp_path: Path) -> None:
    """The attributes of a file in an archive are under no checksum of it: with 0x10 among them torch reads no bytes of
    the file, and makes a tensor of whatever its memory held."""
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    whole = (folder / "checkpoint.pt").read_bytes()
    begins = [match.start() for match in re.finditer(rb"PK\x01\x02", whole)]
    assert len(begins) > 20
    for begin in begins:
        (folder / "checkpoint.pt").write_bytes(whole[: begin + 38] + b"\x10" + whole[begin + 39 :])
        with pytest.raises(RunError, match=r"checkpoint\.pt: damaged \(wrong checksum\)"):
            runs.Run(folder).load_checkpoint()


def test_a_checkpoint_of_an_older_version_is_resumed(
    interrupted: Path, finished: Path, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_CHECKPOINT_FORMAT", runs._UNSEALED_FORMAT)
    monkeypatch.setattr(runs, "seal_archive", lambda archive: archive)
    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_images, tmp_path / "run", reporter=InterruptedReporter(2), backbone="small")
    monkeypatch.undo()
    run = train_tiny(tiny_images, tmp_path / "run", resume=True, backbone="small")
    assert all((run.folder / name).read_bytes() == (finished / name).read_bytes() for name in NUMBERS)


def test_nothing_is_written_or_deleted_where_a_link_leads(finished: Path, tmp_path: Path) -> None:
    """Of a run that somebody else made: links and pipes in the place of files that are about to be written."""
    folder, mine = Path(shutil.copytree(finished, tmp_path / "run")), tmp_path / "mine"
    mine.mkdir()
    (mine / "drawing.svg").write_text("mine")
    run, draft = runs.Run(folder), folder / ".report.html.writing"
    draft.symlink_to(mine / "drawing.svg")
    run.write_report("first", {"classes": "<svg/>"})
    os.mkfifo(draft)
    run.write_report("second", {"classes": "<svg/>"})
    assert (folder / "report.html").read_text().startswith("second")
    shutil.rmtree(folder / "figures")
    (folder / "figures").symlink_to(mine)
    with pytest.raises(RunError, match=r"figures: a link"):
        run.write_report("third", {"classes": "<svg/>"})
    (folder / "history").symlink_to(mine)
    with pytest.raises(RunError, match=r"history: a link"):
        run.write_epoch({"epoch": 1}, {}, [])
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"drawing.svg": "mine"}


def test_what_is_missing_of_a_begun_run_is_to_be_restored(csda: Command, interrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (folder / "split.csv").unlink()
    assert csda("train", "--out", folder, "--resume")[2] == f"csda: {folder / 'split.csv'}: missing; restore it\n"


def _inflating() -> bytes:
    """An archive of 400 kB that holds 400 MB of zeros."""
    file = io.BytesIO()
    np.savez_compressed(file, epochs=np.zeros(400_000_000, np.uint8))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.toml", lambda content: content + b"z = " + b"[" * 20_000),
        ("config.toml", lambda content: content + b"a." * 100_000 + b"b = 1\n"),
        ("config.toml", lambda content: b"seed = " + b"1" * 5000 + b"\n" + content),
        ("calibration.json", lambda content: json.dumps(json.loads(content) | {"remarks": [5]}).encode()),
        ("history.npz", lambda content: _inflating()),
    ],
    ids=["deep brackets", "a long key", "many digits", "remarks that are no text", "an archive that inflates"],
)
def test_what_somebody_made_to_be_read(
    name: str, change: Callable[[bytes], bytes], csda: Command, finished: Path, tmp_path: Path
) -> None:
    """Without a manifest, which whoever made the file would have made, too."""
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / "manifest.json").unlink()
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    answer = csda("report", folder)
    assert is_one_sentence(answer), answer
    assert name in answer[2]
