"""`folder`: any images, with the classes in folder names or in a CSV.

Three layouts:

- one folder per class, and a folder `unlabeled`; both may lie in folders `train`, `val` and `test`;
- images and a CSV with the columns `image,label[,group][,split]`; an empty label, like an image that the CSV does not
  name, is unlabeled; several labels in a cell are joined by `|`, and `(none)` says that none is present;
- images and a CSV with `image[,group][,split]` and one column of 0 and 1 for each label.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from csda.data.csv_files import JOIN, NONE_PRESENT, Table, clean_names, enter, read_table
from csda.data.records import Dataset, Label, Part, Record
from csda.data.tree import ImageTree, scan_images
from csda.errors import DataError, counted

FLAGS = {"0": False, "0.0": False, "1": True, "1.0": True}

UNLABELED = frozenset({"unlabeled", "unlabelled"})

PARTS: dict[str, Part] = {
    "train": "train", "training": "train",
    "labeled": "labeled", "labelled": "labeled",
    "unlabeled": "unlabeled", "unlabelled": "unlabeled",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip


def load(
    root: Path,
    *,
    image_column: str = "image",
    label_column: str = "label",
    group_column: str = "group",
    split_column: str = "split",
) -> Dataset:
    """Read a folder, or a CSV in a folder with several.

    `label_column` may name several columns of 0 and 1, separated by commas.
    """
    listing = root if root.is_file() else None
    tree = scan_images(root.parent if root.is_file() else root)
    if not tree.images:
        raise DataError(
            f"{tree.root} holds no images; give a folder with JPEG, PNG, TIFF, BMP, WebP, GIF or DICOM files"
        )
    tables = [tree.root / name for name in tree.others if name.lower().endswith(".csv") and "/" not in name]
    if listing is None and len(tables) > 1:
        names = ", ".join(path.name for path in tables)
        raise DataError(
            f"{tree.root} has several CSV files ({names}); name the one with the labels instead of the folder"
        )
    if listing is not None or tables:
        table = read_table(listing or tables[0])
        return _from_table(tree, table, image_column, label_column, group_column, split_column)
    columns = {"image": image_column, "label": label_column, "group": group_column, "split": split_column}
    for default, column in columns.items():
        if column != default:
            raise DataError(
                f"{tree.root}: no CSV here with the column `{column}`; add it, or leave {default}_column out"
            )
    dataset = _from_folders(tree)
    if len(dataset.classes) == 1:
        below = next(record.id for record in dataset.records if record.label is not None).rpartition("/")[0]
        deep = below.count("/") > _has_part_folders(tree)
        way_out = f"did you mean the folder {tree.root / below.rpartition('/')[0]}?" if deep else "add another class"
        raise DataError(f"{tree.root}: all images with a label are in one class, {dataset.classes[0]}; {way_out}")
    return dataset


def load_unlabeled(root: Path, classes: Sequence[str]) -> Dataset:
    """Read all images below a folder as unlabeled, for the given classes; folder names and tables are ignored."""
    tree = scan_images(root)
    if not tree.images:
        raise DataError(
            f"{tree.root} holds no images; give a folder with JPEG, PNG, TIFF, BMP, WebP, GIF or DICOM files"
        )
    records = tuple(Record(image, tree.root / image, None) for image in tree.images)
    return Dataset("folder", tuple(classes), records, root=tree.root, remarks=_remarks(tree))


# --- one folder per class ---------------------------------------------------------------------------------------------


def _from_folders(tree: ImageTree) -> Dataset:
    places: list[tuple[Part | None, str | None]] = []
    inside: dict[str, set[str]] = defaultdict(set)
    in_parts = _has_part_folders(tree)
    for image in tree.images:
        *folders, _ = image.split("/")
        part = PARTS[folders.pop(0).lower()] if in_parts else None
        name = folders[0] if folders and folders[0].lower() not in UNLABELED else None
        places.append((part, name))
        if name is not None:
            inside[name].add("/".join(folders[1:]))
    clean = clean_names(
        (name, f"{tree.root}/{image}") for (_, name), image in zip(places, tree.images, strict=True) if name
    )
    if not clean:
        raise DataError(
            f"{tree.root} has images but no labels; put them into one folder per class, or add a CSV `image,label`"
        )
    classes = tuple(sorted(set(clean.values())))
    positions = {name: position for position, name in enumerate(classes)}
    index = {raw: positions[name] for raw, name in clean.items()}
    records = tuple(
        Record(image, tree.root / image, None if name is None else index[name], part=part)
        for image, (part, name) in zip(tree.images, places, strict=True)
    )
    return Dataset("folder", classes, records, root=tree.root, remarks=(*_remarks(tree), *_remark_alike(inside)))


def _remark_alike(inside: Mapping[str, set[str]]) -> list[str]:
    """A remark if the folders of all classes have the same folders inside, which then are probably the classes."""
    first, *others = inside.values()
    if not others or len(first) < 2 or "" in first or any(names != first for names in others):
        return []
    names = ", ".join(sorted(first)[:3])
    return [f"the folders of all {len(inside)} classes have the same folders inside: {names}; are these the classes?"]


def _has_part_folders(tree: ImageTree) -> bool:
    """Whether the class folders are inside of folders such as `train` and `test`."""
    tops = {image.partition("/")[0].lower() if "/" in image else "" for image in tree.images}
    deep = any(image.count("/") > 1 for image in tree.images)
    return deep and tops <= PARTS.keys() and not tops <= UNLABELED


# --- a table --------------------------------------------------------------------------------------------------------


def _from_table(
    tree: ImageTree, table: Table, image_column: str, label_column: str, group_column: str, split_column: str
) -> Dataset:
    image_at = table.require(image_column, "rename the column of file names, or say what it is called")
    # A column given by the user must exist; the default names are optional.
    group_at = table.position(group_column) if group_column == "group" else table.require(group_column)
    split_at = table.position(split_column) if split_column == "split" else table.require(split_column)
    if (label_at := table.position(label_column)) is not None:
        classes, labels, multi_label = _read_names(table, label_at)
    else:
        flags_at = _flag_columns(table, label_column, {image_at, group_at, split_at})
        classes, labels, multi_label = _read_flags(table, flags_at)

    named: dict[str, tuple[int, Record]] = {}
    for (row, cells), label in zip(table.rows, labels, strict=True):
        where = f"{table.path}, row {row}"
        image = tree.find(cells[image_at], where)
        record = Record(
            id=image,
            path=tree.root / image,
            label=label,
            group=cells[group_at].strip() or None if group_at is not None else None,
            part=_parse_part(cells[split_at], where) if split_at is not None else None,
        )
        enter(named, image, record, table.path, row)
    if not any(record.label is not None for _, record in named.values()):
        raise DataError(f"{table.path}: no row has a label; fill in the column `{label_column}`")
    records = tuple(
        named[image][1] if image in named else Record(image, tree.root / image, None) for image in tree.images
    )
    return Dataset("folder", classes, records, multi_label, tree.root, _remarks(tree))


def _read_names(table: Table, position: int) -> tuple[tuple[str, ...], list[Label | None], bool]:
    """Classes and labels from a column of names. One cell with several names makes the whole data set multi-label."""
    cells = [(row, cells[position]) for row, cells in table.rows]
    multi_label = any(JOIN in cell or cell.strip() == NONE_PRESENT for _, cell in cells)
    found = [
        (row, [] if cell.strip() in ("", NONE_PRESENT) else cell.split(JOIN) if multi_label else [cell])
        for row, cell in cells
    ]
    clean = clean_names((name, f"{table.path}, row {row}") for row, names in found for name in names)
    classes = tuple(sorted(set(clean.values())))
    positions = {name: position for position, name in enumerate(classes)}
    index = {raw: positions[name] for raw, name in clean.items()}
    labels: list[Label | None] = []
    for (_, cell), (_, names) in zip(cells, found, strict=True):
        present = tuple(sorted({index[name] for name in names}))
        labels.append(None if not cell.strip() else present if multi_label else present[0])
    return classes, labels, multi_label


def _flag_columns(table: Table, label_column: str, taken: set[int | None]) -> list[int]:
    """The columns of 0 and 1: those given, or else all without another meaning."""
    if "," in label_column:
        return [table.require(name.strip()) for name in label_column.split(",")]
    rest = [position for position, name in enumerate(table.columns) if position not in taken and name]
    odd = [position for position in rest if any(cells[position].strip() not in (*FLAGS, "") for _, cells in table.rows)]
    if label_column == "label" and len(rest) > 1 and not odd:
        return rest
    raise DataError(
        f"{table.path}: no column `{label_column}` among {', '.join(table.columns)}; rename the column of labels, or "
        f"say what it is called (columns of 0 and 1 separated by commas)"
    )


def _read_flags(table: Table, positions: list[int]) -> tuple[tuple[str, ...], list[Label | None], bool]:
    """Classes in the order of their columns. A row is unlabeled if all its cells are empty."""
    names = [table.columns[position] for position in positions]
    clean = clean_names((name, f"{table.path}, row 1") for name in names)
    labels: list[Label | None] = []
    for row, cells in table.rows:
        flags = [cells[position].strip() for position in positions]
        for position, name, flag in zip(positions, names, flags, strict=True):
            if flag not in FLAGS and any(flags):
                raise DataError(
                    f"{table.path}, row {row}: {cells[position]!r} in column `{name}`; write 0 or 1, or leave all "
                    f"labels of the row empty"
                )
        labels.append(tuple(index for index, flag in enumerate(flags) if FLAGS[flag]) if any(flags) else None)
    return tuple(clean[name] for name in names), labels, True


def _parse_part(cell: str, where: str) -> Part | None:
    name = cell.strip().lower()
    if name and name not in PARTS:
        raise DataError(f"{where}: {cell!r} is not a part; write train, labeled, unlabeled, val or test, or nothing")
    return PARTS.get(name)


def _remarks(tree: ImageTree) -> tuple[str, ...]:
    strange = [name for name in tree.others if not name.lower().endswith((".csv", ".txt", ".md", ".json"))]
    if not strange:
        return ()
    return (f"left out: {counted(len(strange), 'file')} without an image's name, {strange[0]} for one",)
