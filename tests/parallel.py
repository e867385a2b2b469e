"""Shares the tests out to the processes of ``pytest -n 3 --dist loadfile``: a file at a time, the long ones first.

Tests of the simulated accelerator go to one process together, whatever their files: it runs them in one more, see
`simulated/apart.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulated import apart
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


def group(nodeid: str) -> str:
    """Return what goes to a process together with a test."""
    file = nodeid.split("::", 1)[0]
    return apart.IN_NAME if apart.IN_NAME in file else file


def sort(items: list[pytest.Item]) -> None:
    """Let groups that take long begin first, so that no process is left with one of them at the end."""
    sizes = Counter(group(item.nodeid) for item in items)
    slow = {group(item.nodeid) for item in items if item.get_closest_marker("slow")}

    def order(item: pytest.Item) -> tuple[bool, bool, int, str]:
        name = group(item.nodeid)
        return name != apart.IN_NAME, name not in slow, -sizes[name], name

    items.sort(key=order)


class ByGroup(LoadScopeScheduling):
    """Gives whole groups to processes, in the order of the tests.

    If a process dies, one more takes its place. The test that it ran has failed and is not run again.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)

    def _reschedule(self, node: WorkerController) -> None:
        """Give out groups until a process has enough: it begins a test when it knows the next, or that none comes.

        A group of a process that died may have no test left.
        """
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        super()._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        groups = self.assigned_work[node]
        left = ((tests, nodeid) for tests in groups.values() for nodeid, ended in tests.items() if not ended)
        tests, died = next(left, (None, None))
        if tests is not None:
            tests[died] = True
        super().remove_node(node)
        return died
