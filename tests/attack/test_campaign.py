"""The longer attack, in its shortest form: a small batch of each kind, seeded, and the counts that it keeps."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import campaign
from campaign import ATTACKS, RESULTS, Attack, Stage

from csda.models.backbones import BACKBONES

pytestmark = pytest.mark.usefixtures("small_network")

del BACKBONES["small"]

FEW = {
    "kills at random moments": 4,
    "kills within writes of the run folder": 6,
    "racing starts": 6,
    "full disks": 2,
    "hostile names": 3,
    "kills of the review server": 3,
}


@pytest.fixture(scope="module")
def stage(small_network: None, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("attack")
        patch.setenv("CSDA_CACHE", str(place / "cache"))
        return Stage.build(place)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.filterwarnings("ignore")
def test_a_small_batch_of_each_attack(name: str, stage: Stage, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    count = FEW.get(name, 60)
    given = (attack.subject,) if attack.subject else ()
    own = Stage(tmp_path, stage.images, stage.whole, stage.stopped)
    assert attack.function(*given, own, random.Random(22), count) >= count


def _crash(stage: Stage, chance: random.Random, count: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return count


def _fail(stage: Stage, chance: random.Random, count: int) -> int:
    raise AssertionError("a change went unseen")


def test_counts_add_up_over_sessions_and_failures_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def attack_once(name: str, stage: object, seed: int) -> tuple[int, str | None]:
        seeds.append(seed)
        return (7, None) if len(seeds) != 2 else (0, "an element")

    monkeypatch.setattr(campaign, "attack_once", attack_once)
    monkeypatch.setattr(Stage, "build", lambda place: None)
    clock = itertools.count()
    monkeypatch.setattr(campaign.time, "monotonic", lambda: next(clock))
    failures = [campaign.run_campaign(0.2, seed, tmp_path, ["hostile names"]) for seed in (1, 2)]
    assert failures == [1, 0]
    sessions = json.loads((tmp_path / "sessions.json").read_text())
    assert [session["seed"] for session in sessions] == [1, 2]
    total = sum(session["counts"]["hostile names"] for session in sessions)
    assert total == 7 * (len(seeds) - 1)
    page = (tmp_path / "page.md").read_text()
    assert f"| hostile names | {total:,} | 100 | 1 |" in page
    assert f"- hostile names, seed {seeds[1]}: `an element`." in page
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(("function", "what"), [(_crash, "exit code -9"), (_fail, "a change went unseen")])
def test_a_crash_and_a_failure_are_noticed(
    function: object, what: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "PROCESSES", campaign.multiprocessing.get_context("fork"))
    monkeypatch.setitem(ATTACKS, "hostile names", Attack(function, 1, 1))  # type: ignore[arg-type]
    done, problem = campaign.attack_once("hostile names", stage, 1)
    assert done == 0
    assert problem is not None
    assert what in problem


def test_the_page_is_that_of_the_sessions() -> None:
    sessions = json.loads((RESULTS / "sessions.json").read_text(encoding="utf-8"))
    assert (RESULTS / "page.md").read_text(encoding="utf-8") == campaign.format_page(sessions)
    assert all(session["commit"] for session in sessions)
