"""What does a step cost where two processes train one model? Ours beside FSDP2 and DeepSpeed ZeRO-3, on CPUs over gloo.

Each contender is a pair of processes, one thread each, and all take turns within a round; of a model that is too large
for all to be there, stage 3 of ours and one other at a time. Figures are the slower rank's seconds per step, the
processors' seconds of both ranks, and each rank's peak of the resident set meanwhile. All train a Llama with the same
tokens, fp32 masters and moments, bf16 parameters in compute, AdamW, and clipping. They begin with the same values; the
losses of the last step stand beside the figures.

DeepSpeed has its own AdamW for CPUs, which it compiles at first use: here one process does so before all others. A
build that was killed leaves a lock in ``~/.cache/torch_extensions``, on which every later one waits: delete it.

To reach, as paired ratios of stage 3: 0.75 of FSDP2 with CPU offload, 0.9 of DeepSpeed, and the smallest peak. With
``--alone``, two more contenders are one process each: without a group, and as the only rank of one. Their paired ratio
has a 95 % interval; the bench fails if its lower end is above 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from _common import emit, load_model, vocabulary_size
from _paired import interval

WORLD = 2
WORST = 1.02  # the lower end of the interval of one rank over no group
SPEC = {"lr": 1e-4, "weight_decay": 0.1}
MODELS = {"medium": "26 M", "real": "135 M"}
PAIRED = ("real", "large")  # of which two contenders are there at a time: ten processes of 135 M take 20 GiB
OURS = {"ours, stage 1": 1, "ours, stage 2": 2, "ours, stage 3": 3}
ALONE = {"no group": None, "one rank": 1}
DEEPSPEED = "DeepSpeed ZeRO-3, cpu"
BASE = "ours, stage 3"
TO_REACH = {"FSDP2, CPU offload": 0.75, DEEPSPEED: 0.9}  # BASE over these
BUILD = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder({name!r}).load(verbose=False)"
OPS = ("CPUAdamBuilder", "ShareMemCommBuilder")
Step = Callable[[dict[str, Any]], float]


def stepping(engine: Any) -> Step:
    """Return a step of an engine, ours or DeepSpeed's: their calls have the same names."""

    def step(batch: dict[str, Any]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def ours(model: torch.nn.Module, stage: int | None) -> Step:
    """Return a step of the engine."""
    import offload

    memory = {"device": "12GiB", "cpu": "2GiB"}
    engine = offload.Engine(
        model, offload.AdamW(**SPEC), device="cpu", stage=stage, max_memory=memory, max_grad_norm=1.0, threads=1
    )
    return stepping(engine)


def fsdp2(model: torch.nn.Module, *, offloaded: bool) -> Step:
    """Return a step of FSDP2, with or without its CPU offload."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    model = model.float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy()
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **SPEC)

    def step(batch: dict[str, Any]) -> float:
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def deepspeed(model: torch.nn.Module) -> Step:
    """Return a step of DeepSpeed ZeRO-3 with parameters and states in host memory."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(torch.distributed.get_rank()))
    import deepspeed as library
    from _deepspeed_step import configuration

    largest = max(parameter.numel() for parameter in model.parameters())
    options = configuration("DeepSpeed, cpu", "", largest, 1.0)
    options |= {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": SPEC}}
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=options)
    return stepping(engine)


def build_ops() -> str | None:
    """Let DeepSpeed compile what it needs, in one process; returns why it cannot take part, None where it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    for name in OPS:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-c", BUILD.format(name=name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{name}: {done.stderr.strip().splitlines()[-1]}"
    return None


def contenders() -> dict[str, Callable[[torch.nn.Module], Step]]:
    """Return who takes part, with what makes a step of each."""
    found: dict[str, Callable[[torch.nn.Module], Step]] = {}
    for name, stage in {**OURS, **ALONE}.items():
        found[name] = lambda model, stage=stage: ours(model, stage)
    found["FSDP2"] = lambda model: fsdp2(model, offloaded=False)
    found["FSDP2, CPU offload"] = lambda model: fsdp2(model, offloaded=True)
    found[DEEPSPEED] = deepspeed
    return found


# --- a process of a contender -----------------------------------------------------------------------------------------


def serve(name: str, model_name: str, tokens: int, rank: int, port: int, pipe: Connection) -> None:
    """Take a step for each message, and send its seconds, loss and peak; the first message is why there is none."""
    torch.set_num_threads(1)
    if name != "no group":
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
        world = 1 if name in ALONE else WORLD
        prefixed = torch.distributed.PrefixStore(name, store)
        torch.distributed.init_process_group("gloo", store=prefixed, rank=rank, world_size=world)
    model, vocabulary = load_model(model_name)
    try:
        step = contenders()[name](model.train())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}".splitlines()[0])
        return
    random = torch.Generator().manual_seed(rank)
    pipe.send(None)
    number = 0
    while pipe.recv():
        ids = torch.randint(0, vocabulary, (1, tokens), generator=random)
        if number == 2:  # what was needed to begin is over
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        begin, worked = time.perf_counter(), time.process_time()
        loss = step({"input_ids": ids, "labels": ids, "use_cache": False})
        pipe.send((time.perf_counter() - begin, loss, peak_bytes(), time.process_time() - worked))
        number += 1


def peak_bytes() -> int:
    """Return the most that the resident set has been since it was reset."""
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(text.split("VmHWM:")[1].split()[0]) << 10
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class Contender:
    """The processes of one contender."""

    def __init__(self, context: Any, name: str, model: str, tokens: int, port: int) -> None:
        self._pipes, self._processes = list[Connection](), list[Any]()
        for rank in range(1 if name in ALONE else WORLD):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(name, model, tokens, rank, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.refusal: str | None = next(filter(None, [pipe.recv() for pipe in self._pipes]), None)

    def step(self) -> tuple[float, list[float], list[int], float]:
        """Take a step; returns its seconds, each rank's loss and peak, and the seconds of processors."""
        for pipe in self._pipes:
            pipe.send(True)
        found = [pipe.recv() for pipe in self._pipes]
        took, losses, peaks, worked = zip(*found, strict=True)
        return max(took), list(losses), list(peaks), sum(worked)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def server() -> Any:
    """Return what starts processes: a server that has imported everything forks them."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.llama", "offload.engine"])
    return context


# --- the comparison ---------------------------------------------------------------------------------------------------


def compare(model: str, tokens: int, rounds: int, names: Sequence[str]) -> dict[str, Any]:
    """Let those of these names take turns; returns the figures."""
    context = server()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.ExitStack() as opened:
        taking = dict[str, Contender]()
        for name in names:
            one = Contender(context, name, model, tokens, store.port)
            opened.callback(one.close)
            if one.refusal is not None:
                print(f"{name}: left out, {one.refusal}")
            else:
                taking[name] = one
        seconds: dict[str, list[float]] = {name: [] for name in taking}
        worked: dict[str, list[float]] = {name: [] for name in taking}
        losses: dict[str, list[float]] = {}
        peaks: dict[str, list[int]] = {}
        for number in range(rounds + 2):  # the first two rounds touch memory
            for name in list(taking) if number % 2 else list(taking)[::-1]:
                took, losses[name], peaks[name], cpu = taking[name].step()
                if number >= 2:
                    seconds[name].append(took)
                    worked[name].append(cpu)
    return {"seconds": seconds, "cpu_seconds": worked, "losses": losses, "peaks": peaks}


def show(model: str, result: Mapping[str, Any]) -> None:
    """Print the figures of one model."""
    seconds = result["seconds"]
    print(f"{model}: {MODELS.get(model, 'tiny')}, {vocabulary_size(model)} tokens known")
    print(f"  {'':<24}{'s/step':>9}{'cpu s':>8}  {'peaks, MiB':<16}losses")
    for name, values in seconds.items():
        peaks = " ".join(f"{peak / 2**20:.0f}" for peak in result["peaks"][name])
        losses = " ".join(f"{loss:.4f}" for loss in result["losses"][name])
        worked = statistics.median(result["cpu_seconds"][name])
        print(f"  {name:<24}{statistics.median(values):>9.3f}{worked:>8.3f}  {peaks:<16}{losses}")
    for name in seconds if BASE in seconds else ():
        if name != BASE and name not in ALONE:
            told = f"; to reach {TO_REACH[name]}" if name in TO_REACH else ""
            print(f"  {BASE} / {name} = {ratio(seconds, BASE, name)[0]}{told}")


def ratio(seconds: Mapping[str, list[float]], one: str, other: str) -> tuple[str, float]:
    """Return the paired ratio of two with its 95 % interval, as text, and the interval's lower end."""
    ratios = [mine / its for mine, its in zip(seconds[one], seconds[other], strict=True)]
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.3f}, 95 % interval {low:.3f} to {high:.3f}", low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="as in bench/_common.py")
    parser.add_argument("--stages", nargs="+", type=int, default=[1, 3], choices=(1, 2, 3), help="of ours")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=128, help="of each rank")
    parser.add_argument("--alone", action="store_true", help="one process with and without a group, behind the others")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, two rounds")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.models, arguments.rounds, arguments.tokens = ["tiny"], 2, 32
    missing = build_ops()
    if missing is not None:
        print(f"{DEEPSPEED}: left out, {missing}")
    left_out = {*ALONE, *(name for name, stage in OURS.items() if stage not in arguments.stages)}
    left_out |= set() if missing is None else {DEEPSPEED}
    names = [name for name in contenders() if name not in left_out]
    results, lows = dict[str, Any](), [0.0]
    for model in arguments.models:
        pairs = [[BASE, other] for other in names if other != BASE]
        for chosen in pairs if model in PAIRED and BASE in names else [names]:
            called = f"{model}, {chosen[-1]}" if len(chosen) < len(names) else model
            results[called] = compare(model, arguments.tokens, arguments.rounds, chosen)
            show(model, results[called])
        if arguments.alone:
            results[f"{model}, alone"] = compare(model, arguments.tokens, arguments.rounds, list(ALONE))
            text, low = ratio(results[f"{model}, alone"]["seconds"], "one rank", "no group")
            lows.append(low)
            print(f"  one rank / no group = {text}")
    emit(arguments.json, {"models": results, "tokens": arguments.tokens, "world": WORLD})
    sys.exit(int(not arguments.smoke and max(lows) > WORST))


if __name__ == "__main__":
    main()
