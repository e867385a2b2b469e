"""Each wait of the mover, left out in turn: some program on the simulated accelerator must miss it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_simulated_engine as engine
import test_simulated_mover as mover
import test_simulated_states as states
from harness import assert_equal
from simulated import Schedule, fixed, running
from simulated.instead import MOVER_STREAMS
from simulated.kernels import updating

import offload

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MEMORY, SHARDS = "offload.memory", "offload.shards"

# what is left out -> module, function, its text, what is there instead
WAITS: dict[str, tuple[str, str, str, str]] = {
    "uploads behind the work of the arena's last owner": (
        f"{MEMORY}.accelerator", "AcceleratorMover.__init__", "stream.wait_stream(device.current_stream())", "pass"
    ),
    "an upload behind compute that reads what it overwrites": (
        f"{MEMORY}.accelerator", "AcceleratorMover._send", "self._follow(stream, before)", "pass"
    ),
    "an upload of what was read from the drive, likewise": (
        f"{MEMORY}.accelerator", "AcceleratorMover._pass_on", "self._follow(stream, before)", "pass"
    ),
    "a release is recorded": (
        f"{MEMORY}.ordering", "Ordering.release", "release.events[number] = self._streams.event(stream)", "pass"
    ),
    "a use behind a release counts": (f"{MEMORY}.ordering", "Ordering.use", "self._used.add(buffer.address)", "pass"),
    "a release counts for all of its range": (
        f"{MEMORY}.ordering", "Ordering.before", "address < end and begin < release.end", "address == begin"
    ),
    "what becomes free is released": (f"{SHARDS}.copies", "Copies._free", "self._release(buffer)", "pass"),
    "an upload behind another one to its place": (
        f"{MEMORY}.ordering", "Ordering.before", "found.append(arrival.event)", "pass"
    ),
    "compute behind the upload": (
        f"{MEMORY}.ordering", "Ordering.use", "waiting.wait_event(arrival.event)", "pass"
    ),
    "a stream that comes later behind the upload": (
        f"{MEMORY}.ordering", "Ordering.use",
        "if arrival is None or number in arrival.behind:", "if arrival is None or arrival.behind:",
    ),
    "a move behind those who read": (
        f"{MEMORY}.ordering", "Ordering.begin_alone", "current.wait_stream(stream)", "pass"
    ),
    "a move behind what has arrived in its place": (
        f"{MEMORY}.accelerator", "AcceleratorMover.move",
        "self._follow(self._device.current_stream(), self._ordering.before(target))", "pass",
    ),
    "those who read behind a move": (
        f"{MEMORY}.accelerator", "AcceleratorMover.move", "stream.wait_stream(self._device.current_stream())", "pass"
    ),
    "an upload behind a move from its place": (
        f"{MEMORY}.ordering", "Ordering.moved", "self.release(source)", "pass"
    ),
    "a gradient's download behind compute": (
        f"{MEMORY}.gradient_reader", "GradientReader.read", "self._stream.wait_event(self._streams.event())", "pass"
    ),
    "a gradient lives until it has left": (
        f"{MEMORY}.gradient_reader", "GradientReader.read", "batch.tensors.append(tensor)", "pass"
    ),
    "the host behind the downloads of gradients": (
        f"{MEMORY}.gradient_reader", "_await_copies", "arrived.synchronize()", "pass"
    ),
    "the host behind the upload from staging": (
        f"{MEMORY}.accelerator", "AcceleratorMover._await_staging", "used.synchronize()", "pass"
    ),
    "a failed fetch behind its uploads": (
        f"{MEMORY}.accelerator", "AcceleratorMover._pass_on",
        "self._await_staging(number)  # nothing may be copied to the target once it is known to have failed", "pass",
    ),
    "a failed copy behind its first part": (
        f"{MEMORY}.accelerator", "AcceleratorMover._copying",
        "stream.synchronize()  # both places are about to be used for something else", "pass",
    ),
    "the host behind the last upload from a home": (
        f"{MEMORY}.accelerator", "AcceleratorMover.await_source",
        'self._moment(event, "copy to the device").wait(self._deadline_s)', "pass",
    ),
    "a download of a chunk behind compute": (
        f"{MEMORY}.accelerator", "AcceleratorMover.download",
        "self._follow(stream, self._ordering.computed())", "pass",
    ),
    "the host behind compute, before what is settled is read": (
        f"{MEMORY}.accelerator", "AcceleratorMover.await_compute",
        'self._moment(event, "compute").wait(timeout_s)', "pass",
    ),
    "an upload of a chunk behind compute": (
        f"{MEMORY}.accelerator", "AcceleratorMover.upload",
        "self._follow(self._urgent, self._ordering.computed())", "pass",
    ),
    "the host behind a copy of a chunk": (
        f"{MEMORY}.accelerator", "_Moment.wait",
        "FutureTransfer(self._waiter.submit(self._event.synchronize), self._subject).wait(timeout_s)", "pass",
    ),
    "a part of new parameters behind compute that reads what it overwrites": (
        f"{MEMORY}.accelerator", "AcceleratorMover.fill",
        "self._follow(self._ahead, self._ordering.before(target))", "pass",
    ),
    "compute behind the parts of new parameters": (
        f"{MEMORY}.accelerator", "AcceleratorMover.fill", "self._ordering.arrive(target, event)", "pass"
    ),
    "the host behind a part before its memory is used again": (
        f"{SHARDS}.stream", "Pipeline.write",
        "chunk.writing.append(filling)", "pass",
    ),
}  # fmt: skip
# likewise, where the device updates units by itself
WAITS_OF_UPDATES: dict[str, tuple[str, str, str, str]] = {
    "what is alone on the device behind all that compute": (
        f"{MEMORY}.ordering", "Ordering.begin_alone", "current.wait_stream(stream)", "pass"
    ),
    "all that compute behind what is alone": (
        f"{MEMORY}.ordering", "Ordering.end_alone", "stream.wait_stream(self._alone)", "pass"
    ),
    "a stream that comes later, likewise": (
        f"{MEMORY}.ordering", "Ordering.note_stream", "stream.wait_stream(self._alone)", "pass"
    ),
    "updates are alone": (
        f"{SHARDS}.device_updates", "DeviceUpdates.make", "with mover.alone():", "if True:"
    ),
    "a gradient that is added is alone": (
        f"{SHARDS}.gradients", "Gradients._keep", "with self._mover.alone():", "if True:"
    ),
    "who has computed a gradient that is kept is known": (
        f"{SHARDS}.gradients", "Gradients._keep", "self._mover.note_stream()", "pass"
    ),
    "a forward inside another one may compute on a stream of its own": (
        "offload.module.hooks", "Hooks._needs_nothing", "and contexts.stream == self._mover.note_stream()", ""
    ),
    "what was measured is read alone": (
        f"{SHARDS}.gradients", "Gradients.read_sums", "with self._mover.alone():", "if True:"
    ),
    "states that are loaded behind updates": (
        f"{MEMORY}.accelerator", "AcceleratorMover.upload",
        "self._follow(self._urgent, self._ordering.computed())", "pass",
    ),
    "states that are read behind updates": (
        f"{MEMORY}.accelerator", "AcceleratorMover.download",
        "self._follow(stream, self._ordering.computed())", "pass",
    ),
}  # fmt: skip

# calls by which a stream, or the host, waits for a stream
A_WAIT = re.compile(r"\.(wait_event|wait_stream|synchronize|_follow)\b")
# where no table leaves them out -> why
NO_TABLE = {
    f"{MEMORY}.accelerator.AcceleratorMover._follow": "its callers are in the tables",
    f"{MEMORY}.accelerator.AcceleratorDevice.synchronize": "likewise",
    f"{SHARDS}.tiers.Tiers.close": "test_an_engine_that_ends_waits_for_what_is_queued leaves it out",
    "offload.engine.Engine._spans": "test_what_the_device_updates_itself_is_computing misses it",
    "offload.measuring._median_s": "it measures",
    "offload.measuring._passes_s": "it measures",
    "offload.measuring._link_rate": "it measures",
}


def leave_out(wait: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a function by one without a wait."""
    place, path, text, instead = wait
    module = importlib.import_module(place)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert source.count(text) == 1, f"the mover has changed: {text}"
    contents: dict[str, Any] = {}
    exec(compile(source.replace(text, instead), module.__file__ or "", "exec"), vars(module), contents)
    monkeypatch.setattr(owner, name, contents[name])


