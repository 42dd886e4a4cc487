"""A longer attack on the package than `make test` has time for, whose counts add up over many sessions.

    make attack MINUTES=60          python tests/attack/campaign.py --minutes 60 --seed 7

Each attack is made in batches, the one that is furthest from its goal first, two at a time. A batch is a process of its
own, seeded, so that a crash or a wait counts as a failure and can be had again: `--only NAME --batch SEED` repeats one.
What it trains and serves are processes that it forks, so that none of them imports anything. Counts, seeds, commits and
failures are in results/attack/sessions.json, and as a page beside it. With TMPDIR in memory nothing waits for a disk.
"""

from __future__ import annotations

import argparse
import http.client
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "review"))

import numpy as np
from PIL import Image
from review_server import Server

from csda import files, runs
from csda.data import check as check_module
from csda.data import load_dataset
from csda.data.csv_files import read_table
from csda.data.decisions import read_decisions
from csda.data.decode import UnreadableError, read_header, read_image, unremarked
from csda.environment import source_commit
from csda.errors import CsdaError, DataError, RunError
from csda.files import write_whole
from csda.models.backbones import BACKBONES
from csda.runs import Run
from tiny import make_images, plain, small, train_tiny

RESULTS = Path(__file__).parents[2] / "results" / "attack"
SECONDS = 1800
"""After so long a batch counts as one that waits for ever."""

PROCESSES: Any = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["csda.training", "csda.data.folder", "csda.report", "torch._dynamo", "csda.review.server", "uvicorn"]
)

SHORT: dict[str, Any] = {"backbone": "small", "epochs": 2, "steps_per_epoch": 2, "tensorboard": False}
COMPARED = ("predictions.csv", "pseudo_labels.csv", "model.safetensors", "split.csv", "config.toml")
KINDS = {"PNG": ".png", "JPEG": ".jpg", "TIFF": ".tif", "BMP": ".bmp", "WEBP": ".webp", "GIF": ".gif", "DICOM": ".dcm"}


BACKBONES["small"] = small


@dataclass(frozen=True)
class Stage:
    """What all attacks need: images, a whole run and one that was interrupted, and a folder of their own."""

    place: Path
    images: Path
    whole: Path
    stopped: Path

    @classmethod
    def build(cls, place: Path) -> Stage:
        os.environ["CSDA_CACHE"] = str(place / "cache")
        images = make_images(place / "images")
        whole = train_tiny(images, place / "whole", **SHORT).folder
        process = PROCESSES.Process(target=_train, args=(images, place / "stopped", {"written": 11}))
        process.start()
        process.join()
        return cls(place, images, whole, place / "stopped")


# --- mutations ------------------------------------------------------------------------------------------------------


def mutate(data: bytes, chance: random.Random) -> bytes:
    """The bytes with some changed, cut off, removed or repeated; never the same."""
    changed = bytearray(data)
    place = chance.randrange(len(data))
    match chance.randrange(7):
        case 0:
            changed[place] ^= 1 << chance.randrange(8)
        case 1:
            for _ in range(chance.randrange(1, 9)):
                changed[chance.randrange(len(data))] = chance.randrange(256)
        case 2:
            del changed[place:]
        case 3:
            changed[place : place + 4] = b"\xff\xff\xff\xff"
        case 4:
            del changed[place : place + chance.randrange(1, 64)]
        case 5:
            changed[place:place] = changed[place : place + chance.randrange(1, 64)]
        case _:
            changed[place : place + 8] = chance.randbytes(8)
    return bytes(changed) if changed != data else mutate(data, chance)


