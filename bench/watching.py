"""What does it cost to be looked at? Microseconds of a span, a sample and a write, and the share of a step they take.

An engine on the CPU trains a small net. Each operation is timed alone, in batches, and the least mean counts: others
only add to it. The share follows from counts, not from clocks: spans that a step writes, and how often samples and
writes are due. ``bound_share`` is what samples and writes take at most of any second, however short the steps are
(to reach: 0.005).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _common import emit

import offload
from offload import watching
from offload.snapshot import take_sample
from offload.spans import Spans

WORST_SHARE = 0.005


def microseconds(call: Callable[[], object], times: int, rounds: int) -> float:
    """Return what one call takes."""
    least = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(times):
            call()
        least = min(least, (time.perf_counter() - begin) / times)
    return least * 1e6


def measured(times: int, rounds: int, folder: Path) -> dict[str, float]:
    """Return microseconds per operation, and the figures that follow from them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
    budgets = {"device": "24MiB", "cpu": "24MiB", "nvme": "64MiB"}
    options = {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": folder}
    with offload.Engine(model, offload.AdamW(lr=1e-3), device="cpu", max_memory=budgets, **options) as engine:
        x = torch.ones(64, 256)
        engine.trace(folder / "warm.json")
        for _ in range(4):
            before = sum(len(ring) for ring in engine._parts.counters.spans._rings.values())
            begin = time.perf_counter()
            engine.backward((engine(x) - 1).square().mean())
            engine.step()
            step_s = time.perf_counter() - begin
        spans_of_step = sum(len(ring) for ring in engine._parts.counters.spans._rings.values()) - before
        watch, manager, publisher = engine._watch, engine._life.require_open(), engine._watch._publisher
        assert publisher is not None
        sample = take_sample(engine._parts, manager, time.perf_counter())
        state = watch._state(sample, watching.Between.of(sample, sample))
        rings = Spans()
        run, seen = engine._parts.steps.run, watch._seen
        watch._publish_at_s = seen.sample_at_s = float("inf")  # nothing is due
        run.steps = seen.last_step = watching.EVERY_STEP  # nor a sample of the first steps

        def passes() -> None:
            watch.begins("forward")
            watch.passed("forward")

        def steps() -> None:
            run.steps += 1  # else it would be another run
            watch.stepped(1.0)

        found = {
            "span_us": microseconds(lambda: rings.add("h2d", "copy", 0.0, 1.0, 7), times, rounds),
            "wait_us": microseconds(lambda: rings.add_wait("parameters: a", 0.0, 1.0), times, rounds),
            "pass_us": microseconds(passes, times, rounds),
            "step_us": microseconds(steps, times, rounds),
            "sample_us": microseconds(lambda: take_sample(engine._parts, manager, 1.0), times // 10, rounds),
            "write_us": microseconds(lambda: publisher.write(state), times // 10, rounds),
        }
    sampled = found["sample_us"] * (1 / watching.SAMPLED_S + 1 / watching.PUBLISHED_S)
    found["bound_share"] = (sampled + found["write_us"] / watching.PUBLISHED_S) / 1e6
    own = found["span_us"] * spans_of_step + 2 * found["pass_us"] + found["step_us"]
    return found | {"spans_of_step": float(spans_of_step), "step_ms": step_s * 1e3, "own_us_of_step": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few calls")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = measured(*((100, 3) if arguments.smoke else (10_000, 20)), Path(folder))
    for name in ("span", "wait", "pass", "step", "sample", "write"):
        print(f"{name:<8}{result[f'{name}_us']:9.2f} us")
    print(
        f"samples and writes: at most {100 * result['bound_share']:.3f} % of any time (to reach: {WORST_SHARE:.1%}); "
        f"spans, passes and steps: {result['own_us_of_step']:.1f} us of a step of {result['step_ms']:.1f} ms"
    )
    emit(arguments.json, result)
    sys.exit(int(not arguments.smoke and result["bound_share"] > WORST_SHARE))


if __name__ == "__main__":
    main()