Program = Callable[[Schedule], str | None]


def trained(run: Callable[[str, Path], engine.Outcome], home: str, path: Path) -> Program:
    """Return what says what is wrong with a training under a schedule."""
    truth = run("truth", path)

    def program(schedule: Schedule) -> str | None:
        with running(schedule) as seen:
            try:
                assert_equal(engine.on_cpu(run(home, path)), truth)
            except (AssertionError, offload.OffloadError) as error:
                return f"wrong: {error}"
        return seen.races[0] if seen.races else None

    return program


MOVER_PROGRAMS = (
    mover.test_what_others_bring_follows_who_reads_its_place,
    mover.test_the_arena_may_be_memory_on_which_work_is_queued,
    mover.test_what_arrived_unused_is_overwritten_behind_its_arrival,
    mover.test_what_arrived_unused_is_overwritten_in_parts_behind_its_arrival,
    mover.test_what_arrived_unused_is_moved_over_behind_its_arrival,
    mover.test_a_stream_that_comes_later_waits_for_what_has_arrived,
    mover.test_a_read_that_fails_leaves_nothing_that_still_copies,
    mover.test_a_copy_that_fails_in_its_second_part_leaves_nothing_that_still_copies,
    mover.test_a_copy_waits_for_those_who_read_its_place_and_for_no_others,
    mover.test_copies_of_chunks_are_waited_for_by_the_host_alone,
    mover.test_what_is_settled_does_not_wait_for_compute_and_compute_may_be_waited_for,
    mover.test_gradients_arrive_in_order_whatever_the_ring,
    mover.test_a_place_is_filled_part_by_part_from_memory_that_is_used_again,
)


