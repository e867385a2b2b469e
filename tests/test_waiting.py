"""How long OpenMP's threads spin: set where this project starts the process, and nowhere else. And its bench."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import benches
import pytest

from offload.cli.waiting import SPINS, bound_spinning

ROOT = Path(__file__).resolve().parent.parent
CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")

# A command gets as far as its first import of torch could be, and says what that import would find.
COMMAND = """
import os, sys
from offload.cli import main as cli
def stop(parsed):
    print("torch" in sys.modules, *(os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")))
    sys.exit(0)
cli.leave_out_quantizers = cli.plan.run = stop
sys.argv = ["offload", "plan", "--model", "llama-3.1-8b"]
"""


def run(code: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name not in CHOICES} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_a_command_in_its_own_process_bounds_spinning_before_torch_is_imported() -> None:
    assert run(COMMAND + "cli.own_process()") == ["False", "None", SPINS]


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", "None"]),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, ["PASSIVE", "None"]),
        ({"GOMP_SPINCOUNT": "7"}, ["None", "7"]),
        ({"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": "PASSIVE"}, ["PASSIVE", "7"]),
    ],
)
def test_what_the_user_has_chosen_stays(variables: dict[str, str], found: list[str]) -> None:
    assert run(COMMAND + "cli.own_process()", **variables) == ["False", *found]
    chosen = dict(variables)
    bound_spinning(chosen)
    assert chosen == variables


def test_a_command_in_a_process_of_others_sets_nothing() -> None:
    assert run(COMMAND + "cli.main(sys.argv[1:])") == ["False", "None", "None"]


def test_importing_the_package_changes_nothing_of_the_process() -> None:
    code = "import os; import torch; torch.get_num_threads(); before = dict(os.environ), torch.get_num_threads()\n"
    code += "import offload; offload.Engine; offload.load_pretrained\n"
    code += "assert (dict(os.environ), torch.get_num_threads()) == before; print('same')"
    assert run(code) == ["same"]


def test_examples_bound_spinning_as_commands_do() -> None:
    source = (ROOT / "examples" / "common.py").read_text(encoding="utf-8")
    assert f'"GOMP_SPINCOUNT", "{SPINS}"' in source
    code = f"import os, sys; sys.path.insert(0, {str(ROOT / 'examples')!r}); import common\n"
    code += "print(*(os.environ.get(name) for name in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT')))"
    assert run(code) == ["None", SPINS]
    assert run(code, OMP_WAIT_POLICY="PASSIVE") == ["PASSIVE", "None"]
    for path in sorted((ROOT / "examples").glob("*.py")):  # what imports torch earlier has decided it
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith(("import", "from"))]
        if "import common" in lines:
            earlier = [line.split()[1] for line in lines[: lines.index("import common")]]
            assert set(earlier) <= sys.stdlib_module_names, path.name


@pytest.mark.nightly
def test_the_bench_compares_settings_in_both_cases(tmp_path: Path) -> None:
    found, _ = benches.run("waiting", tmp_path, "--smoke")
    assert len(found["cases"]) == 2
    for name, rows in found["cases"].items():
        assert set(rows) == set(found["turns"][name]) == {"default", "passive", "spin 1000"}
        best = min(row["wall_s"] for row in rows.values())
        for setting, row in rows.items():
            assert row["of_best"] == row["wall_s"] / best >= 1
            assert found["worst_ratio"][setting] >= row["of_best"]
