"""The steps of docs/how-to/add-a-backbone.md, followed to the letter in a copy of the sources."""

from __future__ import annotations

import shlex
from pathlib import Path

from how_to import SMALL, copy_sources, insert_before, named_file, read_steps, run


def test_the_steps_lead_to_a_trained_network(tmp_path: Path) -> None:
    checkout, steps = copy_sources(tmp_path), read_steps("add-a-backbone.md")
    assert sorted(steps) == [1, 2, 3]
    text, (code,) = steps[1]
    (checkout / named_file(text)).write_text(code, encoding="utf-8")
    text, (imports, line) = steps[2]
    table = checkout / named_file(text)
    insert_before(table, ("\n\nclass ResidualBlock", "\n" + imports.rstrip()), ("}\n\n\ndef build_encoder", line))

    _, (command,) = steps[3]
    assert command.startswith("csda train ")
    words = ["-m", *shlex.split(command), *(word for setting in SMALL for word in ("--set", setting))]
    run([*words, "--out", "run"], checkout)
    assert 'backbone = "vgg_small"' in (checkout / "run/config.toml").read_text(encoding="utf-8")
    shapes = "from csda.predict import load; import numpy as np; p = load('run'); "
    shapes += "print(p.predict(np.zeros((3, 40, 40, p.channels), np.uint8)).shape[0], p.model.student.width)"
    assert run(["-c", shapes], checkout).split() == ["3", "192"]

    mixing = ["-m", "csda", "train", "--method", "mixup", "--set", "backbone=vgg_small", "--set", "image_size=40"]
    small = [word for setting in SMALL for word in ("--set", setting)]
    refused = run([*mixing, *small, "--set", "layers=[0,6]", "--out", "mixed"], checkout, code=2)
    assert "layers = [0, 6]: this backbone has 5 stages" in refused
    assert not (checkout / "mixed").exists()
    run([*mixing, *small, "--set", "layers=[0,2]", "--out", "mixed"], checkout)


def test_a_size_that_the_network_cannot_take_is_refused_before_images_are_read(tmp_path: Path) -> None:
    checkout = copy_sources(tmp_path)
    (checkout / "src/csda/models/picky.py").write_text(
        "from torch import nn\n"
        "from csda.models.encoder import Encoder\n"
        "def picky(image_size, channels, dropout=0.5):\n"
        "    return Encoder(nn.Sequential(nn.Flatten(), nn.Linear(channels * 64**2, 8)), width=8)\n"
    )
    table = checkout / "src/csda/models/backbones.py"
    insert_before(
        table,
        ("\n\nclass ResidualBlock", "\nfrom csda.models.picky import picky"),
        ("}\n\n\ndef build_encoder", '    "picky": picky,\n'),
    )
    command = ["-m", "csda", "train", "--set", "backbone=picky", "--set", "image_size=48", "--out", "run"]
    refused = run(command, checkout, code=2)
    assert "csda: image_size = 48 does not fit backbone picky: " in refused
    assert not (checkout / "run").exists()
    unknown = run(["-m", "csda", "train", "--set", "backbone=pickey", "--out", "run"], checkout, code=2)
    assert "backbone = 'pickey' is unknown; did you mean picky?" in unknown
