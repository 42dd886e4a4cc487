"""`synthetic`: skin lesions as in dermoscopy, drawn by the package.

Every image is a picture of sixteen traits (size, pigment, network, veil, ...). A class has a typical value of each
trait. A lesion is a mixture of its own class and a similar one, so that classes overlap like melanomas, naevi and
keratoses. Skin is rendered by absorption: melanin and blood absorb each colour by its own coefficient (Beer-Lambert).
Scars, scales and veils are drawn on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from csda.data.records import Dataset, Part, Pixels, Record
from csda.errors import DataError

Array = npt.NDArray[np.floating]

CLASSES = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")
PREVALENCE = (1113, 6705, 514, 327, 1099, 115, 142)
"""Images of each class in HAM10000."""

FEWEST_TRAINING, VALIDATION, TEST = 4, 50, 100
"""Smallest number of training images of each class, and number of validation and of test images."""

TRAITS = {
    #               MEL  NV   BCC  AKIEC BKL DF   VASC
    "size":         (.71, .43, .43, .59, .59, .31, .34),
    "elongation":   (.71, .30, .47, .55, .55, .16, .30),
    "irregularity": (.84, .22, .46, .63, .55, .12, .30),
    "blur":         (.36, .36, .53, .88, .08, .83, .21),
    "pigment":      (.88, .62, .14, .14, .50, .33, .18),
    "blood":        (.17, .13, .57, .79, .13, .36, .85),
    "variegation":  (.92, .23, .39, .39, .47, .16, .31),
    "network":      (.70, .70, .02, .36, .18, .45, .02),
    "globules":     (.65, .48, .24, .05, .15, .05, .03),
    "veil":         (.78, .04, .35, .03, .11, .03, .25),
    "scar":         (.13, .03, .15, .10, .05, .97, .03),
    "lacunae":      (.03, .02, .07, .07, .03, .03, .98),
    "vessels":      (.14, .02, .93, .51, .05, .09, .07),
    "scale":        (.03, .02, .21, .91, .46, .08, .02),
    "milia":        (.06, .03, .13, .18, .90, .04, .02),
    "ridges":       (.05, .05, .04, .04, .80, .05, .03),
}  # fmt: skip
"""The typical value from 0 to 1 of each trait in each of `CLASSES`."""

LOOKALIKES = {
    "MEL": {"NV": 5, "BKL": 3, "VASC": 1, "BCC": 1},
    "NV": {"MEL": 4, "BKL": 3, "DF": 2, "BCC": 1},
    "BCC": {"AKIEC": 4, "NV": 2, "BKL": 2, "VASC": 2},
    "AKIEC": {"BCC": 4, "BKL": 4, "DF": 1, "VASC": 1},
    "BKL": {"NV": 4, "MEL": 3, "AKIEC": 3},
    "DF": {"NV": 5, "BCC": 3, "BKL": 2},
    "VASC": {"BCC": 4, "MEL": 3, "NV": 3},
}
"""The other classes that a lesion of each class may resemble, by weight."""

RESEMBLANCE = 0.55
"""Largest share of the other class in a lesion, at difficulty 1."""

SPREAD = 0.35
"""Standard deviation of the traits around that, in logits."""

WHITE = np.array([0.97, 0.91, 0.88], np.float32)[:, None, None]
MELANIN = np.array([0.60, 1.00, 1.35], np.float32)[:, None, None]
BLOOD = np.array([0.18, 1.00, 0.85], np.float32)[:, None, None]
"""Red, green and blue: the light source, and the absorption of melanin and of blood."""

HAIRY = 0.1
"""Share of images with hairs."""

DRAWING = 1
"""Part of the identity of the data set; increase it if `draw` changes."""

SMALLEST_CANVAS = 64
CHUNK_PIXELS = 1 << 17
"""Number of pixels painted at a time.

