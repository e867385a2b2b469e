"""What do the hooks cost? Engine step time over a plain PyTorch loop with the same optimizer kernel, all resident.

Both sides run the same model, batches and Adam kernel in one process, interleaved; the figure is the median of the
ratios within a round (bound: 1.0; to reach: at most 1.05). The plain loop clips by the global norm as the engine does.

With ``--against REV``, the engine of an earlier commit runs instead of the plain loop, in a process of its own, and so
does today's; they take turns. The figure is the paired ratio with its 95 % interval. It fails only if the lower end is
above 1.02: single rounds scatter from 0.87 to 1.26 on a shared machine. Beside it stand the microseconds that hooks
take per call of a module and per gradient, measured on layers so small that nothing else counts.

With ``--streamed``, such layers come for each use, from host memory or from NVMe, to a device that has room for a few.
The figure is processor time of the main thread per use, beyond what a resident layer takes (to reach: 60 us). So
neither waiting nor what others on the machine do is in it. ``--against`` has these figures, too.

With ``--host``, a Llama is so small that only the host's work counts, as where a GPU waits for the host: milliseconds
of the main thread for forward, backward and step, of plain PyTorch with its own AdamW and of the engine with everything
on the device, without and with checkpoints of activations. ``--against`` has these figures, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORST = 1.02  # the lower end of the interval, against an earlier commit
LAYERS = 200  # of the model that hooks are timed on; each is a unit
STREAMED = (("cpu", 8), ("cpu", 64), ("nvme", 8), ("nvme", 64))  # their home, and how many the device has room for
STREAMED_US = 60.0  # of the main thread per use, to reach
ACTIVATION_BYTES = 64 << 20
UNIT_BYTES = 16 << 10  # of a layer, with its padding
HOST = {"without checkpoints": False, "with checkpoints": True}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
}
EXTENSIONS = ("offload._cpu_adam", "swap._aio")


def _take_from(root: Path) -> None:
    """Let the packages be those below `root`: an editable installation would find its own first."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
    sys.path.insert(0, str(root))


if "--serve" in sys.argv and (_TREE := Path(sys.argv[sys.argv.index("--serve") + 1])) != ROOT:
    _take_from(_TREE)

import torch  # noqa: E402
from _common import emit, load_model  # noqa: E402
from _paired import Side, interval  # noqa: E402

import offload  # noqa: E402

SPEC = offload.AdamW(lr=1e-5, weight_decay=0.1)


class PlainLoop:
    """Forward, backward, global norm, and the same kernel on one set of fp32 states per parameter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.count = 0
        self.states = [
            (
                torch.zeros(p.shape, dtype=torch.int16),
                torch.zeros(p.shape, dtype=torch.float32),
                torch.zeros(p.shape, dtype=torch.float32),
            )
            for p in model.parameters()
        ]

    def step(self, batch: dict[str, Any]) -> float:
        """Take one step; returns the loss."""
        from offload.kernels import cpu_adam

        loss = self.model(**batch).loss
        loss.backward()
        self.count += 1
        dtype = cpu_adam.Dtype.BFLOAT16
        squares = sum(
            cpu_adam.sum_of_squares(p.grad.data_ptr(), dtype, p.numel())[0]
            for p in self.model.parameters()
            if p.grad is not None
        )
        scale = min(1.0, 1.0 / (squares**0.5 + 1e-6))
        hyper = cpu_adam.Hyper(SPEC, step=self.count, grad_scale=scale)
        for parameter, (master, exp_avg, exp_avg_sq) in zip(self.model.parameters(), self.states, strict=True):
            assert parameter.grad is not None
            arrays = cpu_adam.StepArrays(
                numel=parameter.numel(),
                grad=parameter.grad.data_ptr(),
                grad_dtype=dtype,
                param=parameter.data_ptr(),
                master=master.data_ptr(),
                master_kind=cpu_adam.MasterKind.SPLIT,
                states=(exp_avg.data_ptr(), exp_avg_sq.data_ptr()),
            )
            cpu_adam.step(arrays, hyper)
            parameter.grad = None
        return loss.item()


class EngineLoop:
    """The same through the engine, everything on the device."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.engine = offload.Engine(
            model,
            SPEC,
            device="cpu",
            max_memory={"device": "12GiB", "cpu": "1GiB"},
            max_grad_norm=1.0,
        )

    def step(self, batch: dict[str, Any]) -> float:
        """Take one step; returns the loss."""
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())


