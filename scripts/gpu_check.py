"""Checks the engine on this machine's GPU, and measures it: once, in at most ten minutes, into JSON and a page of text.

    python scripts/gpu_check.py --output gpu-check [--path DIR]

It runs the tests for a GPU, then measures the links between host and GPU, a step with everything on the
GPU beside plain PyTorch, whether placements have the same losses, what ``offload.plan`` predicts of steps, what becomes
of activations in each mode, and a Llama of 7 B with random weights whose states are in host memory, then on NVMe. A
profiler trace shows what overlaps. What does not fit the machine or the time is left out with the reason. Exits with 2
where there is no GPU, with 1 where a test or a comparison has failed.

``--device sim --smoke`` goes the same way with a tiny model on the simulated device of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
GIB = 1 << 30
NO_DEVICE = 2
HALF = 0.4  # of the free device memory, beside another engine and a model of plain PyTorch
SECTIONS = (
    *("machine", "tests", "links", "resident", "placement", "forecast", "activations"),
    *("states in host memory", "states on NVMe"),
)
LIMIT_S = 600.0
TESTS_LIMIT_S = 150.0
# Per bf16 parameter: itself 2, gradient 2, low half of the master 2, moments 8, or 4 with state_dtype="bfloat16".
ALL_BYTES, STATES_BYTES, SMALL_STATES_BYTES = 14, 10, 6


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured: shapes of Llama, tokens of a step, bytes of a copy, and how often."""

    large: dict[str, int]
    small: dict[str, int]
    tokens: int
    long_tokens: int
    copy_bytes: int
    rounds: int
    steps: int
    tests: tuple[str, ...]


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 8192, "vocab_size": 32000}
FULL = Size(
    large={"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, **_HEADS},  # 6.7 B
    small={"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, **_HEADS},
    tokens=1024,
    long_tokens=8192,
    copy_bytes=GIB,
    rounds=5,
    steps=3,
    tests=("tests/test_cuda.py",),
)
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
SMOKE = Size(
    large=_TINY,
    small=_TINY,
    tokens=8,
    long_tokens=64,
    copy_bytes=1 << 20,
    rounds=2,
    steps=2,
    tests=("tests/test_page_lock.py",),
)


class Check:
    """One run: where it computes, how large, what it has found so far."""

    def __init__(self, device: str, size: Size, path: Path, output: Path, only: Sequence[str] = ()) -> None:
        import torch

        self.torch = torch
        self.device = torch.device(device)
        self.module: Any = torch.get_device_module(self.device)
        self.size = size
        self.path = path
        self.output = output
        self.only = only
        self.begin = time.monotonic()
        self.failed: list[str] = []
        self.result: dict[str, Any] = {}

    def left_s(self) -> float:
        """Return the seconds that are left."""
        return LIMIT_S - (time.monotonic() - self.begin)

    def section(self, name: str, measure: Callable[[], Any], *, needs_s: float = 0.0) -> None:
        """Add what `measure` returns to the result, or why there is nothing."""
        if self.only and name not in ("machine", *self.only):
            return
        if self.left_s() < needs_s:
            self.result[name] = {
                "left out": f"{self.left_s():.0f} s are left of {LIMIT_S:.0f}, it may take {needs_s:.0f}"
            }
        else:
            begin = time.monotonic()
            try:
                gc.collect()
                if self.device.type != "cpu":
                    self.module.empty_cache()  # budgets are shares of what the driver has free
                self.result[name] = measure()
            except Exception as error:  # the other sections are of use without this one
                self.failed.append(name)
                self.result[name] = {"failed": f"{type(error).__name__}: {error}"}
            self.result[name]["seconds"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {json.dumps(self.result[name])}", flush=True)
        (self.output / "gpu-check.json").write_text(json.dumps(self.result, indent=2) + "\n")

    # --- what is there ----------------------------------------------------------------------------------------------

    def machine(self) -> dict[str, Any]:
        """Return what the figures are of."""
        free, total = self.module.mem_get_info(self.device)
        return {
            "device": self.module.get_device_name(self.device),
            "device bytes": total,
            "device bytes free": free,
            "host bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "cores": os.cpu_count(),
            "drive bytes free": shutil.disk_usage(self.path).free,
            "torch": self.torch.__version__,
            "cuda": self.torch.version.cuda,
            "python": platform.python_version(),
        }

    def tests(self) -> dict[str, Any]:
        """Run the tests; they set what makes CUDA's kernels repeat their bits."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *self.size.tests]
        limit_s = min(TESTS_LIMIT_S, self.left_s())
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired as late:
            text = late.stdout.decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            (self.output / "tests.txt").write_text(text)
            raise RuntimeError(f"the tests took more than {limit_s:.0f} s; tests.txt has what was there") from None
        (self.output / "tests.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            self.failed.append("tests")
        return {"exit": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}

    def links(self) -> dict[str, Any]:
        """Return GB/s of copies between page-locked memory and the device, each way and both at once."""
        torch, size = self.torch, self.size.copy_bytes
        host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        there = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        streams = [torch.Stream(self.device) for _ in range(2)]

        def copy(*directions: int) -> float:
            torch.accelerator.synchronize(self.device)
            begin = time.perf_counter()
            for way in directions:
                with streams[way]:
                    source, target = ((host, there), (there, host))[way]
                    target[way].copy_(source[way], non_blocking=True)
            torch.accelerator.synchronize(self.device)
            return time.perf_counter() - begin

        found: dict[str, list[float]] = {"h2d": [], "d2h": [], "both, per direction": []}
        copy(0, 1)
        for _ in range(self.size.rounds):
            for name, ways in zip(found, ((0,), (1,), (0, 1)), strict=True):
                found[name].append(size / copy(*ways) / 1e9)
        return {f"{name} GB/s": round(statistics.median(rates), 2) for name, rates in found.items()}

    # --- steps ------------------------------------------------------------------------------------------------------

    def llama(self, shape: dict[str, int], *, at: str = "cpu", checkpointing: bool = True) -> Any:
        """Return a Llama with random weights in bf16, without a hub."""
        import transformers

        torch = self.torch
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**shape, use_cache=False)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(at):
                model = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model.train()

    def batch(self, number: int, shape: dict[str, int], tokens: int | None = None) -> dict[str, Any]:
        """Return the tokens of a step on the device, with themselves as labels."""
        generator = self.torch.Generator().manual_seed(number)
        length = self.size.tokens if tokens is None else tokens
        ids = self.torch.randint(shape["vocab_size"], (1, length), generator=generator).to(self.device)
        return {"input_ids": ids, "labels": ids}

    def options(self, home: str, shape: dict[str, int], share: float = 0.9) -> dict[str, Any]:
        """Return the engine's options for parameters and states at `home`, in a share of the free device memory."""
        free = self.module.mem_get_info(self.device)[0]
        smoke = self.size is SMOKE
        memory: dict[str, Any] = {
            "device": "64MiB" if smoke else int(free * share),
            "cpu": "64MiB" if smoke else "96GiB",
        }
        options: dict[str, Any] = {"device": str(self.device), "max_memory": memory, "max_grad_norm": 1.0}
        if home == "all":
            return options
        if home == "device":
            return {**options, "offload_param": "none", "offload_optimizer": "cpu"}
        if home == "nvme":
            memory["nvme"] = "64MiB" if smoke else int(shutil.disk_usage(self.path).free * 0.9)
            memory["cpu"] = "32MiB" if smoke else "48GiB"
            options["nvme_path"] = self.path
            return {
                **options,
                "offload_param": "cpu" if shape is self.size.large and not smoke else "nvme",
                "offload_optimizer": "nvme",
            }
        return {**options, "offload_param": "cpu", "offload_optimizer": "cpu"}

    def steps(
        self, engine: Any, shape: dict[str, int], count: int, *, tokens: int | None = None, beside: Any = None
    ) -> Iterator[tuple[float, float]]:
        """Take steps, their forwards inside `beside()`; gives each one's loss and seconds, its updates included."""
        for number in range(count):
            batch = self.batch(number, shape, tokens)
            self.torch.accelerator.synchronize(self.device)
            begin = time.perf_counter()
            with contextlib.nullcontext() if beside is None else beside():
                loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            engine.drain()
            self.torch.accelerator.synchronize(self.device)
            yield float(loss.item()), time.perf_counter() - begin
            del loss

    def running(
        self, step: Callable[[dict[str, Any]], None], shape: dict[str, int], count: int, tokens: int | None = None
    ) -> float:
        """Return the seconds of one of `count` steps in succession, of which only the last one is waited for."""
        batches = [self.batch(number, shape, tokens) for number in range(count)]
        self.torch.accelerator.synchronize(self.device)
        begin = time.perf_counter()
        for batch in batches:
            step(batch)
        self.torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - begin) / len(batches)

    def plain_step(self, shape: dict[str, int]) -> Callable[[dict[str, Any]], None]:
        """Return a step of plain PyTorch that has all on the device: fp32 masters, clipped, by the fused AdamW."""
        torch = self.torch
        model = self.llama(shape, at=str(self.device))
        masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=self.device.type == "cuda")

        def step(batch: dict[str, Any]) -> None:
            model(**batch).loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad, parameter.grad = parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)

        return step

    @staticmethod
    def step_of(engine: Any) -> Callable[[dict[str, Any]], None]:
        """Return a step of an engine."""

        def step(batch: dict[str, Any]) -> None:
            engine.backward(engine(**batch).loss)
            engine.step()

        return step

    def resident(self) -> dict[str, Any]:
        """Return a step's seconds with all on the device, by the engine and by plain PyTorch, in turn.

        And those of an engine with states in host memory; of few tokens and of many.
        """
        from offload import AdamW, Engine

        shape, found = self.size.small, dict[str, Any]()
        everywhere = self.llama(shape, at=str(self.device)), self.llama(shape, at=str(self.device))
        with (
            Engine(everywhere[0], AdamW(lr=1e-4), **self.options("all", shape, HALF)) as engine,
            Engine(everywhere[1], AdamW(lr=1e-4), **self.options("device", shape, HALF)) as host,
        ):
            steps = {
                "plain": self.plain_step(shape),
                "engine": self.step_of(engine),
                "engine, states in host memory": self.step_of(host),
            }
            for tokens in (self.size.tokens, self.size.long_tokens):
                seconds: dict[str, list[float]] = {name: [] for name in steps}
                for _ in range(1 + self.size.rounds):
                    for name, step in steps.items():
                        seconds[name].append(self.running(step, shape, self.size.rounds, tokens))
                medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
                found[f"{tokens} tokens"] = {
                    **{f"{name} s": round(value, 4) for name, value in medians.items()},
                    "engine / plain": round(medians["engine"] / medians["plain"], 3),
                }
            (self.output / "plan-resident.txt").write_text(f"{engine.plan}\n")
        return found

    def placement(self) -> dict[str, Any]:
        """Compare the losses of placements: they must be equal, in kernels that repeat their bits."""
        from offload import AdamW, Engine

        losses: dict[str, list[float]] = {}
        self.torch.use_deterministic_algorithms(True, warn_only=self.device.type != "cuda")
        try:
            with self.torch.nn.attention.sdpa_kernel(self.torch.nn.attention.SDPBackend.MATH):
                for home in ("all", "device", "cpu", "nvme"):
                    model = self.llama(self.size.small, at=str(self.device))
                    with Engine(model, AdamW(lr=1e-4), **self.options(home, self.size.small)) as engine:
                        losses[home] = [loss for loss, _ in self.steps(engine, self.size.small, self.size.steps)]
        finally:
            self.torch.use_deterministic_algorithms(False)
        same = all(found == losses["cpu"] for found in losses.values())
        if not same:
            self.failed.append("placement")
        return {"same": same, "losses": losses}

    def forecast(self) -> dict[str, Any]:
        """Return the seconds of a step that the plan predicts, of this machine as measured, and those that it takes."""
        import offload

        shape, found = self.size.small, dict[str, Any]()
        for home in ("device", "cpu", "nvme"):
            options = self.options(home, shape)
            predicted = offload.plan(
                self.llama(shape, at="meta"),
                offload.AdamW(lr=1e-5),
                batch=(1, self.size.tokens),
                hardware="here",
                measure_again=not found,
                **options,
            )
            with offload.Engine(self.llama(shape, at=str(self.device)), offload.AdamW(lr=1e-5), **options) as engine:
                step = self.step_of(engine)
                self.running(step, shape, 2)
                before = engine.stats().links
                measured = self.running(step, shape, self.size.rounds)
                after = engine.stats().links
                (self.output / f"forecast-{home}.txt").write_text(f"{predicted}\n\n{engine.report()}\n")
            assert predicted.timing is not None
            found[home] = {
                "predicted s": round(predicted.timing.step_s, 4),
                "measured s": round(measured, 4),
                "predicted / measured": round(predicted.timing.step_s / measured, 3),
                "binds": predicted.timing.binding,
                "GB/s while busy": {
                    link: round(bytes_moved / (after[link].seconds - before[link].seconds) / 1e9, 1)
                    for link in after
                    if (bytes_moved := after[link].bytes - before[link].bytes)
                    and after[link].seconds > before[link].seconds
                },
            }
        return found

    def activations(self) -> dict[str, Any]:
        """Return a step's seconds and the device's peak in each mode, without checkpointing; losses must be equal."""
        import offload

        torch, shape, tokens = self.torch, self.size.small, self.size.long_tokens
        modes: dict[str, tuple[str, Any]] = {mode: (mode, None) for mode in ("keep", "offload", "recompute", "auto")}
        modes["save_on_cpu"] = ("keep", lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
        found, losses = dict[str, Any](), dict[str, list[float]]()
        kept = 0
        torch.use_deterministic_algorithms(True, warn_only=self.device.type != "cuda")
        try:
            for mode, (activations, beside) in modes.items():
                options = self.options("device", shape) | {"activations": activations}
                if mode in ("offload", "auto") and kept:
                    options["activation_memory"] = kept // 3
                model = self.llama(shape, at=str(self.device), checkpointing=False)
                with offload.Engine(model, offload.AdamW(lr=1e-5), **options) as engine:
                    list(self.steps(engine, shape, 2, tokens=tokens, beside=beside))
                    self.module.reset_peak_memory_stats(self.device)
                    before = self.module.memory_allocated(self.device)
                    seen = engine.stats().links
                    taken = list(self.steps(engine, shape, self.size.rounds, tokens=tokens, beside=beside))
                    peak = self.module.max_memory_allocated(self.device) - before
                    links = engine.stats().links
                    told = engine.report().activations
                kept = kept or peak
                losses[mode] = [loss for loss, _ in taken]
                found[mode] = {
                    "step s": round(statistics.median(seconds for _, seconds in taken), 4),
                    "device peak bytes": peak,
                    "d2h, h2d bytes": [(links[link].bytes - seen[link].bytes) // len(taken) for link in ("d2h", "h2d")],
                    "told": told,
                }
        finally:
            torch.use_deterministic_algorithms(False)
        same = all(one == losses["keep"] for one in losses.values())
        if not same:
            self.failed.append("activations")
        return {"same": same, **found, "losses": losses}

    def large(self, home: str) -> dict[str, Any]:
        """Return a step's seconds and bytes per link of the large model; states at `home`."""
        from offload import AdamW, Engine

        shape = self.size.large
        model = self.llama(shape, at="meta")
        count = sum(parameter.numel() for parameter in model.parameters())
        have, more = self.result["machine"], dict[str, Any]()
        room = have["host bytes" if home == "cpu" else "drive bytes free"] * 0.85
        needed = count * (ALL_BYTES if home == "cpu" else STATES_BYTES)
        if home == "nvme" and room < needed:
            more["state_dtype"], needed = "bfloat16", count * SMALL_STATES_BYTES
        if room < needed:
            return {"left out": f"it needs {needed / GIB:.0f} GiB, the machine has room for {room / GIB:.0f}"}
        with Engine(model, AdamW(lr=1e-5), **self.options(home, shape), **more) as engine:
            warm = list(self.steps(engine, shape, 1))
            before = {name: link.bytes for name, link in engine.stats().links.items()}
            taken = list(self.steps(engine, shape, self.size.steps))
            moved = {name: link.bytes - before[name] for name, link in engine.stats().links.items()}
            plan = str(engine.plan)
            if home == "cpu":
                self.trace(engine, shape)
        (self.output / f"plan-{home}.txt").write_text(plan + "\n")
        return {
            "parameters": count,
            **more,
            "losses": [loss for loss, _ in warm + taken],
            "step s": round(statistics.median(seconds for _, seconds in taken), 3),
            "bytes per step": {name: total // len(taken) for name, total in moved.items() if total},
        }

    def trace(self, engine: Any, shape: dict[str, int]) -> None:
        """Write a profiler trace of one step, which chrome://tracing and Perfetto show."""
        profiler = self.torch.profiler
        activities = [profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(profiler.ProfilerActivity.CUDA)
        with profiler.profile(activities=activities) as seen:
            list(self.steps(engine, shape, 1))
        seen.export_chrome_trace(str(self.output / "trace.json"))

    def run(self) -> int:
        """Go through all sections; returns the exit status."""
        self.section("machine", self.machine)
        self.section("tests", self.tests, needs_s=60)
        self.section("links", self.links)
        self.section("resident", self.resident, needs_s=60)
        self.section("placement", self.placement, needs_s=40)
        self.section("forecast", self.forecast, needs_s=60)
        self.section("activations", self.activations, needs_s=60)
        self.section("states in host memory", lambda: self.large("cpu"), needs_s=150)
        self.section("states on NVMe", lambda: self.large("nvme"), needs_s=150)
        text = page(self.result, self.failed)
        (self.output / "gpu-check.txt").write_text(text)
        print(text)
        return 1 if self.failed else 0


def page(result: dict[str, Any], failed: list[str]) -> str:
    """Return the result as a page of text."""
    lines = ["gpu check: " + (f"FAILED: {', '.join(failed)}" if failed else "passed"), ""]
    for name, section in result.items():
        lines.append(name)
        lines += [f"  {key}: {value}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def missing(device: str) -> str | None:
    """Return what is missing for `device` on this machine, None where it is there."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or sim for the simulated device of the tests")
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), help="folder for what is found")
    parser.add_argument("--path", type=Path, help="folder on the drive for the NVMe tier (default: the output)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: shows that the script runs")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        choices=SECTIONS,
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)} (default: all)",
    )
    given = parser.parse_args(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's libraries begin
    if given.device.startswith("sim"):
        sys.path.insert(0, str(TESTS))
        importlib.import_module("simulated").load()
    lacking = missing(given.device)
    if lacking is not None:
        print(f"gpu check: {lacking}; nothing was run (--device sim --smoke runs it without a GPU)", file=sys.stderr)
        return NO_DEVICE
    given.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.path or given.output) as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # what is measured of the machine is not the user's
        return Check(given.device, SMOKE if given.smoke else FULL, Path(folder), given.output, given.only).run()


if __name__ == "__main__":
    raise SystemExit(main())
