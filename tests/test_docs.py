"""What the documentation says is so: links lead somewhere, code runs, commands exist, generated pages are current."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer.main

from csda.cli import app
from csda.report import write_report
from csda.runs import Run
from tiny import train_tiny

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    if "templates" not in path.parts
)

SOURCES = sorted((ROOT / "src").rglob("*.py"))

FENCE = re.compile(r"^(?P<marker><!-- run -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _blocks(page: Path, language: str) -> list[tuple[str, bool]]:
    """The fenced blocks of a language, and whether each is marked to be run."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [(match["code"], bool(match["marker"])) for match in found if match["language"] == language]


def _run(page: Path) -> dict[str, Any]:
    """Run the marked blocks of a page one after the other, in one namespace: sessions as doctests, programs as such."""
    names: dict[str, Any] = {"__name__": "docs"}
    for code, marked in _blocks(page, "python"):
        if marked and code.startswith(">>>"):
            runner, said = doctest.DocTestRunner(), io.StringIO()
            test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), 0)
            failed = runner.run(test, out=said.write, clear_globs=False).failed
            names |= test.globs
            assert not failed, said.getvalue()
        elif marked:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(code, str(page), "exec"), names)
    return names


RUNNABLE = [page for page in PAGES if any(marked for _, marked in _blocks(page, "python"))]


@pytest.mark.parametrize("page", RUNNABLE, ids=_named)
def test_marked_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert _run(page)


def test_the_loop_of_ones_own_is_short_and_learns() -> None:
    page = DOCS / "how-to" / "own-loop.md"
    assert len(_blocks(page, "python")[0][0].splitlines()) <= 25
    torch.manual_seed(0)
    names = _run(page)
    queued, truth = names["queue"].counts(), names["labels"].repeat(60)
    assert queued.min() > 20
    # The rarest class is a fifteenth of the pool; the queue holds a larger share of it.
    assert queued[2] / queued.sum() > 0.1
    assert (names["model"](names["pool"]).argmax(-1) == truth).float().mean() > 0.7


def test_prediction_from_python(
    tiny_run: Run, tiny_images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(code, _)] = _blocks(DOCS / "how-to" / "own-images.md", "python")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tiny_run.folder)
    (tmp_path / "new_images").mkdir()
    (tmp_path / "new_images" / "001.jpg").write_bytes((tiny_images / "rare" / "00.png").read_bytes())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["probabilities"].shape == (1, len(tiny_run.classes))


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        place = page.parent / target if target else page
        assert place.exists(), f"{match['target']} does not exist"
        if anchor:
            assert anchor in _anchors(place), f"{match['target']}: no such heading"


def _anchors(page: Path) -> set[str]:
    """Headings as the addresses that GitHub gives them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- commands -------------------------------------------------------------------------------------------------------


def _commands() -> Iterator[tuple[str, str]]:
    """Every `csda …` of the pages: the lines of shell blocks, and code within sentences."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [
            line
            for language in ("sh", "bash", "console")
            for code, _ in _blocks(page, language)
            for line in code.splitlines()
        ]
        lines += re.findall(r"`(csda [^`]+)`", FENCE.sub("", text))
        for line in lines:
            command = line.partition("  #")[0].removeprefix("$ ").strip()
            if command.startswith("csda ") and "pseudo-counts" not in command:  # which add-a-command.md adds
                yield _named(page), command


COMMANDS = sorted(set(_commands()))


def _refusal(command: str) -> str | None:
    """Why the command line would not take these words; None where it would. Nothing is executed."""
    words = [word for word in shlex.split(command)[1:] if word != "…"]
    current: Any = typer.main.get_command(app)
    while hasattr(current, "commands"):
        if not words or words[0].startswith("-"):
            alone = not words and current.invoke_without_command
            return None if alone or {"--help", "--version"} & set(words) else f"{command}: no command is named"
        name = words.pop(0)
        if "|" in name:
            unknown = [each for each in name.split("|") if each not in current.commands]
            return f"{command}: no command {unknown[0]}" if unknown else None
        if name not in current.commands:
            return f"{command}: no command {name}"
        current = current.commands[name]
    options = {flag for parameter in current.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in options | {"--help"}:
            return f"{command}: no option {word}"
    return None


def test_the_pages_name_commands() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_exist_with_their_options(page: str, command: str) -> None:
    assert _refusal(command) is None


@pytest.mark.parametrize(
    "command", ["csda trian", "csda train --labls 300", "csda data chek x", "csda train|reprodduce"]
)
def test_the_check_of_commands_refuses_what_it_should(command: str) -> None:
    assert _refusal(command) is not None


def test_the_tests_that_promises_name_exist() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    functions = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    for page in (ROOT / "SECURITY.md", DOCS / "explanation" / "promises.md", DOCS / "how-to" / "several-processes.md"):
        named = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        assert any(name.startswith("test") for name in named)
        assert [name for name in named if name.startswith("test_") and name not in functions] == []
        assert [name for name in named if name.startswith("tests/") and not (ROOT / name).exists()] == []


# --- generated pages and pictures -----------------------------------------------------------------------------------


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "reference" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "settings.md"])
def test_generated_pages_are_current(name: str) -> None:
    written = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert written == _generator().PAGES[name](), "run `python docs/reference/generate.py`"