About fifty arrays of this size exist at once; small ones stay in the CPU cache.
"""


def load(seed: int = 0, images: int = 3000, difficulty: float = 1.0) -> Dataset:
    """The data set: `images` for training in HAM10000's proportions, and balanced validation and test parts.

    `difficulty` scales the variation within a class: at 0 all lesions of a class have the same traits, at 1 the classes
    overlap, above 1 they overlap more.
    """
    if images < FEWEST_TRAINING * len(CLASSES):
        raise DataError(
            f"synthetic: {images} images cannot hold {FEWEST_TRAINING} of each of {len(CLASSES)} classes; "
            f"ask for {FEWEST_TRAINING * len(CLASSES)} or more."
        )
    counts: dict[Part, list[int]] = {
        "train": training_counts(images),
        "val": [VALIDATION] * len(CLASSES),
        "test": [TEST] * len(CLASSES),
    }
    order = np.random.default_rng((seed, 0))
    labels = np.concatenate([order.permutation(np.repeat(np.arange(len(CLASSES)), each)) for each in counts.values()])
    parts = [part for part, each in counts.items() for _ in range(sum(each))]
    records = tuple(
        Record(id=f"synthetic-{position:05d}", path=None, label=int(label), part=part)
        for position, (label, part) in enumerate(zip(labels, parts, strict=True))
    )
    drawn_with = f"drawing {DRAWING}, seed {seed}, difficulty {difficulty!r}"
    return Dataset("synthetic", CLASSES, records, draw=partial(draw, seed, labels, difficulty), drawn_with=drawn_with)


def training_counts(images: int) -> list[int]:
    """Images of each class in HAM10000's proportions; NV, the most frequent, compensates rounding."""
    counts = [max(FEWEST_TRAINING, round(images * count / sum(PREVALENCE))) for count in PREVALENCE]
    counts[CLASSES.index("NV")] += images - sum(counts)
    return counts