def image_bytes(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), np.uint8)
    file = io.BytesIO()
    if kind == "DICOM":
        import pydicom

        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID = "1.2.840.10008.1.2.1"
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.7", "1.2.3"
        dicom = pydicom.FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        dicom.Rows, dicom.Columns = pixels.shape[:2]
        dicom.SamplesPerPixel, dicom.PhotometricInterpretation = 1, "MONOCHROME2"
        dicom.BitsAllocated = dicom.BitsStored = 8
        dicom.HighBit, dicom.PixelRepresentation = 7, 0
        dicom.PixelData = pixels[..., 0].tobytes()
        dicom.save_as(file, enforce_file_format=True)
    else:
        more = {"compression": "tiff_adobe_deflate"} if kind == "TIFF" else {}
        Image.fromarray(pixels).save(file, kind, **more)
    return file.getvalue()


def _require(so: bool, what: str) -> None:
    if not so:
        raise AssertionError(what)


def attack_images(kind: str, stage: Stage, chance: random.Random, count: int) -> int:
    """Mutated images are read, or refused by their name."""
    whole, path = image_bytes(kind), stage.place / f"a{KINDS[kind]}"
    with unremarked():
        for _ in range(count):
            path.write_bytes(mutate(whole, chance))
            try:
                read_header(path)
                assert read_image(path, 16, 3).shape == (16, 16, 3)
            except UnreadableError as error:
                _require(str(error).startswith(str(path)), str(error))
    return count


def attack_tables(stage: Stage, chance: random.Random, count: int) -> int:
    """Mutated tables are read, or refused by their name."""
    whole = "image,label,group\n" + "".join(f"{n}.png,{'cat' if n % 2 else 'dög'},p{n // 3}\n" for n in range(30))
    path = stage.place / "labels.csv"
    for _ in range(count):
        path.write_bytes(mutate(whole.encode(), chance))
        try:
            read_table(path)
        except DataError as error:
            _require(str(path) in str(error), str(error))
    return count


READERS: dict[str, Callable[[Run], object]] = {
    "config.toml": lambda run: run.settings,
    "environment.json": lambda run: run.environment,
    "manifest.json": lambda run: (run.split, run.predictions.ids, run.result),
    "split.csv": lambda run: run.split,
    "truth.csv": lambda run: run.truth,
    "metrics.jsonl": lambda run: run.metrics,
    "model.safetensors": lambda run: run.read_weights(),
    "history.npz": lambda run: run.history,
    "predictions.csv": lambda run: run.predictions,
    "pseudo_labels.csv": lambda run: run.pseudo_labels,
    "calibration.json": lambda run: run.calibration,
    "thumbnails.npz": lambda run: run.thumbnails,
    "result.json": lambda run: run.result,
}
CUT_OFF = ("checkpoint.pt", "history/00001.npz")


def attack_run_file(name: str, stage: Stage, chance: random.Random, count: int) -> int:
    """A mutated file of a run is refused. Without a manifest, as in older runs, its form alone is judged."""
    unfinished = name in CUT_OFF
    place = Path(shutil.copytree(stage.stopped if unfinished else stage.whole, stage.place / "mutated"))
    read = (lambda run: plain(run.load_checkpoint())) if unfinished else READERS[name]
    whole, manifest = (place / name).read_bytes(), (place / "manifest.json").read_bytes()
    expected = repr(read(Run(place))) if unfinished or name == "manifest.json" else ""
    for number in range(count):
        with_manifest = number % 2 == 0 or name == "manifest.json" or unfinished
        if with_manifest:
            (place / "manifest.json").write_bytes(manifest)
        else:
            (place / "manifest.json").unlink(missing_ok=True)
        (place / name).write_bytes(mutate(whole, chance))
        try:
            found = read(Run(place))
        except CsdaError:
            continue
        # Blanks of the manifest, and metadata of an archive, are nothing that is read.
        assert not with_manifest or repr(found) == expected, f"{name}: a change went unseen"
    shutil.rmtree(place)
    return count


# --- kills ----------------------------------------------------------------------------------------------------------


