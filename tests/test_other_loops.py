"""The programs of docs/how-to/other-loops.md run as they stand, and learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "other-loops.md"
CHECK = """
truth, counts = labels.repeat(60), queue.counts()
print((network(pool).argmax(-1) == truth).float().mean().item(), (counts[2] / counts.sum()).item(), int(counts.min()))
"""


@pytest.mark.parametrize(("heading", "packages"), [("Lightning", ["lightning"]), ("MONAI", ["monai", "ignite"])])
def test_the_program_learns_with_a_queue_that_holds_the_rare_class(
    heading: str, packages: list[str], tmp_path: Path
) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    found = re.search(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", found[1] + CHECK]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracy, share, fewest = map(float, done.stdout.split()[-3:])
    # The rarest class is a fifteenth of the pool; the queue holds a larger share of it.
    assert accuracy > 0.7
    assert share > 0.1
    assert fewest > 20
