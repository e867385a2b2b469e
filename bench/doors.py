"""What does a door cost? Microseconds that a step takes beyond one of the bare engine, per library.

Four sides of each library train the same model on the same batches, in processes that take turns: a plain loop of
torch, the library around the plain model, the engine in a loop, and the library around the engine through its door.
The difference of the last two is what users pay; the difference of the first two is the library's own part of it; the
rest is the door's. All are paired within a round, a block of steps each, and medians with their 95 % interval are
reported. A step is the time from one batch to the next, by the clock and of the process's own processors: others on the
machine disturb the second one least.

The model is so small that nothing else counts. On the real one (``--model real``), the engine and one door after the
other share a process, each in a thread of its own, and take turns: the engine, the door, the door, the engine. So
others on the machine meet both alike, and what drifts cancels. The figure is the ratio of a round: it fails if its
interval lies above 1. The seconds of the side's own thread are what others disturb least; with ``--threads 1`` it
computes all but what engines leave to threads of theirs. Beside it stands what ``import offload`` takes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import queue
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from _common import emit, load_model
from _paired import Side, interval
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import offload

CLIP, FOREVER = 1.0, 10**9
IMPORT_MS = 60  # at most, of ``import offload``
OPTIONS = {"max_memory": {"device": "12GiB", "cpu": "1GiB"}}  # everything on the device
CLOCKS: Mapping[str, Callable[[], float]] = {
    "clock": time.perf_counter,
    "processors": time.process_time,
    "thread": time.thread_time,  # of the side's own
}
Batch = dict[str, torch.Tensor]
Seconds = dict[str, list[float]]  # per step, by side, a number for each round


class Turns(Protocol):
    """Where a side is asked for blocks of steps, and answers."""

    def asked(self) -> Iterable[int]:
        """Yield how many steps a block has."""

    def answer(self, seconds: list[float]) -> None:
        """Say how many seconds a block took, by each clock."""


class Lines:
    """Turns of a process: lines of standard input, and of standard output."""

    def asked(self) -> Iterator[int]:
        """Read lines; at their end, leave the process from within the library's loop, whose steps have no end."""
        print("ready", flush=True)
        yield from map(int, sys.stdin)
        os._exit(0)

    def answer(self, seconds: list[float]) -> None:
        """Print a line."""
        print(json.dumps(seconds), flush=True)


class Thread:
    """Turns of a side in a thread of its own, which waits while it is not asked."""

    def __init__(self, run: Callable[[Turns], None]) -> None:
        self._questions, self._answers = queue.SimpleQueue[int](), queue.SimpleQueue[list[float] | BaseException]()
        self._run = run
        self._thread = threading.Thread(target=self._work, daemon=True)

    def ask(self, steps: int) -> list[float]:
        """Return the seconds of a block of steps, by each clock; the first begins with what comes before steps."""
        if self._thread.ident is None:
            self._thread.start()
        self._questions.put(steps)
        found = self._answers.get()
        if isinstance(found, BaseException):
            raise RuntimeError("a side of the bench ended early") from found
        return found

    def asked(self) -> Iterator[int]:
        """Wait for questions."""
        while True:
            yield self._questions.get()

    def answer(self, seconds: list[float]) -> None:
        """Hand it over."""
        self._answers.put(seconds)

    def _work(self) -> None:
        try:
            self._run(self)
        except BaseException as error:
            self._answers.put(error)


class Batches(IterableDataset[Batch]):
    """Batches without end. Between two of them it answers who asks for a block of steps."""

    def __init__(self, vocabulary: int, tokens: int, turns: Turns) -> None:
        self._ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(0))
        self._turns = turns

    def __iter__(self) -> Iterator[Batch]:
        """Give as many batches as are asked for, and answer with the seconds that they took."""
        for count in self._turns.asked():
            begin = [clock() for clock in CLOCKS.values()]
            for _ in range(count):
                yield {"input_ids": self._ids, "labels": self._ids}
            end = [clock() for clock in CLOCKS.values()]
            self._turns.answer([b - a for a, b in zip(begin, end, strict=True)])


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1)


def loader(batches: Batches) -> Any:
    return DataLoader(batches, batch_size=1)