def _train(images: Path, out: Path, breaks: dict[str, int]) -> None:
    """Train or go on; is killed in the middle of a write, or has no room for one, by its number in this process."""
    if "quiet" in breaks:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    write, written = files.write_whole, 0

    def write_some(path: Path, content: str | bytes) -> Path:
        nonlocal written
        written += 1
        if written == breaks.get("written"):
            data = content.encode() if isinstance(content, str) else content
            path.with_name(f".{path.name}.writing").write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if written == breaks.get("full"):
            raise RunError(f"{path}: no space left on device")
        return write(path, content)

    # Tables are written by `files` itself.
    files.write_whole = runs.write_whole = write_some
    try:
        train_tiny(images, out, resume=True, **SHORT)
    except RunError as error:
        sys.exit(4 if "no space left on device" in str(error) else 3 if "another process" in str(error) else 5)


def _start(stage: Stage, out: Path, **breaks: int) -> multiprocessing.process.BaseProcess:
    process = PROCESSES.Process(target=_train, args=(stage.images, out, breaks | {"quiet": 1}))
    process.start()
    return process


def _compare(out: Path, stage: Stage) -> None:
    for name in COMPARED:
        if (out / name).read_bytes() != (stage.whole / name).read_bytes():
            pairs = zip(_model_parts(out), _model_parts(stage.whole), strict=True)
            raise AssertionError(f"{name} differs; of the model: {[pair for pair in pairs if pair[0] != pair[1]]}")
    left = [path.name for path in out.rglob(".*.writing")]
    assert not left, f"left behind: {left}"


def _model_parts(run: Path) -> Any:
    """A digest of each tensor, and the description."""
    weights, description = Run(run).read_weights()
    return plain({**weights, **description})


