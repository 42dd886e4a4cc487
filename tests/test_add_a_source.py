"""The steps of docs/how-to/add-a-source.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

from how_to import SMALL, copy_sources, insert_before, named_file, read_steps, run


def test_the_three_steps_lead_to_a_source(tmp_path: Path) -> None:
    checkout, steps = copy_sources(tmp_path), read_steps("add-a-source.md")
    assert sorted(steps) == [1, 2, 3]
    text, (code,) = steps[1]
    (checkout / named_file(text)).write_text(code, encoding="utf-8")
    text, (entry,) = steps[2]
    insert_before(checkout / named_file(text), ('    "folder": (', entry))

    images, generator = checkout / "pad_ufes_20", np.random.default_rng(0)
    (images / "imgs_part_1").mkdir(parents=True)
    with (images / "metadata.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["img_id", "diagnostic", "patient_id"])
        for number in range(60):
            Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                images / "imgs_part_1" / f"{number}.png"
            )
            writer.writerow([f"{number}.png", "NEV" if number % 3 else "MEL", f"PAT_{number // 2}"])

    _, (commands,) = steps[3]
    check, train = (shlex.split(line) for line in commands.splitlines())
    said = run(["-m", *check], checkout)
    assert "pad_ufes" in said
    assert "30" in said  # patients
    small = [word for setting in (*SMALL, "image_size=32") for word in ("--set", setting)]
    run(["-m", *train, "--labels", "50%", *small], checkout)
    assert (checkout / "runs/pad/result.json").is_file()
