"""Hypothesis profiles and markers shared by all tests.

Profiles (environment variable HYPOTHESIS_PROFILE): `quick` on a developer's machine, `ci` where CI is set,
`nightly` with at least 10 000 examples per test, which also selects the tests marked `nightly`, and all cases of those
marked `few`; `sweep` selects them, too, with as many examples as `quick`. `quick` and `ci` have the same examples in
every run, so that a change is judged by itself; the others draw new ones.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import few
import jitter
import pytest
from hypothesis import HealthCheck, settings
from simulated import apart, instead

# Threads of torch that wait spin by default, which on a machine that does something else as well costs the tests a
# multiple of their time. Read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell lets what it starts in the background ignore it; tests raise it, and want it to be heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

NIGHTLY_EXAMPLES = 10_000

_COMMON = {
    "deadline": None,  # two cores shared with a build: wall time says nothing
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("quick", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("sweep", max_examples=30, **_COMMON)
settings.register_profile("ci", max_examples=60, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("nightly", max_examples=NIGHTLY_EXAMPLES, print_blob=True, **_COMMON)

PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "quick")
settings.load_profile(PROFILE)


@pytest.fixture(autouse=True)
def no_measured_drives(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has measured of this machine's drives is neither used nor changed."""
    from offload.memory import drives

    file = tmp_path_factory.getbasetemp() / "no-drives" / "drives.json"
    monkeypatch.setattr(drives, "cache_file", lambda: file)


@pytest.fixture(autouse=True)
def engines_of_tests(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines of tests say of themselves is not among what the user's say."""
    from offload.seeing import published

    folder = tmp_path_factory.getbasetemp() / "running"
    monkeypatch.setattr(published, "folder", lambda: folder)


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    """No test leaves torch with another number of threads: the bits of sums in later ones depend on it."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    yield
    assert not torch or torch.get_num_threads() == before, "use the fixture single_torch_thread"


@pytest.fixture
def single_torch_thread() -> Iterator[None]:
    """Compute in one thread; see the harness."""
    from harness import one_torch_thread

    with one_torch_thread():
        yield


@pytest.fixture(scope="session")
def sim() -> None:
    """The simulated accelerator, registered with torch for the rest of the process; built first where need be."""
    from simulated import CannotBuild, load

    try:
        load()
    except CannotBuild as missing:
        pytest.skip(f"no simulated accelerator: {missing}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that let the tests of engines run on the simulated device, or on a GPU."""
    parser.addoption("--device", choices=["cpu", "sim", "cuda"], default="cpu", help="where engines compute")
    parser.addoption("--schedule", default="lazy", help="lazy, eager, 'first N', 'seed N', 'in turn'")


@pytest.fixture(autouse=True)
def _simulated_instead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test under the schedule where its engines are on the simulated device."""
    if request.config.getoption("device") != "sim":
        yield
        return
    turn = request.session.items.index(request.node)
    with instead.scheduled(instead.schedule_of(request.config.getoption("schedule"), turn)):
        yield


def missing_for_gpu() -> str | None:
    """Return what a GPU test misses on this machine, or None when it can run."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device (torch.cuda.is_available() is False)"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is none, leave nightly tests out of other profiles, and run simulated ones apart."""
    if any(item.get_closest_marker("gpu") for item in items):
        missing = missing_for_gpu()
        if missing is not None:
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason=missing))
    if PROFILE not in ("nightly", "sweep") and apart.REPORTS not in os.environ:  # what is there was chosen
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        if nightly:
            config.hook.pytest_deselected(items=nightly)
            items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        few.leave_out(config, items)
    if config.getoption("device") != "cpu":
        instead.select(config, items)
    else:
        apart.arrange(config, items)
    if hasattr(config, "workerinput"):
        import parallel

        parallel.sort(items)


_imported = 0  # modules, when garbage was last told to look at none of them


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let no collection of garbage look at what is imported: many tests collect, and otherwise each takes 0.3 s.

    Between two tests, since nothing of a test is there then.
    """
    global _imported
    if len(sys.modules) > _imported + 20:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Let threads meet in other orders, if that is wanted."""
    with jitter.jittering():
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests out to several processes."""
    import parallel

    return parallel.ByGroup(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_report_header() -> str:
    """Say under which hypothesis profile the tests run."""
    return f"hypothesis profile: {PROFILE}"
