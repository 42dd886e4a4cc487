"""Tables, lists and class names, and everything that can be wrong with them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csda.data.csv_files import clean_names, read_flags, read_table
from csda.errors import DataError
from csda.files import write_csv


def table(path: Path, raw: bytes) -> Path:
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    "raw",
    [
        b"image,label\na b.png,x\n",
        b"\xef\xbb\xbfimage,label\r\na b.png,x\r\n",
        b"image;label\na b.png;x",
        b"image\tlabel\n\n\"a b.png\"\tx\n\n",
        b"image,label,,\na b.png,x,,\n,,,\n",
    ],
    ids=["plain", "BOM and CRLF", "semicolons", "tabs", "empty cells of a spreadsheet"],
)  # fmt: skip
def test_table_is_read(raw: bytes, tmp_path: Path) -> None:
    found = read_table(table(tmp_path / "t.csv", raw))
    assert found.columns == ("image", "label")
    assert [cells for _, cells in found.rows] == [["a b.png", "x"]]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "t.csv is empty"),
        (b"image,label\na,b\nM\xfcller.png,x\n", "row 3: not UTF-8"),
        ("image,label\n".encode("utf-16"), "row 1: not UTF-8"),
        (b"image,label\na,\0\n", "row 2: holds a NUL"),
        (b"image,label\na,b\na,b,c\n", "row 3: 3 cells where the header has 2"),
        (b"image,label\na\n", "row 2: 1 cells where the header has 2"),
        (b"image,image\n", "row 1: two columns are called `image`"),
        (b'image,label\n"a,b\n', "row 2: unexpected end of data"),
        (b"image,label\n" + b"x" * 200_000 + b",b\n", "row 2: field larger than field limit"),
    ],
)
def test_damaged_table_is_refused_with_its_row(raw: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_table(table(tmp_path / "t.csv", raw))


def test_missing_file_and_column_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        read_table(tmp_path / "none.csv")
    found = read_table(table(tmp_path / "t.csv", b"Image ,dx\n"))
    assert found.require("image") == 0
    with pytest.raises(DataError, match=r"t\.csv: no column `label` among Image, dx; add it"):
        found.require("label")


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_a_table_or_a_data_error(raw: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = table(Path(folder) / "t.csv", raw)
        for read in (lambda: len(read_table(path).rows), lambda: len(read_flags(path, 3))):
            try:
                read()
            except DataError as error:
                message = str(error)
                assert "t.csv" in message
                assert "row" in message or "empty" in message


cells = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\r"), max_size=10)


@given(st.lists(st.tuples(cells, cells), max_size=8))
@settings(deadline=None)
def test_written_table_is_read_back(rows: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        write_csv(Path(folder) / "t.csv", ("one", "two"), rows)
        found = [cells for _, cells in read_table(Path(folder) / "t.csv").rows]
        assert [path.name for path in Path(folder).iterdir()] == ["t.csv"]
    assert found == [list(row) for row in rows if any(row)]


def test_flags(tmp_path: Path) -> None:
    path = table(tmp_path / "list.txt", b"a.jpg  1 0 0 \n\nb.jpg 0 1 1\n")
    assert read_flags(path, 3) == [(1, "a.jpg", [0]), (3, "b.jpg", [1, 2])]
    with pytest.raises(DataError, match="row 1: expected an image name and 2 flags"):
        read_flags(path, 2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["nv", "NV"], "class 'NV' differs from 'nv' .1. only in case or blanks"),
        (["nv", "nv "], "class 'nv ' differs from 'nv'"),
        (["Foreign body", "foreignbody"], "only in case or blanks"),
        (["a|b"], "cannot be called 'a|b'"),
        (["(none)"], "cannot be called"),
        (["a\tb"], "cannot be called"),
        ([" "], "a class without a name"),
    ],
)
def test_class_names_that_cannot_be(names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        clean_names((name, str(position)) for position, name in enumerate(names, start=1))


def test_class_names_are_stripped_and_composed() -> None:
    assert clean_names([(" a", "1"), ("Erythe\u0300me", "2"), ("Erythème", "3")]) == {
        " a": "a",
        "Erythe\u0300me": "Erythème",
        "Erythème": "Erythème",
    }
