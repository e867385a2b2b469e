"""Tests in several processes: each runs once, and one that ends its process, or hangs, is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parallel import sort

TESTS = Path(__file__).resolve().parent
CONFTEST = """
import pytest
import parallel


def pytest_xdist_make_scheduler(config, log):
    return parallel.ByGroup(config, log)
"""
FILES = {
    "test_many.py": "import pytest\n@pytest.mark.parametrize('n', range(9))\ndef test_it(n): pass\n",
    "test_simulated_one.py": "def test_a(): pass\n",
    "test_simulated_two.py": "import os\ndef test_a(): pass\ndef test_dies(): os._exit(3)\ndef test_behind(): pass\n",
    "test_hangs.py": "import time, pytest\n@pytest.mark.timeout(1)\ndef test_hangs(): time.sleep(600)\n",
    "test_last.py": "import os\ndef test_dies_last(): os._exit(3)\n",
}


def test_every_test_runs_once_whatever_becomes_of_its_process(tmp_path: Path) -> None:
    for name, text in {"conftest.py": CONFTEST, **FILES}.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    ended = re.findall(r"\[(gw\d)\] .*(PASSED|FAILED) (\S+\.py::\S+)", done.stdout)
    names = [name for _, _, name in ended]
    assert len(names) == len(set(names)) == 15, done.stdout
    failed = {name for _, outcome, name in ended if outcome == "FAILED"}
    assert failed == {"test_simulated_two.py::test_dies", "test_hangs.py::test_hangs", "test_last.py::test_dies_last"}
    for name in ("test_simulated_two.py::test_dies", "test_last.py::test_dies_last"):
        assert re.search(rf"worker 'gw\d' crashed while running '{name}'", done.stdout)
    assert "Timeout (>1.0s)" in done.stdout
    first = {
        process
        for process, _, name in ended
        if name in ("test_simulated_one.py::test_a", "test_simulated_two.py::test_a")
    }
    assert len(first) == 1, "what is simulated stays together"


class Item:
    """What the order depends on."""

    def __init__(self, nodeid: str, *, slow: bool = False) -> None:
        self.nodeid, self._slow = nodeid, slow

    def get_closest_marker(self, name: str) -> object:
        return object() if name == "slow" and self._slow else None


def test_what_takes_long_comes_first() -> None:
    few, slow, many = Item("a.py::a"), Item("b.py::a", slow=True), [Item("c.py::a"), Item("c.py::b")]
    simulated = [Item("test_simulated_x.py::a"), Item("test_simulated_y.py::a")]
    items = [few, slow, many[0], simulated[0], many[1], simulated[1]]
    sort(items)  # type: ignore[arg-type]
    assert items == [*simulated, slow, *many, few]


@pytest.mark.parametrize("name", ["test_other.py", "test_simulated_other.py"])
def test_simulated_tests_are_in_files_of_that_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("def test_a(sim): pass\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\nfrom simulated import apart\n@pytest.fixture\ndef sim(): pass\n"
        "def pytest_collection_modifyitems(config, items): apart.arrange(config, items)\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "SIMULATED_TEST_REPORTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "simulated" in name:
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode == 4 and "expected a file with 'simulated' in its name" in done.stderr
