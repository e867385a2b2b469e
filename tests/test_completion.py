"""A shell completes ``offload``: bash, as it is when the tab key is pressed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from offload.cli import main as cli

pytest.importorskip("argcomplete")

PRESS = r"""
eval "$(offload completion bash)"
COMP_LINE=$1; COMP_POINT=${#COMP_LINE}; COMP_TYPE=9
read -ra COMP_WORDS <<< "$COMP_LINE"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete offload 2> /dev/null
printf '%s\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_and_their_values(tmp_path: Path) -> None:
    command = tmp_path / "offload"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m offload "$@"\n')
    command.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def press(line: str) -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", PRESS, "bash", line],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return [word.strip() for word in done.stdout.splitlines()]

    assert press("offload gen") == ["generate"]
    assert press("offload sc") == ["scale"] and press("offload scale --sums n") == ["nodes"]
    assert press("offload top --on") == ["--once"]
    assert press("offload finetune --lora-r") == ["--lora-rank"]
    assert press("offload finetune --peft l") == ["lora"]
    assert set(press("offload checkpoint ")) >= {"ls", "verify", "export", "import"}
    assert press("offload finetune --nothing-like-it") == [""]


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete -"), ("zsh", "compdef"), ("fish", "complete --command offload")]
)
def test_every_shell_gets_its_lines(shell: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    assert word in capsys.readouterr().out


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "argcomplete is not installed; pip install argcomplete" in capsys.readouterr().err