def made_batch(vocabulary: int, tokens: int) -> dict[str, Any]:
    """Return random tokens as a batch."""
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


# --- layers so small that nothing but bookkeeping counts --------------------------------------------------------------


def layers() -> torch.nn.Sequential:
    """Return the model."""
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(LAYERS)])


def resident() -> offload.Engine:
    """Return an engine that has it on the device; what other engines of this process take is resident, too."""
    return offload.Engine(layers(), offload.SGD(), device="cpu", max_memory={"device": "12GiB", "cpu": "64MiB"})


def passes(module: Callable[..., Any], clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of a forward and of its backward."""
    begin = clock()
    loss = module(torch.ones(1, 8)).sum()
    middle = clock()
    loss.backward()
    return middle - begin, clock() - middle


def streamed(rounds: int) -> dict[str, list[float]]:
    """Return microseconds of the main thread per use in forward and in backward, beyond those of resident layers."""
    found: dict[str, list[float]] = {}
    beside = resident()
    for home, room in STREAMED:
        memory = {"device": ACTIVATION_BYTES + room * UNIT_BYTES, "cpu": "64MiB", "nvme": "64MiB"}
        options: dict[str, Any] = {"activation_memory": ACTIVATION_BYTES, "offload_param": home}
        with (
            tempfile.TemporaryDirectory(dir=".") as folder,
            offload.Engine(
                layers(), offload.SGD(), device="cpu", max_memory=memory, nvme_path=folder, **options
            ) as engine,
        ):
            taken = []
            for _ in range(rounds + 3):  # the first three learn what comes when, and how much memory there is
                ours, theirs = passes(engine, time.thread_time), passes(beside, time.thread_time)
                engine.zero_grad()
                beside.zero_grad()
                taken.append([1e6 * (our - their) / LAYERS for our, their in zip(ours, theirs, strict=True)])
            link = engine.stats().links["h2d" if home == "cpu" else "nvme_read"]
            least = (rounds + 3) * 2 * (LAYERS - room - 1) * engine.plan.request.units[0].param_bytes
            assert link.bytes >= least, f"{home}: expected {least} bytes to come but got {link.bytes}"
        found[f"{home}, room for {room}"] = [statistics.median(each) for each in zip(*taken[3:], strict=True)]
    beside.close()
    return found


def print_uses(found: dict[str, list[float]], beginning: str) -> None:
    """Print a line per case."""
    for name, (forward, backward) in found.items():
        print(f"{beginning}{name}: {forward:.1f} us per use in forward, {backward:.1f} us in backward")


# --- a model so small that nothing but the host's work counts ---------------------------------------------------------


def small_llama(checkpointing: bool) -> torch.nn.Module:
    """Return a Llama of as many modules as one of a billion parameters has."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=False)
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


class Host:
    """Plain PyTorch and the engine on the small Llama."""

    def __init__(self, checkpointing: bool) -> None:
        plain = small_llama(checkpointing)
        memory = {"device": "12GiB", "cpu": "1GiB"}
        engine = offload.Engine(copy.deepcopy(plain), SPEC, device="cpu", max_memory=memory, max_grad_norm=1.0)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=SPEC.lr, weight_decay=SPEC.weight_decay, foreach=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        self.engine = engine
        self._sides: list[tuple[Callable[..., Any], Callable[[Any], None], Callable[[], object]]] = [
            (plain, lambda loss: loss.backward(), step),
            (engine, engine.backward, engine.step),
        ]

    def taken(self) -> list[float]:
        """Return seconds of the main thread for forward, backward and step, of plain PyTorch and of the engine."""
        batch, found = made_batch(SMALL["vocab_size"], 16), []
        for forward, backward, step in self._sides:
            moments = [time.thread_time()]
            loss = forward(**batch).loss
            moments.append(time.thread_time())
            backward(loss)
            moments.append(time.thread_time())
            step()
            moments.append(time.thread_time())
            found += [after - before for before, after in pairwise(moments)]
        return found


def of_the_host(rounds: int) -> dict[str, list[float]]:
    """Return medians of :meth:`Host.taken` per case, in milliseconds."""
    found = {}
    for name, checkpointing in HOST.items():
        host = Host(checkpointing)
        taken = [host.taken() for _ in range(rounds + 3)][3:]
        found[name] = [1e3 * statistics.median(each) for each in zip(*taken, strict=True)]
        host.engine.close()
    return found


def print_host(found: dict[str, list[float]], beginning: str = "") -> None:
    """Print a line per case."""
    for name, taken in found.items():
        plain, ours = taken[:3], taken[3:]
        parts = ", ".join(
            f"{part} {our:.1f} (plain {their:.1f})"
            for part, our, their in zip(("forward", "backward", "step"), ours, plain, strict=True)
        )
        print(f"{beginning}{name}: {parts} ms; {sum(ours) / sum(plain):.2f} of plain")


# --- against an earlier commit ----------------------------------------------------------------------------------------


def serve(model_name: str, tokens: int) -> None:
    """Time what the lines of standard input ask for, and print seconds."""
    model, vocabulary = load_model(model_name)
    steps = EngineLoop(model.train())
    batch = made_batch(vocabulary, tokens)
    engine, plain = resident(), layers()

    def calls() -> list[float]:
        """Return seconds of hooks per call of a module, and per gradient."""
        found = []
        for _ in range(10):
            ours, theirs = passes(engine, time.perf_counter), passes(plain, time.perf_counter)
            engine.zero_grad()
            plain.zero_grad()
            found.append([(ours[0] - theirs[0]) / LAYERS, (ours[1] - theirs[1]) / (2 * LAYERS)])
        return [statistics.median(values) for values in zip(*found, strict=True)]

    def step() -> list[float]:
        begin = time.perf_counter()
        loss = steps.step(batch)
        return [time.perf_counter() - begin, loss]

    answers = {
        "step": step,
        "calls": calls,
        "uses": lambda: list(streamed(rounds=5).values()),
        "host": lambda: list(of_the_host(rounds=5).values()),
    }
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def side(root: Path, model_name: str, tokens: int) -> Side:
    """Return an engine in a process of its own."""
    return Side(__file__, "--serve", str(root), "--model", model_name, "--tokens", str(tokens))


def extensions(tree: Path, revision: str) -> list[Path]:
    """Return the extensions for a tree: this one's, or if the C++ sources differ, those that are built of its own."""
    if not subprocess.run(["git", "diff", "--quiet", revision, "--", "csrc"], cwd=ROOT, check=False).returncode:
        return [Path(str(importlib.import_module(name).__file__)) for name in EXTENSIONS]
    print(f"csrc differs from {revision}: building its extensions", flush=True)
    liburing = ROOT / "build" / "liburing"
    root = [f"--config-settings=cmake.define.OFFLOAD_LIBURING_ROOT={liburing}"] if liburing.is_dir() else []
    words = ["--quiet", "--no-build-isolation", "--no-deps", "--target", str(tree / "built"), *root, str(tree)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
    return [next((tree / "built").glob(f"{name.replace('.', '/')}*.so")) for name in EXTENSIONS]


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check an earlier commit out beside this one, with built extensions."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "tree"
        add = ["git", "worktree", "add", "--quiet", "--detach", str(target), revision]
        subprocess.run(add, cwd=ROOT, check=True)
        try:
            for name, built in zip(EXTENSIONS, extensions(target, revision), strict=True):
                shutil.copy(built, target / name.split(".", maxsplit=1)[0])
            yield target
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(target)], cwd=ROOT, check=False)


