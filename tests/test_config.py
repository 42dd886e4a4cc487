"""Settings: typed, complete, and none that nobody reads."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from pydantic.fields import FieldInfo

import csda
from csda.config import RunConfig, Settings, differences, format_config, parse_assignments, parse_config, read_config
from csda.errors import ConfigError
from csda.methods import METHODS, Entry
from csda.methods.baseline import Baseline
from csda.presets import PRESETS, configure

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
    if (preset, method) == ("features", "lsse"):
        with pytest.raises(ConfigError, match="'lsse' needs images, not their features; give frozen=false"):
            configure({"preset": preset, "method": method})
        return
    config = configure({"preset": preset, "method": method})
    file = tmp_path / "config.toml"
    file.write_text(format_config(config), encoding="utf-8")
    assert read_config(file) == config


@pytest.mark.parametrize("preset", sorted(RESOLVED))
@pytest.mark.parametrize("method", sorted(RESOLVED["paper"]))
def test_settings_resolve_to_what_they_were_when_results_were_made(preset: str, method: str) -> None:
    """The table was written before presets named their settings by method. No value was meant to change with that; what
    is split by has since become a choice, and experiments name theirs; settings that are younger have their default."""
    config = configure({"method": method, "preset": preset, "precision": "float32"})
    assert RESOLVED[preset][method]["split_by"] == "image"
    fields = RunConfig.model_fields
    younger = {name: fields[name].default for name in fields.keys() - RESOLVED[preset][method].keys()}
    younger["split_by"] = None
    own, own_fields = RESOLVED[preset][method]["method_settings"], METHODS[method].settings.model_fields
    younger["method_settings"] = {name: field.default for name, field in own_fields.items()} | own
    assert json.loads(json.dumps(config.model_dump())) == RESOLVED[preset][method] | younger


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("method", ["self-train", "fixmatch", "glm", "nm", "bis", "lsse"])
def test_a_preset_leaves_other_papers_losses_alone(preset: str, method: str) -> None:
    images = {"frozen": False} if method == "lsse" else {}
    own, usual = (
        configure({"method": method, "preset": name, **images}).method_settings for name in (preset, "default")
    )
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


FIELDS = {
    (key, repr(field)): (method, key, field)
    for method, entry in METHODS.items()
    for key, field in (RunConfig.model_fields | entry.settings.model_fields).items()
    if key != "method_settings"
}.values()
"""Every setting once, with a method that has it."""


def _outside(annotation: object, limits: Sequence[object]) -> st.SearchStrategy[object]:
    """Values that a setting does not take, by its annotation and the limits behind it."""
    if get_origin(annotation) is Annotated:
        inner, *limits = get_args(annotation)
        return _outside(inner, [each for limit in limits for each in getattr(limit, "metadata", [limit])])
    if get_origin(annotation) in (Union, UnionType):
        # What one kind refuses the other may take: numbers are for those that take numbers alone or choices beside.
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _outside(kinds[-1], limits)
    if get_origin(annotation) in (list, tuple):
        return st.lists(_outside(get_args(annotation)[0], []), min_size=1, max_size=3)
    if get_origin(annotation) is Literal:
        return st.text(max_size=20).filter(lambda text: text not in get_args(annotation))
    if annotation is bool:
        return st.sampled_from(["perhaps", "", 2, -1, 0.5, []])
    if annotation is str:
        return st.sampled_from(["", 1.5, [], {}])
    assert annotation in (int, float)
    out: list[st.SearchStrategy[object]] = [st.sampled_from(["", "many", float("nan"), float("inf"), True, [], {}])]
    numbers = st.integers if annotation is int else st.floats
    bounds = {
        name: getattr(limit, name) for limit in limits for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)
    }
    assert bounds.keys() & {"ge", "gt"}, "a number without a lower bound"
    assert bounds.keys() & {"le", "lt"}, "a number without an upper bound"
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    out.append(numbers(max_value=low).filter(lambda value: value < low or "gt" in bounds))
    out.append(numbers(min_value=high).filter(lambda value: value > high or "lt" in bounds))
    return st.one_of(out)


@pytest.mark.parametrize(("method", "key", "field"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_values_outside_are_refused_by_name(method: str, key: str, field: FieldInfo, data: st.DataObject) -> None:
    value = data.draw(_outside(field.annotation, field.metadata))
    with pytest.raises(ConfigError, match=rf"{key}(\.\d+)? = "):
        configure({"method": method, key: value} if key != "method" else {"method": value})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=500, deadline=None)
@given(where=st.sampled_from(list(FIELDS)), value=ANYTHING)
def test_any_value_is_taken_or_refused_in_a_sentence(where: tuple[str, str, FieldInfo], value: object) -> None:
    method, key, _ = where
    try:
        configure({"method": method, key: value})
    except ConfigError as error:
        refusal = str(error)
    else:
        return
    assert key in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ({"temperature": -5}, "temperature = -5: choose 'adaptive' or 'unlabeled', or give"),
        ({"lr_decay_at": (5, -1)}, "lr_decay_at.0 = 5: give less than 1; lr_decay_at.1 = -1: give more than 0"),
        ({"lr_decay_at": [0.5, 0.2]}, "lr_decay_at = [0.5, 0.2] is not in increasing order"),
        ({"capacity": 10**12}, "capacity = 1000000000000: give at most 100000"),
        ({"threads": 100_000}, "threads = 100000: give at most 1024"),
        ({"lr": 1e308}, "lr = 1e+308: give at most 100"),
        ({"epochs": 10**5000}, "epochs = a number with too many digits"),
        ({"epochs": True}, "epochs = True is not a value of this setting"),
        ({"layers": [2, 2]}, "layers = [2, 2] has a layer twice"),
        ({"labels": "many"}, "labels = 'many'"),
        ({"labels": "0"}, "labels = '0'"),
        ({"device": "tpu"}, "device = 'tpu' is unknown; give auto, cpu or cuda"),
        ({"source": ""}, "source = ''"),
    ],
)
def test_values_that_once_trained_are_refused(chosen: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        configure(chosen)


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
    assert parse_assignments([f"epochs={'9' * 5000}"]) == {"epochs": "9" * 5000}
    for wrong in ("epochs", "=3"):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignments([wrong])


@given(st.text(min_size=1, max_size=40))
def test_any_text_survives_the_file(text: str) -> None:
    import tomllib

    config = RunConfig(data=text)
    assert tomllib.loads(format_config(config))["data"] == text


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    """As it was written before a library did it: lists in one line, and without settings that are younger."""
    file = tmp_path / "config.toml"
    lines = ['data = "a \\"b\\" \\u0007"', "epochs = 3", "lr_decay_at = [0.1953125, 0.48828125]", "flip = true", ""]
    file.write_text("\n".join([*lines, "[method_settings]", "gamma = 0.5", "layers = [0, 2, 4]", ""]), encoding="utf-8")
    config = read_config(file)
    assert (config.data, config.epochs, config.flip, config.threads) == ('a "b" \x07', 3, True, 0)
    assert config.lr_decay_at == (0.1953125, 0.48828125)
    assert config.method_settings == {"gamma": 0.5, "layers": [0, 2, 4]}
    assert parse_config(format_config(config)) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("epochs = ", "not a TOML file"),
        ("speed = 3\n", "speed: unknown"),
        ("epochs = 0\n", "epochs = 0: give"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"{file}: {named}")) as caught:
        read_config(file)
    assert "\n" not in str(caught.value)


def test_differences_are_listed_by_name() -> None:
    chosen = {"preset": "default", "epochs": 4}
    ours, theirs = configure(chosen | {"epochs": 3, "gamma": 0.5}), configure(chosen)
    assert differences(ours, theirs) == ["epochs: 4 → 3", "gamma: 1.0 → 0.5"]