def attack_moments(stage: Stage, chance: random.Random, count: int) -> int:
    """Killed at random moments, a training that goes on ends as it would have."""
    started = time.monotonic()
    _finish(stage, stage.place / "timed")
    duration, kills = time.monotonic() - started, 0
    while kills < count:
        out, here = stage.place / f"killed{kills}", 0
        while not (out / "result.json").exists():
            if chance.random() < 0.2:  # so that it is killed while it decodes, too
                shutil.rmtree(stage.place / "cache", ignore_errors=True)
            process = _start(stage, out)
            process.join(60 if here >= 8 else chance.uniform(0, duration))
            if process.exitcode is None:
                os.kill(process.pid or 0, chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
                process.join()
                kills, here = kills + 1, here + 1
            assert process.exitcode in (0, -signal.SIGKILL, -signal.SIGTERM), process.exitcode
        _compare(out, stage)
        shutil.rmtree(out)
    return kills


def _finish(stage: Stage, out: Path) -> None:
    process = _start(stage, out)
    process.join()
    assert process.exitcode == 0, process.exitcode
    _compare(out, stage)


def attack_writes(stage: Stage, chance: random.Random, count: int) -> int:
    """Killed in the middle of each write of a run folder, a training that goes on ends as it would have."""
    kills = 0
    while kills < count:
        out = stage.place / f"written{kills}"
        while not (out / "result.json").exists():
            process = _start(stage, out, written=chance.randrange(1, 16))
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
            kills += process.exitcode != 0
        _compare(out, stage)
        shutil.rmtree(out)
    return kills


def attack_disk(stage: Stage, chance: random.Random, count: int) -> int:
    """A disk that is full at any write ends a training in a sentence, and it goes on when there is room.

    Where a small file system can be mounted, every other disk is one.
    """
    for number in range(count):
        out = stage.place / f"disk{number}"
        with _small_disk(stage.place / "small", chance) if number % 2 else _no_disk() as small:
            if small is None:
                process = _start(stage, out, full=chance.randrange(1, 14))
                process.join()
                assert process.exitcode in (0, 4), process.exitcode
            else:
                process = _start(stage, small / "run")
                process.join()
                assert process.exitcode in (0, 4), process.exitcode
                if process.exitcode:
                    assert not (small / "run" / "result.json").exists()
                if (small / "run").exists():
                    shutil.copytree(small / "run", out)
        _finish(stage, out)
        shutil.rmtree(out)
    return count


@contextmanager
def _no_disk() -> Iterator[None]:
    yield None


@contextmanager
def _small_disk(place: Path, chance: random.Random) -> Iterator[Path | None]:
    place.mkdir(exist_ok=True)
    size = chance.choice((2**12, 2**14, 2**17, 2**20, 2**22, 2**23, 2**24))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def attack_review(stage: Stage, chance: random.Random, count: int) -> int:
    """A review server that is killed while it keeps decisions has lost none that it confirmed."""
    run = Path(shutil.copytree(stage.whole, stage.place / "reviewed"))
    classes, server = Run(run).classes, Server(run, processes=PROCESSES)
    confirmed: dict[int, tuple[str, str]] = {}
    for kills in itertools.count():
        if kills >= count and confirmed:
            break
        # On a slow machine the first decision may take longer than 0.4 s.
        delay = chance.uniform(0.01, 0.4) * max(1, kills - count + 2)
        killer = threading.Timer(delay, server.end, [signal.SIGKILL])
        killer.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        while True:
            label = chance.randrange(len(classes))
            body = json.dumps({"images": [chance.randrange(20)], "action": "label", "label": [label]})
            headers = {"X-CSDA-Review": "1", "Content-Type": "application/json"}
            try:
                connection.request("POST", "/api/decisions", body, headers)
                answer = json.loads(connection.getresponse().read())
            except (OSError, http.client.HTTPException, ValueError):
                break
            confirmed[answer["last"]] = answer["items"][0]["name"], classes[label]
        killer.join()
        kept = {each.number: (each.image, each.label) for each in read_decisions(run).decisions}
        for number, (name, label_name) in confirmed.items():
            image, label_kept = kept.get(number, ("", ""))
            assert image.endswith(name), f"decision {number} is lost"
            assert label_kept == label_name, f"decision {number} is another one"
        server.start()
    server.end()
    return count


# --- races ----------------------------------------------------------------------------------------------------------


def attack_races(stage: Stage, chance: random.Random, count: int) -> int:
    """Of processes that start the same run at once one trains it; the others are told so, or find it finished."""
    starts = 0
    while starts < count:
        out = stage.place / f"race{starts}"
        # With pixels that nobody has decoded yet they race for the cache, too.
        shutil.rmtree(stage.place / "cache", ignore_errors=True)
        processes = [_start(stage, out) for _ in range(chance.randrange(2, 5))]
        for process in processes:
            process.join()
        codes = sorted(process.exitcode or 0 for process in processes)
        assert codes[0] == 0, codes
        assert set(codes) <= {0, 3}, codes
        _compare(out, stage)
        shutil.rmtree(out)
        starts += len(processes)
    return starts


# --- names ----------------------------------------------------------------------------------------------------------

PIECES = (
    *("<script>alert(1)</script>", '"', "'", "&lt;", "<img src=x onerror=alert(1)>", "]]>", "--><b>", "{{ 7*7 }}"),
    *("{% raw %}", "javascript:alert(1)", "</style>", "\u202e", "ö", "=1+1", "%s", "$(id)", "`id`", ";", "[x](y)"),
)


class _Elements(HTMLParser):
    """The elements of a page, and attributes that would run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        links = [value or "" for name, value in attributes if name in ("href", "src", "action")]
        self.found += [name for name, _ in attributes if name.startswith("on")]
        self.found += [link for link in links if not link.startswith(("#", "data:image/", "http"))]


def _elements(page: Path) -> list[str]:
    parser = _Elements()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.found


def attack_names(stage: Stage, chance: random.Random, count: int) -> int:
    """Hostile names of classes and files add no element and no handler to a page."""
    plain = stage.place / "plain.html"
    check_module.write_page(check_module.check(load_dataset(stage.images)), plain)
    allowed = set(_elements(plain))
    for number in range(count):
        images = Path(shutil.copytree(stage.images, stage.place / f"named{number}"))
        for folder in list(images.iterdir()):
            for file in list(folder.iterdir())[:3]:
                file.rename(file.with_name(_name(chance) + file.name))
            folder.rename(folder.with_name(_name(chance) + folder.name))
        page = stage.place / "names.html"
        check_module.write_page(check_module.check(load_dataset(images)), page)
        assert set(_elements(page)) <= allowed, set(_elements(page)) - allowed
        shutil.rmtree(images)
    return count


def _name(chance: random.Random) -> str:
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(1, 4))).replace("/", "∕")[:100]


# --- the campaign ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """What is done in batches of `batch`, up to a goal; gives how many it did, or raises."""

    function: Callable[..., int]
    goal: int
    batch: int
    subject: str = ""

    def __call__(self, stage: Stage, seed: int) -> int:
        given = (self.subject,) if self.subject else ()
        return self.function(*given, stage, random.Random(seed), self.batch)


ATTACKS: dict[str, Attack] = {
    "kills at random moments": Attack(attack_moments, 1000, 25),
    "kills within writes of the run folder": Attack(attack_writes, 1000, 25),
    "racing starts": Attack(attack_races, 500, 20),
    "full disks": Attack(attack_disk, 100, 5),
    "hostile names": Attack(attack_names, 100, 20),
    "kills of the review server": Attack(attack_review, 200, 20),
    **{f"mutated {kind} images": Attack(attack_images, 10_000, 1000, kind) for kind in KINDS},
    "mutated tables": Attack(attack_tables, 10_000, 1000),
    **{f"mutated {name}": Attack(attack_run_file, 10_000, 500, name) for name in (*READERS, *CUT_OFF)},
}


def _in_child(answer: Connection, name: str, stage: Stage, seed: int) -> None:
    # It was forked from a process that has imported everything and computed nothing, and so can be forked itself.
    global PROCESSES
    PROCESSES = multiprocessing.get_context("fork")
    os.setsid()
    place = Path(tempfile.mkdtemp(dir=stage.place))
    os.environ["CSDA_CACHE"] = str(place / "cache")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        answer.send((ATTACKS[name](Stage(place, stage.images, stage.whole, stage.stopped), seed), None))
    except BaseException as error:
        answer.send((0, "".join(traceback.format_exception_only(error)).strip()[-500:]))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def attack_once(name: str, stage: Stage, seed: int) -> tuple[int, str | None]:
    """One batch in a process of its own: how many it did, and what went wrong, a crash or a wait included."""
    ours, theirs = PROCESSES.Pipe()
    process = PROCESSES.Process(target=_in_child, args=(theirs, name, stage, seed))
    process.start()
    theirs.close()
    process.join(SECONDS)
    ended = process.exitcode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
    process.join()
    if ended is None:
        return 0, f"did not end within {SECONDS} s"
    try:
        done: tuple[int, str | None] = ours.recv()
    except EOFError:
        return 0, f"ended with exit code {ended}"
    return done


def count_all(sessions: list[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(session["counts"].get(name, 0) for session in sessions) for name in ATTACKS}


def run_campaign(minutes: float, seed: int, results: Path, names: list[str] | None = None, jobs: int = 1) -> int:
    """Attack for so long, in so many batches at a time, and add what was done to the results; how many failed."""
    sessions = json.loads((results / "sessions.json").read_text()) if (results / "sessions.json").is_file() else []
    session: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": source_commit(),
        "seed": seed,
        "minutes": 0.0,
        "counts": {},
        "failures": [],
    }
    started, before = time.monotonic(), count_all(sessions)
    with tempfile.TemporaryDirectory(prefix="csda-attack-") as folder:
        stage = Stage.build(Path(folder))
        batches = dict.fromkeys(names or ATTACKS, 0)
        running: dict[Future[tuple[int, str | None]], tuple[str, int]] = {}
        with ThreadPoolExecutor(jobs) as pool:
            while running or time.monotonic() - started < 60 * minutes:
                if len(running) < jobs and time.monotonic() - started < 60 * minutes:
                    # By what was tried, so that one that fails leaves time for the others.
                    name = min(
                        batches,
                        key=lambda each: (before[each] + batches[each] * ATTACKS[each].batch) / ATTACKS[each].goal,
                    )
                    chosen = random.Random(f"{seed} {name} {batches[name]}").getrandbits(32)
                    batches[name] += 1
                    running[pool.submit(attack_once, name, stage, chosen)] = name, chosen
                    continue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    name, chosen = running.pop(future)
                    done, problem = future.result()
                    session["counts"][name] = session["counts"].get(name, 0) + done
                    if problem is not None:
                        session["failures"].append({"attack": name, "seed": chosen, "what": problem})
                        print(f"{name}, seed {chosen}: {problem}", flush=True)
                    session["minutes"] = round((time.monotonic() - started) / 60, 1)
                    write_results(results, [*sessions, session])
    return len(session["failures"])


def write_results(results: Path, sessions: list[dict[str, Any]]) -> None:
    results.mkdir(parents=True, exist_ok=True)
    write_whole(results / "sessions.json", json.dumps(sessions, indent=1, ensure_ascii=False) + "\n")
    write_whole(results / "page.md", format_page(sessions))


def format_page(sessions: list[dict[str, Any]]) -> str:
    """What was done so far, and what came of it."""
    failures = [(session, failure) for session in sessions for failure in session["failures"]]
    lines = [
        "# The attack",
        "",
        f"`make attack`, {len(sessions)} sessions, {sum(each['minutes'] for each in sessions):.1f} minutes in all. "
        "What each attack does is said in `tests/attack/campaign.py`.",
        "",
        "| attack | done | goal | failed batches |",
        "|---|---|---|---|",
    ]
    for name, done in count_all(sessions).items():
        failed = sum(failure["attack"] == name for _, failure in failures)
        lines.append(f"| {name} | {done:,} | {ATTACKS[name].goal:,} | {failed} |")
    lines += ["", "| session | commit | seed | minutes | failed batches |", "|---|---|---|---|---|"]
    for session in sessions:
        commit = (session["commit"] or "unknown")[:7]
        cells = (session["date"], commit, session["seed"], session["minutes"], len(session["failures"]))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    # What came of a failure is written into sessions.json by whoever looked into it.
    alike: dict[tuple[str, str, str], list[str]] = {}
    for _, failure in failures:
        kind = failure["attack"], failure["what"], failure.get("answer", "")
        alike.setdefault(kind, []).append(str(failure["seed"]))
    if alike:
        lines += ["", "Failures, with what they were:", ""]
        for (name, what, answer), seeds in alike.items():
            lines.append(f"- {name}, seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}: `{what}`. {answer}".rstrip())
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--jobs", type=int, default=2, help="batches at a time")
    parser.add_argument("--only", choices=ATTACKS, default=None)
    parser.add_argument("--batch", type=int, default=None, help="repeat this batch of --only, and keep nothing")
    parser.add_argument("--page", action="store_true", help="write the page again, and attack nothing")
    given = parser.parse_args()
    if given.page:
        write_results(given.out, json.loads((given.out / "sessions.json").read_text(encoding="utf-8")))
        return
    if given.batch is not None:
        with tempfile.TemporaryDirectory(prefix="csda-attack-") as folder:
            print(attack_once(given.only, Stage.build(Path(folder)), given.batch))
        return
    seed = random.randrange(2**31) if given.seed is None else given.seed
    failures = run_campaign(given.minutes, seed, given.out, [given.only] if given.only else None, given.jobs)
    print((given.out / "page.md").read_text())
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
