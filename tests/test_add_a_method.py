"""The five steps of docs/how-to/add-a-method.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from how_to import SMALL, copy_sources, insert_before, named_file, read_steps, run


def test_the_five_steps_lead_to_a_trained_method(tmp_path: Path) -> None:
    checkout, steps = copy_sources(tmp_path), read_steps("add-a-method.md")
    assert sorted(steps) == [1, 2, 3, 4, 5]

    text, (code,) = steps[1]
    (checkout / named_file(text)).write_text(code, encoding="utf-8")

    text, (imports, entry) = steps[2]
    insert_before(
        checkout / named_file(text),
        ("from csda.methods.neighbor_matching import", imports),
        ('    "lsse": Entry(', entry),
    )

    text, (code,) = steps[3]
    (checkout / named_file(text)).write_text(code, encoding="utf-8")

    _, (commands,) = steps[4]
    tests, reference = (shlex.split(line) for line in commands.splitlines())
    assert tests[0] == "pytest"
    passed = re.search(r"(\d+) passed", run(["-m", *tests], checkout))
    assert passed is not None
    assert int(passed[1]) >= 15
    assert reference[0] == "python"
    run(reference[1:], checkout)
    assert "`mean-teacher`" in (checkout / "docs/reference/settings.md").read_text(encoding="utf-8")

    _, (command,) = steps[5]
    assert command.startswith("csda train ")
    small = [word for setting in (*SMALL, "image_size=32") for word in ("--set", setting)]
    run(["-m", *shlex.split(command), *small, "--out", "run"], checkout)
    settings = (checkout / "run/config.toml").read_text(encoding="utf-8")
    assert 'method = "mean-teacher"' in settings
    assert "consistency = 20" in settings
    assert len((checkout / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