# --- the sides --------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, batches: Batches) -> None:
    optimizer = adam(model)
    for batch in loader(batches):
        model(**batch, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def engine(model: nn.Module, batches: Batches) -> None:
    made = offload.Engine(model, adam(model), device="cpu", max_grad_norm=CLIP, **OPTIONS)
    for batch in loader(batches):
        made.backward(made(**batch, use_cache=False).loss)
        made.step()


def trainer(model: nn.Module, batches: Batches, *, door: bool) -> None:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=1,
        max_steps=FOREVER,
        logging_strategy="no",
        save_strategy="no",
        lr_scheduler_type="constant",
        max_grad_norm=CLIP,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model.config.use_cache = False
    given = {"model": model, "args": arguments, "train_dataset": batches, "optimizers": (adam(model), None)}
    kind, more = (offload.hf.OffloadTrainer, {"offload": OPTIONS}) if door else (transformers.Trainer, {})
    kind(**given, **more).train()


def lightning(model: nn.Module, batches: Batches, *, door: bool) -> None:
    import lightning as library

    class Module(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch, use_cache=False).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.model)

    strategy = {"strategy": offload.lightning.OffloadStrategy(**OPTIONS)} if door else {}
    library.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        gradient_clip_val=CLIP,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tempfile.mkdtemp(),
        **strategy,
    ).fit(Module(), loader(batches))


def accelerate(model: nn.Module, batches: Batches, *, door: bool) -> None:
    import accelerate as library

    accelerator = library.Accelerator(cpu=True)
    if door:
        made = offload.Engine(model, adam(model), device="cpu", **OPTIONS)
        prepared = offload.accelerate.prepare(accelerator, made, loader(batches))
    else:
        prepared = accelerator.prepare(model, adam(model), loader(batches))
    module, optimizer, data = prepared
    for batch in data:
        with accelerator.accumulate(module):
            accelerator.backward(module(**batch, use_cache=False).loss)
            accelerator.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()


def deepspeed(model: nn.Module, batches: Batches) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": CLIP}
    made, *_ = offload.deepspeed.initialize(model=model, optimizer=adam(model), config=config, device="cpu", **OPTIONS)
    for batch in loader(batches):
        made.backward(made(**batch, use_cache=False).loss)
        made.step()


SIDES: Mapping[str, Callable[[nn.Module, Batches], None]] = {
    "plain": plain,
    "engine": engine,
    "Trainer": lambda model, batches: trainer(model, batches, door=False),
    "offload.hf": lambda model, batches: trainer(model, batches, door=True),
    "Lightning": lambda model, batches: lightning(model, batches, door=False),
    "offload.lightning": lambda model, batches: lightning(model, batches, door=True),
    "Accelerate": lambda model, batches: accelerate(model, batches, door=False),
    "offload.accelerate": lambda model, batches: accelerate(model, batches, door=True),
    "offload.deepspeed": deepspeed,
}
# door -> its library around the plain model; DeepSpeed itself has an optimizer and a device loop of its own
LIBRARIES = {
    "offload.hf": "Trainer",
    "offload.lightning": "Lightning",
    "offload.accelerate": "Accelerate",
    "offload.deepspeed": None,
}


def serve(side: str, arguments: argparse.Namespace, turns: Turns) -> None:
    """Train as a side does, a block of steps whenever it is asked for one."""
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model, vocabulary = load_model(arguments.model)
    SIDES[side](model.train(), Batches(vocabulary, arguments.tokens, turns))


def serve_pair(door: str, arguments: argparse.Namespace) -> None:
    """Let the engine and a door take turns in this process: a round for each line of standard input."""
    sides = {side: Thread(functools.partial(serve, side, arguments)) for side in ("engine", door)}
    for thread in sides.values():
        thread.ask(1)  # one after the other is made
    lines = Lines()
    for count in lines.asked():
        found = {side: [0.0] * len(CLOCKS) for side in sides}
        for side in ("engine", door, door, "engine"):
            found[side] = [a + b for a, b in zip(found[side], sides[side].ask(count), strict=True)]
        lines.answer([*found["engine"], *found[door]])


# --- the comparison ---------------------------------------------------------------------------------------------------


def measure(sides: list[str], arguments: argparse.Namespace) -> dict[str, Seconds]:
    """Let sides take turns; returns their seconds by each clock."""
    with contextlib.ExitStack() as stack:
        processes = {}
        for side in sides:
            processes[side] = Side(__file__, "--side", side, *words_of(arguments))
            stack.callback(processes[side].close)
        found: dict[str, Seconds] = {name: {side: [] for side in sides} for name in CLOCKS}
        for number in range(arguments.rounds + 2):
            for side in sides if number % 2 else sides[::-1]:
                taken = processes[side].ask(str(arguments.block))
                if number >= 2:  # the first two rounds touch memory
                    for name, seconds in zip(CLOCKS, taken, strict=True):
                        found[name][side].append(seconds / arguments.block)
    return found


def measure_pair(door: str, arguments: argparse.Namespace) -> dict[str, Seconds]:
    """Let the engine and a door take turns in one process; returns their seconds by each clock."""
    process = Side(__file__, "--pair", door, *words_of(arguments))
    found: dict[str, Seconds] = {name: {"engine": [], door: []} for name in CLOCKS}
    try:
        for number in range(arguments.rounds + 2):
            taken = process.ask(str(arguments.block))
            for side, each in (("engine", taken[: len(CLOCKS)]), (door, taken[len(CLOCKS) :])):
                for name, seconds in zip(CLOCKS, each, strict=True):
                    if number >= 2:  # the first two rounds touch memory
                        found[name][side].append(seconds / (2 * arguments.block))
    finally:
        process.close()
    return found


