"""The example of several ranks runs under torchrun, and prints what one process prints."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ranks.py"

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")


@pytest.mark.usefixtures("single_torch_thread")
def test_two_processes_print_what_one_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE)]
    two = subprocess.Popen(torchrun, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(sys, "argv", [EXAMPLE.stem])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed, errors = two.communicate(timeout=120)
    assert two.returncode == 0, errors
    lines = printed.splitlines()
    assert lines == capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("parameters: ")
