import pickle
from collections import Counter

import numpy as np
import pytest

from csda.data.synthetic import CLASSES, PREVALENCE, TRAITS, Dice, draw_traits, load, training_counts
from csda.errors import DataError


def labels_of(dataset, part):
    return [record.label for record in dataset.records if record.part == part]


def test_parts_and_proportions():
    dataset = load(images=3000)
    train = Counter(labels_of(dataset, "train"))
    assert dataset.classes == ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
    assert train.total() == 3000
    for label, count in enumerate(PREVALENCE):
        assert train[label] == pytest.approx(3000 * count / sum(PREVALENCE), abs=3)
    assert Counter(labels_of(dataset, "val")) == dict.fromkeys(range(7), 50)
    assert Counter(labels_of(dataset, "test")) == dict.fromkeys(range(7), 100)
    assert len({record.id for record in dataset.records}) == len(dataset.records)
    assert dataset.records[17].id == "synthetic-00017"
    assert all(record.path is None for record in dataset.records)


@pytest.mark.parametrize("images", [28, 40, 151, 1000, 10015])
def test_every_class_is_trained_on(images):
    counts = training_counts(images)
    assert sum(counts) == images
    assert min(counts) >= 4
    assert max(counts) == counts[CLASSES.index("NV")]


def test_too_few_images_are_refused():
    with pytest.raises(DataError, match=r"27 images.*28 or more"):
        load(images=27)


@pytest.mark.parametrize("size", [32, 50, 128])
def test_sizes(size):
    pixels = load().draw([5, 3200], size)
    assert pixels.shape == (2, size, size, 3)
    assert pixels.dtype == np.uint8
    assert load().draw([], size).shape == (0, size, size, 3)


def test_an_image_depends_on_seed_and_position_alone():
    dataset, positions = load(seed=3), list(range(80))
    pixels = dataset.draw(positions, 32)
    shuffled = np.random.default_rng(0).permutation(80)
    assert np.array_equal(load(seed=3).draw(shuffled.tolist(), 32), pixels[shuffled])
    assert np.array_equal(pickle.loads(pickle.dumps(dataset.draw))([79], 32), pixels[79:])
    assert len(np.unique(pixels, axis=0)) == 80


def test_another_seed_draws_and_orders_anew():
    first, second = load(seed=0), load(seed=1)
    assert labels_of(first, "train") != labels_of(second, "train")
    assert not np.array_equal(first.draw([0], 32), second.draw([0], 32))


def test_every_size_shows_the_same_picture():
    dataset, positions = load(), list(range(12))
    large = dataset.draw(positions, 256).reshape(12, 32, 8, 32, 8, 3).mean((2, 4))
    small = dataset.draw(positions, 32).astype(float)
    same = np.abs(small - large).mean((1, 2, 3))
    other = np.abs(small - np.roll(large, 1, axis=0)).mean((1, 2, 3))
    assert same.max() < 2
    assert other.min() > 3 * same.max()


def test_traits_are_typical_at_difficulty_zero_and_scatter_with_it():
    fibroma = CLASSES.index("DF")
    positions, labels = range(300), np.full(300, fibroma)
    for name, values in draw_traits(Dice(0, positions), labels, 0.0).items():
        assert np.allclose(values, TRAITS[name][fibroma])
    easy, hard = (draw_traits(Dice(0, positions), labels, difficulty)["scar"].std() for difficulty in (0.5, 1.0))
    assert 0 < easy < hard


def test_classes_differ_and_overlap():
    """The mean color inside and outside and the contrast of each channel tell classes apart, but only in part."""
    dataset = load()
    test = [position for position, record in enumerate(dataset.records) if record.part == "test"]
    labels = np.array([dataset.records[position].label for position in test])
    pixels = dataset.draw(test, 32) / 255.0
    center = pixels[:, 8:24, 8:24]
    features = np.concatenate([center.mean((1, 2)), center.std((1, 2)), pixels.mean((1, 2))], 1)
    features = (features - features.mean(0)) / features.std(0)
    half = np.arange(len(test)) % 2 == 0
    means = np.stack([features[half & (labels == label)].mean(0) for label in range(7)])
    nearest = np.square(features[~half, None] - means).sum(2).argmin(1)
    recall = np.mean([(nearest[labels[~half] == label] == label).mean() for label in range(7)])
    assert 2 / 7 < recall < 0.7
