"""List the image files below a folder. Nothing outside of it is read and nothing is written."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from csda.data.csv_files import UNFIT_CHARACTERS
from csda.data.decode import IMAGE_SUFFIXES, UnreadableError, explain_failure
from csda.errors import DataError
from csda.files import open_regular

MOST = 100
"""Largest depth of a folder, and largest number of ways to one folder by links."""


@dataclass(frozen=True, slots=True)
class ImageTree:
    """Images below `root` by their path relative to it, with `/`, in sorted order; `others` are all other files."""

    root: Path
    images: tuple[str, ...]
    others: tuple[str, ...]
    _by_name: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list), init=False, repr=False)

    def find(self, name: str, where: str) -> str:
        """Find an image by its relative path, its file name, or its file name without the suffix."""
        if not self._by_name:  # computed when first needed, because most folders have no table
            self._list_names()
        path = _normal(name.strip().replace("\\", "/").removeprefix("./"))
        if path.startswith("/") or ".." in path.split("/"):
            raise DataError(f"{where}: {name!r} is outside of {self.root}; give paths relative to that folder")
        found = self._by_name.get(path) or self._by_name.get(path.removeprefix(f"{self.root.name}/"), [])
        if len(found) > 1:
            exact = [image for image in found if image == name.strip()]
            found = exact or [image for image in found if _normal(image) == path] or found
        if not found:
            raise DataError(f"{where}: no image is called {name!r} in {self.root}; add the file or remove the row")
        if len(found) > 1:
            raise DataError(f"{where}: {name!r} could be {found[0]} or {found[1]}; give the path below {self.root}")
        return found[0]

    def _list_names(self) -> None:
        for image in self.images:
            path = _normal(image)
            name = path.rpartition("/")[2]
            for key in {path, name, name.rpartition(".")[0]} - {""}:
                self._by_name[key].append(image)


def scan_images(root: Path) -> ImageTree:
    """List the images below `root` by their suffix; files without one count if they are DICOM."""
    images: list[str] = []
    others: list[str] = []
    for path, is_image in _walk(root):
        if UNFIT_CHARACTERS.search(path):
            raise DataError(f"{root}: the name {path!r} holds control characters or is not UTF-8; rename it")
        (images if is_image else others).append(path)
    return ImageTree(root, tuple(sorted(images)), tuple(others))


def walk_images(root: Path) -> Iterator[str]:
    """Iterate over the same images, folder by folder, with only one folder's names in memory and any file names."""
    return (path for path, is_image in _walk(root) if is_image)


def _walk(root: Path) -> Iterator[tuple[str, bool]]:
    """All files below `root` by relative path, and whether each is an image."""
    real_root, ways = os.path.realpath(root), Counter[str]()

    def visit(folder: Path, prefix: str, above: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
        if len(above) > MOST:
            raise DataError(f"{root}: {prefix[:60]}… is more than {MOST} folders deep; move what is in it further up")
        ways[above[-1]] += 1
        if ways[above[-1]] > MOST:
            raise DataError(f"{folder} is one folder that links lead to in more than {MOST} ways; remove the links")
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(f"{folder} cannot be read: {error.strerror or error}") from None
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__MACOSX":
                continue
            path = prefix + entry.name
            if entry.is_symlink() and not _is_within(os.path.realpath(entry.path), real_root):
                raise DataError(f"{entry.path} is a link that leaves {root}; put the files themselves into the folder")
            if _is_folder(entry):
                # Only a link can lead to somewhere else, and a real path costs a look at every folder above.
                real = os.path.realpath(entry.path) if entry.is_symlink() else f"{above[-1]}/{entry.name}"
                if real not in above:
                    yield from visit(Path(entry.path), f"{path}/", (*above, real))
            else:
                yield path, _is_image(entry)

    if not root.is_dir():
        raise DataError(f"{root}: {'is no folder' if root.exists() else 'there is no such folder'}; correct the path")
    yield from visit(root, "", (real_root,))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a Path of each name takes longer than the rest
    if suffix in IMAGE_SUFFIXES:
        return True
    # DICOM files often have no suffix, or the last number of a UID in its place.
    if suffix[1:] and not suffix[1:].isdigit():
        return False
    path = Path(entry.path)
    try:
        with open_regular(path) as file:
            return file.read(132)[128:] == b"DICM"
    except OSError as error:
        if isinstance(failure := explain_failure(path, error), UnreadableError):
            return False
        raise failure from error


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip(os.sep) + os.sep)


def _normal(name: str) -> str:
    # File systems store é as one character or as two; a table may have either.
    return unicodedata.normalize("NFC", name)
