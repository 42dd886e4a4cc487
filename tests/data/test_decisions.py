"""labels.csv: only ever grows, survives any cut, and the later decision counts."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from csda.data.decisions import HEADER, DecisionLog, Entry, Ledger, _checksum, labels_of, read_decisions
from csda.errors import DataError, RunError

NAMES = ("a.png", 'odd, "name".png', "é\u2028ü.png", "<script>.png")


def _state(ledger: Ledger) -> dict[str, tuple[str, str]]:
    return {image: (each.action, each.label) for image, each in ledger.all_current().items()}


def test_it_agrees_with_a_list_of_what_was_done(tmp_path: Path) -> None:
    """The oracle keeps a stack of decisions for each image and pops it at an undo."""
    generator = random.Random(0)
    log = DecisionLog(tmp_path)
    stacks: dict[str, list[tuple[str, str]]] = {name: [] for name in NAMES}
    done: list[list[str]] = []
    for _ in range(300):
        kind = generator.choice(("label", "label", "skip", "flag", "undo"))
        if kind == "undo":
            batch = log.last_batch()
            assert [each.image for each in batch] == (done.pop() if done else [])
            if batch:
                log.append([Entry(each.image, "undo", undoes=each.number) for each in batch])
            for each in batch:
                stacks[each.image].pop()
        else:
            images = generator.sample(NAMES, generator.randint(1, 3))
            label = generator.choice(("cat", "dog")) if kind == "label" else ""
            log.append([Entry(image, kind, label) for image in images], who="me")  # type: ignore[arg-type]
            done.append(images)
            for image in images:
                stacks[image].append((kind, label))
        assert _state(log) == {image: stack[-1] for image, stack in stacks.items() if stack}
    log.close()
    again = read_decisions(tmp_path)
    assert again.decisions == log.decisions
    assert _state(again) == _state(log)
    labels = labels_of(again.all_current())
    assert sum(again.tally().values()) == len(labels)


def test_a_file_cut_anywhere_keeps_all_whole_lines(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    for name in NAMES:
        log.append([Entry(name, "label", "cat", said="dog", confidence=0.5, audit=True)], who="é")
    log.close()
    content = log.path.read_bytes()
    for cut in range(len(content)):
        log.path.write_bytes(content[:cut])
        whole = content[:cut].count(b"\n")
        again = DecisionLog(tmp_path)
        assert again.decisions == log.decisions[: max(whole - 1, 0)]
        again.append([Entry("b.png", "skip")])
        again.close()
        assert len(read_decisions(tmp_path).decisions) == max(whole - 1, 0) + 1


def test_a_changed_a_moved_and_a_missing_line_are_noticed(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    for name in ("a.png", "b.png", "c.png"):
        log.append([Entry(name, "label", "cat")])
    log.close()
    content = log.path.read_text()
    header, first, second, third = content.splitlines(keepends=True)
    numbered = {"1,1,": second, "2,2,": first}
    swapped = "".join(start + line[4:] for start, line in numbered.items())
    for damaged in (
        content.replace("b.png", "d.png"),
        content.replace("cat", "dog"),
        header + first + "2,2," + third[4:],
        header + swapped + third,
    ):
        log.path.write_text(damaged)
        with pytest.raises(DataError, match="does not match its checksum"):
            read_decisions(tmp_path)
    log.path.write_text(content)
    assert len(read_decisions(tmp_path).decisions) == 3


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DecisionLog(tmp_path)
    log.append([Entry("a.png", "label", "cat")])
    before = log.path.read_bytes()
    write = os.write

    def fill(handle: int, content: bytes) -> int:
        if len(content) < 15:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, content[:7])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fill)
        with pytest.raises(RunError, match="no space left"):
            log.append([Entry("b.png", "label", "dog")])
    assert log.path.read_bytes() == before
    assert log.current("b.png") is None
    log.append([Entry("b.png", "label", "dog")])
    log.close()
    assert read_decisions(tmp_path).tally() == {"cat": 1, "dog": 1}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path)
    with pytest.raises(RunError, match="another `csda review`"):
        DecisionLog(tmp_path)
    log.close()
    DecisionLog(tmp_path).close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("keep")
    (tmp_path / "labels.csv").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError):
        DecisionLog(tmp_path)
    assert (tmp_path / "elsewhere").read_text() == "keep"


@pytest.mark.parametrize(
    "line",
    [
        "1,1,a.png,label,cat,,me,now,,,,more",
        "2,1,a.png,label,cat,,me,now,,,",
        "1,2,a.png,label,cat,,me,now,,,",
        "1,1,a.png,paint,cat,,me,now,,,",
        "1,1,a.png,undo,,,me,now,,,",
        "1,1,a.png,undo,,1,me,now,,,",
        "1,x,a.png,label,cat,,me,now,,,",
        '1,1,"a.png,label,cat,,me,now,,,',
        "image,label",
    ],
)
def test_what_nobody_wrote_is_refused_and_left_alone(tmp_path: Path, line: str) -> None:
    content = f"{HEADER}{line},{_checksum(line, '')}\n1"
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(DataError, match="row 2"):
        DecisionLog(tmp_path)
    assert (tmp_path / "labels.csv").read_text() == content


def test_another_table_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,label\na.png,cat\n")
    with pytest.raises(DataError, match="row 1"):
        DecisionLog(tmp_path)
    with pytest.raises(RunError, match="there is none"):
        read_decisions(tmp_path / "nowhere")