def words_of(arguments: argparse.Namespace) -> list[str]:
    """Return what a process of this bench is started with."""
    return ["--model", arguments.model, "--tokens", str(arguments.tokens), "--threads", str(arguments.threads)]


def microseconds(one: list[float], other: list[float]) -> dict[str, float]:
    """Return what `one` takes beyond `other`: the median over rounds, with its 95 % interval."""
    differences = [1e6 * (a - b) for a, b in zip(one, other, strict=True)]
    low, high = interval(differences)
    return {"median": statistics.median(differences), "low": low, "high": high}


def on_tiny(doors: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what doors and their libraries add to a step, in microseconds, by each clock."""
    libraries = [library for door in doors if (library := LIBRARIES[door])]
    return {
        name: {door: added(door, seconds, name) for door in doors} | {"us per step": medians(seconds)}
        for name, seconds in measure(["plain", "engine", *libraries, *doors], arguments).items()
    }


def medians(seconds: Seconds) -> dict[str, float]:
    return {side: 1e6 * statistics.median(each) for side, each in seconds.items()}


def added(door: str, seconds: Seconds, clock: str) -> dict[str, Any]:
    """Return what a door adds to a step, in microseconds, and how much of it is the library's."""
    found, library = {"door over engine": microseconds(seconds[door], seconds["engine"])}, LIBRARIES[door]
    if library:
        found["library over plain"] = microseconds(seconds[library], seconds["plain"])
        through = [a - b for a, b in zip(seconds[door], seconds["engine"], strict=True)]
        around = [a - b for a, b in zip(seconds[library], seconds["plain"], strict=True)]
        found["door's own"] = microseconds(through, around)
    for name, one in found.items():
        print(f"{clock}: {door}, {name}: {one['median']:.0f} us per step, {one['low']:.0f} to {one['high']:.0f}")
    return found


def on_real(doors: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of doors' steps to those of the engine, by each clock; door by door."""
    found: dict[str, Any] = {name: {} for name in CLOCKS}
    for door in doors:
        for name, seconds in measure_pair(door, arguments).items():
            ratios = [a / b for a, b in zip(seconds[door], seconds["engine"], strict=True)]
            low, high = interval(ratios)
            found[name][door] = {"ratio": statistics.median(ratios), "low": low, "high": high, "seconds": seconds}
            print(f"{name}: {door} / engine = {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")
    return found


def on_import(rounds: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds that ``import offload`` takes beyond a Python that imports nothing, by each clock."""
    clocks = {"clock": time.perf_counter, "processors": children_s}
    found: dict[str, Seconds] = {name: {"pass": [], "import offload": []} for name in clocks}
    for number in range(2 * rounds):
        for statement in ("pass", "import offload") if number % 2 else ("import offload", "pass"):
            begin = {name: clock() for name, clock in clocks.items()}
            subprocess.run([sys.executable, "-c", statement], check=True)
            for name, clock in clocks.items():
                found[name][statement].append(clock() - begin[name])
    result = {}
    for name, seconds in found.items():
        beyond = microseconds(seconds["import offload"], seconds["pass"])
        result[name] = {each: value / 1e3 for each, value in beyond.items()}
        median, low, high = result[name].values()
        print(f"{name}: import offload: {median:.1f} ms beyond nothing, {low:.1f} to {high:.1f}")
    return result


def children_s() -> float:
    """Return the seconds of processors that processes have taken which have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="as in bench/_common.py: tiny, real")
    parser.add_argument("--doors", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--block", type=int, default=20, help="steps of a side in a round")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="0: torch's choice")
    parser.add_argument("--smoke", action="store_true", help="one door, two rounds of two steps")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--pair", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.side:
        return serve(arguments.side, arguments, Lines())
    if arguments.pair:
        return serve_pair(arguments.pair, arguments)
    if arguments.smoke:
        arguments.rounds, arguments.block, arguments.doors = 2, 2, ["offload.accelerate"]
    imported = on_import(arguments.rounds)
    found = (on_tiny if arguments.model == "tiny" else on_real)(arguments.doors, arguments)
    settings = {name: getattr(arguments, name) for name in ("model", "rounds", "block", "tokens", "threads")}
    emit(arguments.json, {"import_ms": imported, "steps": found, **settings})
    slow = arguments.model != "tiny" and any(one["low"] > 1 for one in found["clock"].values())
    sys.exit(int(imported["processors"]["low"] > IMPORT_MS or slow))


if __name__ == "__main__":
    main()
