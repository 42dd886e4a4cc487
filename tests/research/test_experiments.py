"""Files in experiments/ are read strictly and fit the data set they run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from csda.errors import ConfigError
from csda.research.experiments import HERE, choose_variant, read_experiment


@pytest.mark.parametrize("text", ["title = ", "title = 'x'\nlabels = ['9']\nseeds = [1]\nrows = []\nspeed = 1\n"])
def test_a_wrong_experiment_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"wrong\.toml"):
        read_experiment(str(file))
    with pytest.raises(ConfigError, match="no such experiment"):
        read_experiment("nowhere")


def test_table1_has_the_gains_of_the_paper() -> None:
    _, experiment = read_experiment(str(HERE / "table1.toml"))
    by_name = {row.name: row.paper for row in experiment.rows}
    gains = [
        [round(100 * (by_name["csda"][labels][k] - by_name["baseline"][labels][k]), 2) for labels in experiment.labels]
        for k in (0, 1)
    ]
    assert gains == [[2.51, 2.98, 3.47, 3.2, 1.96], [2.37, 2.31, 7.78, 6.29, 8.02]]


def test_another_data_set_has_its_own_counts(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("Path,Sex,Age,Frontal/Lateral\n")
    name, experiment = read_experiment(str(HERE / "table6.toml"))
    assert experiment.labels[0] == "5% of groups"
    stem, variant = choose_variant(name, experiment, str(tmp_path))
    assert (stem, variant.labels) == ("table6_chexpert", ["100", "200", "300", "400", "500"])
    assert variant.splits == {"glm": {"split": "splits_latent_mixing", "split_by": "image"}}
    assert choose_variant(name, experiment, str(tmp_path / "none")) == (name, experiment)


def test_a_row_may_have_fewer_splits_than_the_table(tmp_path: Path) -> None:
    file = tmp_path / "rows.toml"
    text = """
    title = "x"
    labels = ["9"]
    seeds = [1]
    splits = {{ one = {{}}, two = {{}} }}
    rows = [{{ method = "baseline" }}, {{ method = "csda", splits = ["{split}"] }}]
    """
    file.write_text(text.format(split="two"))
    _, experiment = read_experiment(str(file))
    places = [(row.method, labels, split) for row, labels, split in experiment.places]
    assert places == [("baseline", "9", "one"), ("baseline", "9", "two"), ("csda", "9", "two")]
    file.write_text(text.format(split="tow"))
    with pytest.raises(ConfigError, match=r"rows\.toml: row csda: no split tow"):
        read_experiment(str(file))
