"""The scripts of README and of the guide run as they stand, and print what the pages show; links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, anchors, blocks, literal, read

import offload
from offload.cli.main import main
from offload.planning import plan

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def test_the_first_script(tmp_path: Path) -> None:
    readme = read("README.md")
    script = tmp_path / "first.py"
    script.write_text(blocks(readme)[0], encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^\d (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    plan = next(block for block in blocks(readme, "") if "trainable parameters" in block)
    assert done.stdout.startswith(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.py", "model.pt"]


def run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any]]:
    """Run the Python of a page from top to bottom; returns what each block has printed, and the names it has left."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    printed = []
    try:
        for block in blocks(read(page)):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, page, "exec"), names)
            printed.append(out.getvalue())
    finally:
        if isinstance(engine := names.get("engine"), offload.Engine):
            engine.close()
    return printed, names


def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, names = run("docs/guide/first-hour.md", tmp_path, monkeypatch)
    assert [printed[0]] == blocks(read("docs/guide/first-hour.md"), "text")
    assert names["stats"].links["nvme_write"].bytes > 5 * 24 << 20  # what the plan has on the drive, in five steps
    losses = [float(line.split()[1]) for line in printed[1].splitlines()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert "cpu: " in printed[2] and "waits for parameters" in printed[2]
    assert "11.bias (512,)" in printed[3]
    assert printed[4] == "5\n"
    saved = torch.load(tmp_path / "model.pt")
    assert saved.keys() == names["model"].state_dict().keys()
    for name, value in names["model"].state_dict().items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.parametrize("page", ["docs/guide/budgets.md", "docs/guide/plan.md"])
def test_a_page_shows_what_its_script_prints(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, _ = run(page, tmp_path, monkeypatch)
    assert printed == blocks(read(page), "text")


def test_the_smallest_budget_that_a_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same call succeeds with the number in the text, and with no smaller one."""
    [printed], names = run("docs/guide/budgets.md", tmp_path, monkeypatch)
    found = re.search(r'the smallest max_memory\["cpu"\] that would do is (\d+) bytes', printed)
    assert found is not None
    smallest = int(found[1])
    options = {"device": "cpu", "max_memory": {"device": "8MiB", "cpu": smallest}}
    offload.Engine(names["model"], offload.AdamW(), **options).close(restore=True)
    options["max_memory"] = {"device": "8MiB", "cpu": smallest - 4096}
    with pytest.raises(offload.BudgetError, match=f"is {smallest} bytes"):
        offload.Engine(names["model"], offload.AdamW(), **options)


_PROMPT = "$ python -m offload "
FORECASTS = [
    (page, *block.removeprefix(_PROMPT).split("\n", 1))
    for page in ("README.md", "docs/planning.md")
    for block in blocks(read(page), "")
    if block.startswith(f"{_PROMPT}plan ")
]


@pytest.mark.parametrize(("page", "call", "shown"), FORECASTS)
def test_a_page_shows_what_a_forecast_prints(
    page: str, call: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known models on machines that are not here have the same numbers anywhere. Dots stand for lines left out."""
    pytest.importorskip("transformers")
    assert {page for page, *_ in FORECASTS} == {"README.md", "docs/planning.md"}
    assert main(call.split()) == int("DOES NOT FIT" in shown)
    lines = "".join("(?:.*\n)*" if line == "..." else f"{re.escape(line)}\n" for line in shown.splitlines())
    printed = capsys.readouterr().out
    assert re.fullmatch(lines, printed), f"{page} shows other lines than\n{printed}"


def test_every_line_of_a_plan_is_explained() -> None:
    """The page quotes what each line begins with, as the source has it."""
    page = re.sub(r"^```.*?^```$", "", read("docs/guide/plan.md"), flags=re.DOTALL | re.MULTILINE)
    source = ast.parse(Path(plan.__file__).read_text(encoding="utf-8"))
    notes = next(node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "_notes")
    lines = [literal(node.value) for node in ast.walk(notes) if isinstance(node, ast.Yield) and node.value]
    heads = {re.split(r":|\{\}", line)[0] for line in lines}
    assert len(lines) >= 14 and "drive wear" in heads
    for head in heads - {""}:
        assert head in page, head
    for column in plan._COLUMNS:
        assert f"`{column}`" in page, column


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/results.md"]
PAGES += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path: str) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)", read(path)):
        there = (ROOT / path).parent / target if target else ROOT / path
        assert there.exists(), (path, target)
        if anchor:
            assert anchor[1:] in anchors(there.read_text(encoding="utf-8")), (path, target, anchor)


def test_the_tests_that_pages_name_are_there() -> None:
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")}
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", read(page)):
            assert name in sources or any(f"def {name}(" in source for source in sources.values()), (page, name)


def test_every_page_is_in_the_guide() -> None:
    listed = set(re.findall(r": (\S+\.md)$", read("mkdocs.yml"), re.MULTILINE))
    assert {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} <= listed


def test_the_oldest_versions_are_the_same_everywhere() -> None:
    """What a door asks for, what the extras install, and what the guide says."""
    doors = (ROOT / "offload" / "integrations").glob("*.py")
    asked = {
        library: least
        for path in doors
        for library, least in re.findall(
            r'^require\("(\w+)", "([\d.]+)"', path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert asked.keys() == {"transformers", "lightning", "accelerate", "peft"}
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    guide = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"^\| .* \| `offload\.(\w+)` \| (.*?) \|", guide, re.MULTILINE))
    for library, least in asked.items():
        assert set(re.findall(rf'"{library}>=([\d.]+)"', extras)) == {least}, library
        assert least in said["hf" if library == "transformers" else library], library