def test_pictures_are_current() -> None:
    from csda.research import explain

    def words(svg: str) -> list[str]:
        return re.findall(r"<text[^>]*>([^<]*)</text>", svg)

    folder = DOCS / "explanation" / "pictures"
    assert {path.stem for path in folder.iterdir()} == set(explain.PICTURES)
    for name in explain.PICTURES:
        drawn = explain.render(name)
        assert drawn == explain.render(name), f"{name} differs from one drawing to the next"
        # Another matplotlib draws other paths, so the words and numbers are compared.
        written = words((folder / f"{name}.svg").read_text(encoding="utf-8"))
        assert written == words(drawn), "run `python -m csda.research.explain docs/explanation/pictures`"
        assert len(written) > 10


def test_the_text_and_its_pictures_have_the_same_numbers() -> None:
    from csda.research import explain

    names = _run(DOCS / "explanation" / "method.md")
    assert torch.equal(names["labeled"], explain.LABELED)
    assert torch.equal(names["unlabeled"], explain.UNLABELED)
    assert torch.equal(names["guess"][0], explain.GUESS)
    for shown, drawn in zip(
        (names["labeled_marginal"], names["unlabeled_marginal"]), explain.agnostic_marginals(), strict=True
    ):
        torch.testing.assert_close(shown, drawn)


# --- the run folder -------------------------------------------------------------------------------------------------


def _first_cells(page: Path, heading: str) -> set[str]:
    """The names in code in the first column of the table under a heading."""
    section = page.read_text(encoding="utf-8").partition(f"# {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_run_folder_is_described(tiny_images: Path, tmp_path: Path) -> None:
    page = DOCS / "reference" / "run-folder.md"
    run = train_tiny(tiny_images, tmp_path / "run", tensorboard=True)
    write_report(run.folder)
    files = {path.name + "/" * path.is_dir() for path in run.folder.iterdir()}
    assert _first_cells(page, "The run folder") == files
    assert _first_cells(page, "metrics.jsonl") == {key for row in run.metrics for key in row}
    assert _first_cells(page, "history.npz") == set(run.history)
    assert _first_cells(page, "result.json") == {*run.result, "control"}  # which a training on features alone has


def test_the_messages_of_the_faq_are_those_of_the_package() -> None:
    """A quoted message is found among the string literals, whatever stands in their braces."""
    literals = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                literals.append("".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                literals.append(node.value)
    table = (DOCS / "faq.md").read_text(encoding="utf-8").partition("## Problems")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) > 5
    assert [each for each in quoted if not any(each in literal for literal in literals)] == []


# --- docstrings, notebook, extras -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if ">>>" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
def test_examples_in_docstrings_run(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("CSDA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    notebook = nbformat.read(DOCS / "tutorial" / "first-steps.ipynb", as_version=4)
    shown = _texts(notebook)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) >= 5
    assert all(cell.outputs or cell.source.startswith(("import", "from")) for cell in cells)
    assert _texts(notebook) == shown, "store the notebook with its outputs again"


def _texts(notebook: Any) -> list[str]:
    """What the cells print, without numbers and blanks, which differ between machines."""
    outputs = [each for cell in notebook.cells if cell.cell_type == "code" for each in cell.outputs]
    texts = [each.get("text") or each.data["text/plain"] for each in outputs]
    return [re.sub(r"\s+", "", re.sub(r"\d+(\.\d*)?", "#", text)) for text in texts]


def test_make_has_the_targets_that_pages_name() -> None:
    named = {
        target for page in PAGES for target in re.findall(r"\bmake (\w+)", "\n".join(_code(page))) if target.isalpha()
    }
    assert {"env", "test", "docs", "demo"} <= named
    for target in sorted(named):
        done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        programs = set(re.findall(r"^\.venv/bin/(\S+)", done.stdout, re.MULTILINE))
        assert all(shutil.which(program, path=Path(sys.executable).parent) for program in programs)
        files = set(re.findall(r"(?:docs|tests)/[\w/]+\.py", done.stdout))
        assert all((ROOT / file).is_file() for file in files)


def test_the_extras_that_pages_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {extra for page in PAGES for extra in re.findall(r"csda\[(\w+)\]", "\n".join(_code(page)))}
    assert {"dicom", "timm"} <= named <= project["optional-dependencies"].keys()


def test_the_hooks_are_commands_of_the_environment() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    commands = re.findall(r"entry: \.venv/bin/(\S+)", text)
    assert set(commands) == {"ruff", "mypy", "python"}
    assert all(shutil.which(command, path=Path(sys.executable).parent) for command in commands)


def _code(page: Path) -> list[str]:
    """Everything on a page that is set as code."""
    text = page.read_text(encoding="utf-8")
    return [match["code"] for match in FENCE.finditer(text)] + re.findall(r"`([^`]+)`", FENCE.sub("", text))


def test_the_citation_names_authors_and_version() -> None:
    from csda import __version__

    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {__version__}\n" in text
    assert '- name: "The csda developers"' in text
    assert re.findall(r"family-names: (\w+)", text) == ["Huang", "Wu", "Wang", "Li", "Ioannou"]


def test_limits_that_pages_name_are_those_of_the_code() -> None:
    from csda.config import MAX_TOML
    from csda.data.csv_files import MAX_TEXT
    from csda.data.decode import MAX_BYTES, MAX_PIXELS
    from csda.data.tree import MOST

    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    promises = (DOCS / "explanation" / "promises.md").read_text(encoding="utf-8")
    pixels = f"more than {MAX_PIXELS // 10**6} million pixels"
    assert pixels in promises
    assert f"{pixels[0].upper()}{pixels[1:]}, {MAX_BYTES // 10**6} MB of a file" in security
    assert f"or {MAX_TEXT // 10**9} GB of a table" in security
    assert f"more than {MOST} deep, or that links lead to in more than {MOST} ways" in security
    assert f"more than {MAX_TOML:,} characters" in security
