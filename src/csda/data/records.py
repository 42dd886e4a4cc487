"""Records of images, without their pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from csda.errors import counted

Label = int | tuple[int, ...]
"""A class index; in a multi-label set the sorted indices of the labels present, `()` if there is none."""

Part = Literal["train", "labeled", "unlabeled", "val", "test"]
"""The part of an image in a source's own lists; `train` is still to be divided into labeled and unlabeled."""

Pixels = npt.NDArray[np.uint8]
"""Images [N, H, W, C] with 1 or 3 channels."""


@dataclass(frozen=True, slots=True)
class Record:
    """An image, as described by its source.

    `id` is unique within the data set, `path` is None for drawn images, and `label` is None if unknown. Images of one
    `group` (patient, lesion, video) are not independent.
    """

    id: str
    path: Path | None
    label: Label | None
    group: str | None = None
    part: Part | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """A data set: records in a fixed order, and remarks for the user.

    `draw(positions, size)` makes the pixels of drawn images, and `drawn_with` are its parameters besides id and label.
    `held_out` is the size of the test and the validation part, unless the source has them. `listed` means that
    published lists name the labeled images, so no budget is drawn from them.
    """

    name: str
    classes: tuple[str, ...]
    records: tuple[Record, ...]
    multi_label: bool = False
    root: Path | None = None
    remarks: tuple[str, ...] = ()
    held_out: tuple[str, str] = ("20%", "10%")
    listed: bool = False
    draw: Callable[[Sequence[int], int], Pixels] | None = None
    drawn_with: str = ""

    def in_parts(self, parts: Mapping[str, Part]) -> Dataset:
        """Set the part of each image by id, and leave out images without one."""
        records = tuple(replace(record, part=parts[record.id]) for record in self.records if record.id in parts)
        left_out = len(self.records) - len(records)
        remarks = (f"{counted(left_out, 'image', 'are')} in no list and left out",) if left_out else ()
        return replace(self, records=records, remarks=self.remarks + remarks)


@dataclass(frozen=True, slots=True)
class Split:
    """The four parts of an experiment. Records in `unlabeled` carry no label.

    `truth` holds the labels of unlabeled images where they are known, by id. It is written to the run folder and read
    only by the evaluation. `by_image` means that images of a group were not kept together.
    """

    labeled: tuple[Record, ...]
    unlabeled: tuple[Record, ...]
    val: tuple[Record, ...]
    test: tuple[Record, ...]
    truth: dict[str, Label]
    remarks: tuple[str, ...] = ()
    by_image: bool = field(default=False, compare=False)

    def parts(self) -> tuple[tuple[str, tuple[Record, ...]], ...]:
        """The parts by name, in the order of split.csv."""
        return (("labeled", self.labeled), ("unlabeled", self.unlabeled), ("val", self.val), ("test", self.test))


def encode_labels(labels: Sequence[Label | None], num_classes: int, multi_label: bool) -> npt.NDArray[np.int64]:
    """Labels as class indices [N], or as 0/1 [N, K] in a multi-label set; −1 if unknown."""
    if not multi_label:
        return np.array([-1 if label is None else label for label in labels], dtype=np.int64)
    encoded = np.zeros((len(labels), num_classes), dtype=np.int64)
    for row, label in enumerate(labels):
        encoded[row, list(label) if isinstance(label, tuple) else slice(None)] = 1 if label is not None else -1
    return encoded