def compare(revision: str, model_name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Let the engines of two commits take turns; returns the figures."""
    with checked_out(revision) as tree, contextlib.ExitStack() as open_sides:
        sides = {"before": side(tree, model_name, tokens), "now": side(ROOT, model_name, tokens)}
        for each in sides.values():
            open_sides.callback(each.close)
        steps: dict[str, list[list[float]]] = {name: [] for name in sides}
        calls: dict[str, list[list[float]]] = {name: [] for name in sides}
        uses: dict[str, list[Any]] = {name: [] for name in sides}
        hosts: dict[str, list[Any]] = {name: [] for name in sides}
        for number in range(rounds + 2):  # the first two rounds touch memory
            for name in list(sides) if number % 2 else list(sides)[::-1]:
                steps[name].append(sides[name].ask("step"))
                calls[name].append(sides[name].ask("calls"))
                uses[name].append(sides[name].ask("uses"))
                hosts[name].append(sides[name].ask("host"))
    ratios = [now[0] / before[0] for now, before in zip(steps["now"][2:], steps["before"][2:], strict=True)]
    low, high = interval(ratios)
    micro = {
        name: [1e6 * statistics.median(values) for values in zip(*found[2:], strict=True)]
        for name, found in calls.items()
    }
    cases = [f"{home}, room for {room}" for home, room in STREAMED]
    of_uses = {name: medians(cases, found[2:]) for name, found in uses.items()}
    of_hosts = {name: medians(list(HOST), found[2:]) for name, found in hosts.items()}
    equal = [step[1] for step in steps["now"]] == [step[1] for step in steps["before"]]
    print(
        f"now / {revision} = {statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f} in {rounds} rounds"
    )
    for name, (call, gradient) in micro.items():
        print(f"hooks, {name}: {call:.1f} us per call of a module, {gradient:.1f} us per gradient")
        print_uses(of_uses[name], f"streamed, {name}, ")
        print_host(of_hosts[name], f"the host, {name}, ")
    print(f"losses equal: {equal}; to reach: a lower end of at most {WORST}")
    figures = {"microseconds": micro, "uses": of_uses, "host_ms": of_hosts, "losses equal": equal}
    return {"ratios": ratios, "low": low, "high": high, **figures}


def medians(cases: list[str], found: list[Any]) -> dict[str, list[float]]:
    """Return the medians of rounds, each of which has a list of figures per case."""
    return {
        case: [statistics.median(values) for values in zip(*(taken[number] for taken in found), strict=True)]
        for number, case in enumerate(cases)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model", default="real", help="as in bench/_common.py: real, tiny, large")
    parser.add_argument("--against", metavar="REV", help="compare with the engine of an earlier commit")
    parser.add_argument("--streamed", action="store_true", help="microseconds per use of layers that come for it")
    parser.add_argument("--host", action="store_true", help="milliseconds of the host for a model of tiny layers")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, two rounds")
    parser.add_argument("--serve", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.model, arguments.tokens)
        return
    if arguments.smoke:
        arguments.model, arguments.rounds, arguments.tokens = "tiny", 2, 64
    if arguments.against:
        result = compare(arguments.against, arguments.model, arguments.tokens, arguments.rounds)
        emit(arguments.json, result | {"against": arguments.against, "tokens": arguments.tokens})
        sys.exit(int(result["low"] > WORST))
    if arguments.streamed:
        found = streamed(arguments.rounds)
        print_uses(found, "from ")
        print(f"to reach: {STREAMED_US:.0f} us")
        emit(arguments.json, {"uses": found, "bound_us": STREAMED_US, "layers": LAYERS})
        return
    if arguments.host:
        found = of_the_host(arguments.rounds)
        print_host(found)
        emit(arguments.json, {"host_ms": found, "model": SMALL})
        return
    against_plain(arguments)


def against_plain(arguments: argparse.Namespace) -> None:
    """Compare with the plain loop."""
    model, vocabulary = load_model(arguments.model)
    rounds = arguments.rounds
    model.train()
    batch = made_batch(vocabulary, arguments.tokens)
    sides: dict[str, Callable[[dict[str, Any]], float]] = {
        "plain": PlainLoop(copy.deepcopy(model)).step,
        "engine": EngineLoop(model).step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            begin = time.perf_counter()
            losses[name].append(sides[name](batch))
            if number:  # the first round touches memory
                seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [engine / plain for engine, plain in zip(seconds["engine"], seconds["plain"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"plain {medians['plain']:.3f} s, engine {medians['engine']:.3f} s per step of {arguments.tokens} tokens")
    print(
        f"engine / plain = {ratio:.3f}, {min(ratios):.3f} to {max(ratios):.3f} in {rounds} rounds (to reach: 1.05); "
        f"losses equal: {losses['plain'] == losses['engine']}"
    )
    result = {"seconds": medians, "ratio": ratio, "ratios": ratios, "bound": 1.05, "losses": losses}
    emit(arguments.json, result | {"tokens": arguments.tokens})


if __name__ == "__main__":
    main()
