"""The script on README's first screen runs as it stands, and prints the plan that README shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(kind: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for language, text in fenced if language == kind]


def test_the_first_script(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(blocks("python")[0], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^\d (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    plan = next(block for block in blocks("") if "trainable parameters" in block)
    assert done.stdout.startswith(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.py", "model.pt"]


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "bench/results.md",
        *(
            f"docs/{name}.md"
            for name in (
                "architecture",
                "checkpoints",
                "deepspeed",
                "importing",
                "integrations",
                "mechanisms",
                "numerics",
                "swap",
            )
        ),
    ],
)
def test_links_lead_somewhere(path: str) -> None:
    text = (README.parent / path).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", text):
        there = (README.parent / path).parent / target if target else README.parent / path
        assert there.exists(), (path, target)
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            names = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor[1:] in names, (path, target, anchor)
