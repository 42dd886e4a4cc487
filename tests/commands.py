"""The command line as attacks call it."""

from __future__ import annotations

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""Takes the words after `csda` and gives the exit code, what was printed, and what was said on stderr."""


def is_one_sentence(answer: tuple[int, str, str]) -> bool:
    """Whether a command was refused as it should be: with exit code 2, one line on stderr and nothing else."""
    code, printed, said = answer
    return code == 2 and printed == "" and said.startswith("csda: ") and said.count("\n") == 1
