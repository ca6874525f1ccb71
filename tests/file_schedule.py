"""How the test processes share the files of tests when one of them dies.

A test that runs past its time limit ends its process (pytest-timeout, method "thread"), and
pytest-xdist starts another in its place. Its own schedule then hands out files whose tests are all
done: a process that is given such a file, or a single test, reports nothing, so it is never given
more, and the run hangs at its end.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FEWEST_TESTS = 3
"""Tests that a process should have before it: it starts one when it knows the next."""


class FileSchedule(LoadFileScheduling):  # type: ignore[misc] # its library has no types
    """Gives whole files to test processes, and the rest of a dead process's files to the others."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a process off the schedule; return the test that it died in, None if it had ended.

        The test has failed, so nothing runs it again. Other processes take the tests behind it.
        """
        left = [
            (file, test)
            for file, tests in self.assigned_work.pop(node).items()
            for test, done in tests.items()
            if not done
        ]
        if not left:
            return None
        for file, test in left[1:]:
            self.workqueue.setdefault(file, {})[test] = False
        for other in self.assigned_work:
            self._reschedule(other)
        crashed: str = left[0][1]
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process files until it has enough tests, or tell it that there are no more."""
        if node not in self.registered_collections:  # it is still collecting
            return
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < FEWEST_TESTS:
            try:
                super()._reschedule(node)
            except OSError:  # it has died: `remove_node` comes next, and shares out its tests
                return
