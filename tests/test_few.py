"""Of a test with many cases the quick run takes few, in which each value occurs; whoever names a case runs it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from few import cover
from hypothesis import given
from hypothesis import strategies as st

TESTS = Path(__file__).resolve().parent
CASES = """
import pytest

@pytest.mark.few
@pytest.mark.parametrize("place", ["device", "host", "nvme"])
@pytest.mark.parametrize("size", [1, [2], pytest.param(3, marks=pytest.mark.nightly)])
def test_all_values(size, place): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_two(size): pass

@pytest.mark.parametrize("size", [1, 2])
def test_each(size): pass
"""


def product(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def test_of_a_matrix_its_diagonal() -> None:
    """Three values of a and two of b: three cases, since one case has one value of a."""
    cases = product(3, 2)
    assert [cases[number] for number in cover(cases)] == [{"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 0}]
    assert cover(product(5)) == [0, 1, 2, 3, 4]
    assert cover([]) == cover([], 3) == []


def test_as_many_as_it_says() -> None:
    assert cover(product(5), 2) == [0, 1]
    assert cover(product(2, 2), 2) == [0, 3]
    assert cover(product(2, 2), 9) == [0, 1, 2, 3]
    # (0, 0, 0) and (1, 1, 1) have every value. Each other case has two new pairs. Once
    # (0, 0, 1) is taken, those that still have two are (0, 1, 0) and (1, 0, 0).
    assert cover(product(2, 2, 2), 4) == [0, 1, 2, 7]


@given(
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 3), "b": st.integers(0, 3), "c": st.booleans()}), max_size=20)
)
def test_each_value_occurs_and_each_case_brings_one(cases: list[dict[str, int]]) -> None:
    taken = cover(cases)
    assert {pair for number in taken for pair in cases[number].items()} == {p for case in cases for p in case.items()}
    assert len(taken) <= sum(len({case[name] for case in cases}) for name in "abc")
    assert taken == cover(cases) == sorted(set(taken))


@pytest.mark.parametrize(
    ("profile", "chosen", "expected"),
    [
        ("quick", [""], 3 + 2 + 2),
        ("ci", [""], 3 + 2 + 2),
        ("sweep", [""], 9 + 3 + 2),
        ("quick", ["::test_all_values[1-nvme]", "::test_two[3]"], 2),
    ],
)
def test_profiles(profile: str, chosen: list[str], expected: int, tmp_path: Path) -> None:
    """In the profiles of the project, with its conftest."""
    file = tmp_path / "test_it.py"
    file.write_text(CASES)
    environment = {key: value for key, value in os.environ.items() if key != "SIMULATED_TEST_REPORTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
        + ["-c", str(TESTS.parent / "pyproject.toml"), *(f"{file}{one}" for one in chosen)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(TESTS), "HYPOTHESIS_PROFILE": profile},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    names = re.findall(r"::(test_\S+)", done.stdout)
    assert len(names) == expected, done.stdout + done.stderr