@contextlib.contextmanager
def benches() -> Iterator[Callable[..., mover.Bench]]:
    made: list[mover.Bench] = []

    def make(**options: int) -> mover.Bench:
        made.append(mover.Bench(**options))
        return made[-1]

    try:
        yield make
    finally:
        for bench in made:
            bench.close()


def missed_by_the_mover() -> str | None:
    """Run the programs that need no engine, each under all of its schedules; returns which was wrong, or raced."""
    for program in MOVER_PROGRAMS:
        with benches() as make:
            try:
                program(make)
            except (AssertionError, offload.OffloadError) as error:
                return f"{program.__name__}: {error}"
    for distance in (mover.PAGE, 5 * mover.PAGE):
        with benches() as make:
            try:
                mover.test_bytes_move_behind_all_that_reads_them_and_before_all_that_comes(distance, make)
            except AssertionError as error:
                return f"move: {error}"
    return None


def missed_by_an_engine(path: Path, programs: dict[str, Program]) -> Iterator[str]:
    """Yield which runs of the engine are wrong, or race."""
    for schedule in fixed(MOVER_STREAMS + 1):
        for name, program in programs.items():
            wrong = program(schedule)
            if wrong:
                yield f"{schedule.name}, {name}: {wrong}"


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, Program]:
    runs = (engine.run_net, engine.run_evaluated, engine.run_on_two_streams, engine.run_clipped)
    return {f"{run.__name__} {home}": trained(run, home, tmp_path) for run in runs for home in engine.HOMES}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_of_the_mover_that_is_left_out_is_seen(
    wait: str, tmp_path: Path, programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(WAITS[wait], monkeypatch)
    seen = missed_by_the_mover() or next(missed_by_an_engine(tmp_path, programs), None)
    assert seen, "nothing has missed it"
    print(f"without {wait}: {seen}")


def test_with_all_waits_nothing_is_wrong(tmp_path: Path, programs: dict[str, Program]) -> None:
    assert missed_by_the_mover() is None
    assert list(missed_by_an_engine(tmp_path, programs)) == []


@pytest.fixture
def programs_of_updates(tmp_path: Path) -> Iterator[dict[str, Program]]:
    runs = (states.run_on_new_streams, states.run_on_changing_streams, states.run_added, states.run_reloaded)
    with updating():
        yield {run.__name__: trained(run, "resident", tmp_path) for run in (*runs, states.run_nested_on_new_streams)}


@pytest.mark.parametrize("wait", WAITS_OF_UPDATES)
def test_a_wait_of_updates_on_the_device_that_is_left_out_is_seen(
    wait: str, tmp_path: Path, programs_of_updates: dict[str, Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(WAITS_OF_UPDATES[wait], monkeypatch)
    seen = next(missed_by_an_engine(tmp_path, programs_of_updates), None)
    assert seen, "nothing has missed it"
    print(f"without {wait}: {seen}")


def test_with_all_waits_of_updates_nothing_is_wrong(tmp_path: Path, programs_of_updates: dict[str, Program]) -> None:
    assert list(missed_by_an_engine(tmp_path, programs_of_updates)) == []


def functions(tree: ast.AST, path: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions of a module and its classes by their paths; those inside of functions are part of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{path}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{path}.{node.name}")


def test_every_wait_is_in_a_table() -> None:
    """So a new one needs a run that misses it."""
    import test_simulated_leaving as leaving
    import test_simulated_sleeping as sleeping

    texts: dict[str, list[str]] = {}
    for table in (WAITS, WAITS_OF_UPDATES, leaving.WAITS, sleeping.WAITS):
        for module, function, text, _ in table.values():
            texts.setdefault(f"{module}.{function}", []).append(text)
    root, found = Path(offload.__file__).parent, set()
    for file in sorted(root.rglob("*.py")):
        source, module = file.read_text(encoding="utf-8"), ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for path, node in functions(ast.parse(source), module) if A_WAIT.search(source) else ():
            body = ast.get_source_segment(source, node) or ""
            for text in texts.get(path, []):
                body = body.replace(text.partition("  #")[0], "")  # the last line of `body` has no comment
            if A_WAIT.search(body):
                found.add(path)
    assert found == set(NO_TABLE)
