"""Runs the tests of the simulated accelerator in a process of their own, and reports them as if they had run here.

Autograd looks for devices at the first backward pass of a process and never again. And other tests must not meet an
accelerator. Where only simulated tests were chosen, they run in this process, as debuggers want it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPORTS = "SIMULATED_TEST_REPORTS"  # environment: the file to which the other process writes its reports
FIXTURE = "sim"
IN_NAME = "simulated"  # of every file with such tests


class Apart:
    """Plugin of the process that has chosen tests of both kinds."""

    def __init__(self, items: list[pytest.Item]) -> None:
        self._items = items
        self._reports: dict[str, list[pytest.TestReport]] | None = None
        self._end = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if item not in self._items:
            return None
        if self._reports is None:
            self._reports = self._run(item.config)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._reports.get(item.nodeid, [])
        if not any(report.when == "teardown" for report in reports):
            reports.append(self._lost(item))
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, config: pytest.Config) -> dict[str, list[pytest.TestReport]]:
        reports: dict[str, list[pytest.TestReport]] = {}
        timeout = config.getoption("timeout", None)
        options = ["-q", "-p", "no:cacheprovider", *([] if timeout is None else [f"--timeout={timeout}"])]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "reports"
            file.touch()
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *(item.nodeid for item in self._items)],
                cwd=config.rootpath,
                env={**os.environ, REPORTS: str(file)},
                capture_output=True,
                text=True,
                check=False,
            )
            for line in file.read_text().splitlines():
                report = config.hook.pytest_report_from_serializable(config=config, data=json.loads(line))
                reports.setdefault(report.nodeid, []).append(report)
        self._end = f"its process ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        return reports

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", self._end, "call")


class Reporter:
    """Plugin of the process that runs them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data) + "\n")


def arrange(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let the simulated tests among `items` run first, and apart from the others.

    Raises:
        pytest.UsageError: one is in a file whose name does not say so.
    """
    if REPORTS in os.environ:
        config.pluginmanager.register(Reporter(config))
        return
    apart = [item for item in items if FIXTURE in getattr(item, "fixturenames", ())]
    for item in apart:
        if IN_NAME not in item.path.name:
            raise pytest.UsageError(
                f"{item.nodeid}: expected a file with {IN_NAME!r} in its name but got {item.path.name}; "
                f"the fixture {FIXTURE!r} is for such files"
            )
    if apart and len(apart) < len(items):
        for item in apart:  # whichever is first waits for all; the other process has the limit of each
            item.add_marker(pytest.mark.timeout(0))
        config.pluginmanager.register(Apart(apart))
        items.sort(key=lambda item: FIXTURE not in getattr(item, "fixturenames", ()))