def draw(seed: int, labels: npt.NDArray[np.int64], difficulty: float, positions: Sequence[int], size: int) -> Pixels:
    """Draw the images at `positions` as uint8 [N, size, size, 3]; each depends only on seed, position and label."""
    pixels = np.empty((len(positions), size, size, 3), np.uint8)
    # Small images are averaged from a larger canvas, to avoid aliasing of fine structures.
    canvas = size * -(-SMALLEST_CANVAS // size)
    chunk = max(1, CHUNK_PIXELS // canvas**2)
    for start in range(0, len(positions), chunk):
        some = positions[start : start + chunk]
        dice = Dice(seed, some)
        image = paint(dice, draw_traits(dice, labels[np.asarray(some)], difficulty), canvas)
        fine = image.reshape(len(some), 3, size, canvas // size, size, canvas // size)
        pixels[start : start + chunk] = np.rint(255 * fine.mean((3, 5)).clip(0, 1)).transpose(0, 2, 3, 1)
    return pixels


class Dice:
    """Random numbers [N, count] for several images, each with its own generator."""

    def __init__(self, seed: int, positions: Sequence[int]) -> None:
        self.streams = [np.random.default_rng((seed, 1, position)) for position in positions]

    def uniform(self, count: int, low: float = 0.0, high: float = 1.0) -> Array:
        numbers = np.stack([stream.random(count, np.float32) for stream in self.streams])
        return np.float32(low) + np.float32(high - low) * numbers

    def normal(self, count: int) -> Array:
        return np.stack([stream.standard_normal(count, np.float32) for stream in self.streams])


def draw_traits(dice: Dice, labels: npt.NDArray[np.int64], difficulty: float) -> dict[str, Array]:
    """The traits of lesions, [N, 1, 1] from 0 to 1: a mixture of its class and a similar one, plus noise, in logits."""
    typical = np.array(list(TRAITS.values()), np.float32).T
    typical = np.log(typical / (1 - typical))
    weights = np.array([[LOOKALIKES[name].get(other, 0) for other in CLASSES] for name in CLASSES])
    reached = np.cumsum(weights, axis=1) / weights.sum(axis=1, keepdims=True)
    lookalikes = (dice.uniform(1) >= reached[labels]).sum(axis=1)
    share = difficulty * RESEMBLANCE * dice.uniform(1)
    logits = (
        (1 - share) * typical[labels] + share * typical[lookalikes] + difficulty * SPREAD * dice.normal(len(TRAITS))
    )
    values = 1 / (1 + np.exp(-logits))
    return {name: values[:, column, None, None] for column, name in enumerate(TRAITS)}


def paint(dice: Dice, t: dict[str, Array], canvas: int) -> Array:
    """Draw lesions with the traits `t`, [N, 3, canvas, canvas], values about 0 to 1."""
    axis = (np.arange(canvas, dtype=np.float32) + 0.5) * (2 / canvas) - 1
    x, y = axis[None, None, :], axis[None, :, None]

    # The lesion's coordinates, rotated by its angle; on its outline the distance is 0.
    center = dice.uniform(2, -0.12, 0.12)[:, :, None, None]
    angle = dice.uniform(1, 0, 2 * np.pi)[:, :, None]
    u = (x - center[:, 0]) * np.cos(angle) + (y - center[:, 1]) * np.sin(angle)
    v = (y - center[:, 1]) * np.cos(angle) - (x - center[:, 0]) * np.sin(angle)
    extent = 0.28 + 0.5 * t["size"]
    stretch = 1 + 0.55 * t["elongation"]
    radius = np.sqrt(u * u / stretch + v * v * stretch) / extent
    lobes, notches, frays = waves(dice, axis, 2.2), waves(dice, axis, 6.5), waves(dice, axis, 15.0)
    distance = radius - 1 + t["irregularity"] * (0.28 * lobes + 0.15 * notches + 0.05 * frays)
    inside = step(-distance / (0.025 + 0.15 * t["blur"]))
    core = step((-0.3 - distance) / 0.15)

    # Textures. A slow warp bends the regular ones, so that they look natural.
    warp_u, warp_v = u + 0.10 * waves(dice, axis, 3.0), v + 0.10 * waves(dice, axis, 3.0)
    pitch = dice.uniform(1, 32, 42)[:, :, None]
    mesh = 0.55 - sum(
        np.cos(pitch * (np.float32(np.cos(turn)) * warp_u + np.float32(np.sin(turn)) * warp_v))
        for turn in (0, np.pi / 3, 2 * np.pi / 3)
    ) / 2.2  # fmt: skip
    ridges = np.cos(0.8 * pitch * (warp_u + 0.5 * warp_v * warp_v))
    blotches, patches = waves(dice, axis, 3.5), waves(dice, axis, 2.5)
    grain = waves(dice, axis, 26.0, count=20)
    flakes = 0.7 * waves(dice, axis, 11.0) + 0.6 * grain
    vessels = np.exp(-np.square(waves(dice, axis, 5.0) / 0.09)) * step((patches + 0.5 * notches) / 0.2)
    globules = spots(dice, axis, center, 0.95 * extent, count=26, width=0.030)
    milia = spots(dice, axis, center, 0.75 * extent, count=14, width=0.034)
    lacunae = spots(dice, axis, center, 0.75 * extent, count=14, width=0.105)

    tone = dice.normal(2)[:, :, None, None] * 0.03
    melanin = 0.16 + tone[:, 0] + inside * np.maximum(
        (0.15 + 1.15 * t["pigment"]) * (1 + 0.7 * t["variegation"] * blotches)
        + t["pigment"] * t["network"] * mesh * (1 + 0.5 * patches)
        + 0.5 * t["ridges"] * ridges * step(patches / 0.5)
        + 0.9 * t["globules"] * globules,
        0,
    )  # fmt: skip
    blood = 0.10 + 0.5 * tone[:, 1] + 0.015 * patches + inside * np.maximum(
        0.05
        + 0.7 * t["blood"] * (1 + 0.25 * blotches + 0.9 * t["scale"] * mesh)
        + 0.9 * t["vessels"] * vessels
        + 1.2 * t["lacunae"] * lacunae,
        0,
    )  # fmt: skip

    slope = dice.normal(2)[:, :, None, None] * 0.03
    light = 1 - 0.13 * (x * x + y * y) + slope[:, 0] * x + slope[:, 1] * y + 0.012 * grain
    light *= 1 - hairs(dice, x, y)
    light = light[:, None] * WHITE
    image: Array = light * np.exp(-melanin[:, None] * MELANIN - blood[:, None] * BLOOD)
    for cover, color in (
        (0.85 * t["veil"] * core * step((patches + 0.3 * notches) / 0.25), (0.45, 0.55, 0.76)),
        (0.80 * t["scar"] * step((0.42 - radius - 0.12 * lobes - 0.10 * notches) / 0.10), (0.96, 0.91, 0.90)),
        (0.65 * t["scale"] * inside * step((flakes + 0.5 * blotches - 0.3) / 0.2), (0.98, 0.97, 0.92)),
        (0.70 * t["milia"] * inside * milia, (0.98, 0.95, 0.80)),
    ):
        image += cover[:, None] * (light * np.array(color, np.float32)[:, None, None] - image)
    return image


def hairs(dice: Dice, x: Array, y: Array) -> Array:
    """Light absorbed by two curved hairs, [N, P, P]; most images have none."""
    present = dice.uniform(1)[:, 0] < HAIRY
    angle, offset, bend = (dice.uniform(2, low, high)[present] for low, high in ((0, 7), (-0.9, 0.9), (-0.3, 0.3)))
    shade = np.zeros((len(present), y.shape[1], x.shape[2]), np.float32)
    for hair in range(2):
        a, o, b = (values[:, hair, None, None] for values in (angle, offset, bend))
        along, across = x * np.cos(a) + y * np.sin(a), y * np.cos(a) - x * np.sin(a)
        shade[present] = np.maximum(shade[present], 0.6 * np.exp(-np.square((across - o - b * along**2) / 0.016)))
    return shade


def waves(dice: Dice, axis: Array, frequency: float, count: int = 7) -> Array:
    """A smooth random field of about unit variance, [N, P, P]: plane waves of about `frequency` radians per unit.

    Because sin(ax + by) = sin(ax) cos(by) + cos(ax) sin(by), the sum of waves is one matrix product.
    """
    direction = dice.uniform(count, 0, 2 * np.pi)
    rate = frequency * dice.uniform(count, 0.6, 1.4)
    along = (rate * np.cos(direction))[:, :, None] * axis + dice.uniform(count, 0, 2 * np.pi)[:, :, None]
    across = (rate * np.sin(direction))[:, :, None] * axis
    rows = np.concatenate([np.cos(across), np.sin(across)], 1).transpose(0, 2, 1)
    columns = np.concatenate([np.sin(along), np.cos(along)], 1) * np.float32(np.sqrt(2 / count))
    field: Array = rows @ columns
    return field


def spots(dice: Dice, axis: Array, center: Array, reach: Array, count: int, width: float) -> Array:
    """Round spots over a disk, [N, P, P] from 0 to 1; a Gaussian is separable, so this is one matrix product."""
    turn, far = dice.uniform(count, 0, 2 * np.pi), np.sqrt(dice.uniform(count)) * reach[:, :, 0]
    scale = 1 / (width * dice.uniform(count, 0.6, 1.3))[:, :, None]
    columns = np.exp(-np.square((axis - center[:, 0] - (far * np.cos(turn))[:, :, None]) * scale) / 2)
    rows = np.exp(-np.square((axis - center[:, 1] - (far * np.sin(turn))[:, :, None]) * scale) / 2)
    heights: Array = rows.transpose(0, 2, 1) @ columns
    return step((heights - 0.55) / 0.12)


def step(values: Array) -> Array:
    """A smooth step from 0 to 1 around 0: the logistic function, without overflow."""
    swing: Array = np.tanh(values / 2)
    return (1 + swing) / 2
