"""The demonstration in small: the same parts on tiny images, with the weights that it begins with and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from csda import demo
from csda.errors import RunError
from csda.progress import Reporter
from csda.runs import Run
from tiny import train_tiny


@pytest.fixture
def small(tiny_images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*, method: str, preset: str, seed: int, out: Path, settings: dict[str, Any], **options: Any) -> Run:
        return train_tiny(
            tiny_images, out, method=method, preset=preset, seed=seed, **options, **(settings | {"image_size": 32})
        )

    monkeypatch.setattr(demo, "train", train)


def test_each_step_stands_beside_the_one_before(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = demo.run_demo(tmp_path / "demo", 0, Reporter())
    said = capsys.readouterr().out
    assert said.index("linear-probe − baseline") < said.index("self-train − linear-probe") < said.index("Report: ")
    assert demo.REMARK in said
    assert {run.name for run in page.parent.iterdir() if run.is_dir()} == {"baseline", "linear-probe", "self-train"}
    with pytest.raises(RunError, match="begun with other settings"):
        demo.run_demo(tmp_path / "demo", 1, Reporter())


def test_without_weights_it_shows_what_it_can(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "lacks_weights", lambda chosen: True)
    monkeypatch.setenv("COLUMNS", "100")
    demo.run_demo(tmp_path / "demo", 0, Reporter())
    said = capsys.readouterr().out
    assert "csda − baseline" in said
    assert "pip install 'csda[pretrained]' shows it" in said
