"""The steps of docs/how-to/add-a-command.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import csv
import shlex
import shutil
from collections import Counter
from pathlib import Path

from csda.runs import Run
from how_to import copy_sources, insert_before, named_file, read_steps, run


def test_the_three_steps_lead_to_a_command(tiny_run: Run, tmp_path: Path) -> None:
    checkout, steps = copy_sources(tmp_path), read_steps("add-a-command.md")
    assert sorted(steps) == [1, 2, 3]
    text, (code,) = steps[1]
    (checkout / named_file(text)).write_text(code, encoding="utf-8")
    text, (code,) = steps[2]
    insert_before(checkout / named_file(text), ("def main() -> None:", code))

    shutil.copytree(tiny_run.folder, checkout / "runs" / "first")
    _, (commands,) = steps[3]
    reference, command = (shlex.split(line) for line in commands.splitlines())
    run(reference[1:], checkout)
    assert "csda pseudo-counts" in (checkout / "docs/reference/cli.md").read_text(encoding="utf-8")
    said = run(["-m", *command], checkout)
    with (tiny_run.folder / "pseudo_labels.csv").open(newline="", encoding="utf-8") as stream:
        counts = Counter(line["predicted"] for line in csv.DictReader(stream))
    assert said.splitlines() == [f"{name}: {count}" for name, count in sorted(counts.items())]
    (checkout / "runs/first/pseudo_labels.csv").unlink()
    assert "finish the run first" in run(["-m", *command], checkout, code=2)
