"""Settings: typed, complete, and none that nobody reads."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

import csda
from csda.config import PRESETS, RunConfig, Settings, differences, format_config, parse_assignments, read_config
from csda.errors import ConfigError
from csda.methods import METHODS, Entry
from csda.methods.baseline import Baseline
from csda.training import configure

SOURCE = [path for path in Path(csda.__file__).parent.rglob("*.py") if path.name != "config.py"]
RESOLVED = json.loads((Path(__file__).parent / "reference" / "resolved_settings.json").read_text(encoding="utf-8"))
READ = {
    node.attr
    for path in SOURCE
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
}


@pytest.mark.parametrize("field", sorted(RunConfig.model_fields))
def test_every_field_of_the_configuration_is_read_somewhere(field: str) -> None:
    # The preset acts when the configuration is made; later it only says where the values came from.
    assert field in READ | {"preset"}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_setting_of_a_method_is_read_somewhere(method: str) -> None:
    assert set(METHODS[method].settings.model_fields) <= READ


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_presets_fit_every_method_and_survive_the_file(preset: str, method: str, tmp_path: Path) -> None:
    config = configure({"preset": preset, "method": method})
    file = tmp_path / "config.toml"
    file.write_text(format_config(config), encoding="utf-8")
    assert read_config(file) == config


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("method", sorted(METHODS))
def test_settings_resolve_to_what_they_were_when_results_were_made(preset: str, method: str) -> None:
    """The table was written before presets named their settings by method. No value was meant to change with that."""
    config = configure({"method": method, "preset": preset, "precision": "float32"})
    assert json.loads(json.dumps(config.model_dump())) == RESOLVED[preset][method]


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("method", ["self-train", "fixmatch", "glm", "nm", "bis", "lsse"])
def test_a_preset_leaves_other_papers_losses_alone(preset: str, method: str) -> None:
    own, usual = (configure({"method": method, "preset": name}).method_settings for name in (preset, "default"))
    for setting in ("weight", "weight_ramp", "soft"):
        assert own.get(setting) == usual.get(setting)


class _OwnWeight(Settings):
    weight: float = Field(10.0, description="of a loss that no other method has")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_leaves_settings_of_the_same_name_alone(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quick` has a weight for CSDA and its parts; what another method calls its weight is another thing."""
    monkeypatch.setitem(METHODS, "other", Entry(Baseline, _OwnWeight, "another method", "–"))
    assert configure({"method": "other", "preset": preset}).method_settings == {"weight": 10.0}


def test_presets_name_only_settings_that_exist_and_that_the_method_leaves_open() -> None:
    for preset in PRESETS.values():
        assert preset.run.keys() <= RunConfig.model_fields.keys() - {"method_settings"}
        assert preset.methods.keys() <= METHODS.keys()
        for method, own in preset.methods.items():
            assert own.keys() <= METHODS[method].settings.model_fields.keys() - METHODS[method].defaults.keys()


def test_paper_preset_reads_as_the_text_does() -> None:
    config = configure({"preset": "paper"})
    assert (config.epochs, config.batch_size, config.image_size) == (256, 128, 128)
    assert [round(share * config.epochs) for share in config.lr_decay_at] == [50, 125]
    own = config.method_settings
    assert (own["refresh"], own["teacher_update"], own["order"]) == ("epoch", "epoch", "train_first")
    assert (own["temperature"], own["momentum"], own["teacher_momentum"]) == ("adaptive", 0.95, 0.95)
    assert (own["capacity"], own["gamma"], own["delta"], own["soft"]) == (512, 1.0, 0.25, True)


@pytest.mark.parametrize(
    ("chosen", "warm_up_epochs"),
    [
        ({"preset": "quick"}, 8),
        ({"preset": "quick", "epochs": 30}, 8),
        ({"preset": "quick", "epochs": 4}, 1),
        ({"preset": "quick", "epochs": 2}, 1),
        ({"preset": "quick", "epochs": 60}, 16),
        ({"preset": "quick", "epochs": 60, "warm_up_epochs": 8}, 8),
        ({"preset": "quick", "epochs": 1, "method": "baseline"}, 1),
        ({"preset": "default", "epochs": 256}, 1),
        ({"preset": "paper", "epochs": 28}, 1),
    ],
)
def test_epochs_on_labels_alone_keep_their_share(chosen: dict[str, object], warm_up_epochs: int) -> None:
    """Of a preset that names them; the first epoch of the paper stays one."""
    assert configure(chosen).warm_up_epochs == warm_up_epochs


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"epochs": 0}, "epochs = 0"),
        ({"epochs": 1}, "warm_up_epochs = 1 on labels alone leave none of epochs = 1"),
        ({"epochs": 2, "warm_up_epochs": 2}, "warm_up_epochs = 2 on labels alone leave none"),
        ({"epochs": "many"}, "epochs = 'many'"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"seed": -1}, "seed = -1"),
        ({"delta": 1.5}, "delta = 1.5"),
        ({"gama": 1}, "did you mean gamma"),
        ({"method": "cdsa"}, "method = 'cdsa'"),
        ({"preset": "fast"}, "preset = 'fast'"),
        ({"method": "baseline", "gamma": 1}, "unknown setting 'gamma' for method 'baseline'"),
        ({"method_settings": {}}, "unknown setting 'method_settings'"),
        ({"image_size": 30}, "image_size = 30"),
    ],
)
def test_a_wrong_setting_is_named(chosen: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        configure(chosen)
    assert "http" not in str(caught.value)


def test_assignments_are_read_as_toml_or_text() -> None:
    given_text = ["epochs=3", "lr=0.1", "flip=true", "temperature=adaptive", "lr_decay_at=[0.5]", 'source="folder"']
    assert parse_assignments(given_text) == {
        "epochs": 3,
        "lr": 0.1,
        "flip": True,
        "temperature": "adaptive",
        "lr_decay_at": [0.5],
        "source": "folder",
    }
    for wrong in ("epochs", "=3"):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignments([wrong])


@given(st.text(max_size=40))
def test_any_text_survives_the_file(text: str) -> None:
    import tomllib

    config = RunConfig(data=text)
    assert tomllib.loads(format_config(config))["data"] == text


def test_differences_are_listed_by_name() -> None:
    chosen = {"preset": "default", "epochs": 4}
    ours, theirs = configure(chosen | {"epochs": 3, "gamma": 0.5}), configure(chosen)
    assert differences(ours, theirs) == ["epochs: 4 → 3", "gamma: 1.0 → 0.5"]
