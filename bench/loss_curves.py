"""Do optimizer states in fewer than 32 bits train a real model as well?

Fine-tunes the real 135 M model on the real text, with the same windows in the same order, once with each state format
and once in a plain PyTorch loop with fp32 masters; the four take turns step by step. Prints the held-out losses, writes
every training loss as JSON and both as a plot. docs/numerics.md has the plot of 1000 steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import emit, load_model, model_directory, plain_step, text_file, text_windows

import offload
from offload.cli.finetune.run import learning_rate_factor
from offload.cli.finetune.sequences import Cut, orders
from offload.cli.finetune.settings import Settings
from offload.cli.finetune.text import Windows

PLAIN = "plain PyTorch, fp32 masters"
FORMATS = {"float32 states (exact)": "float32", "bfloat16 states": "bfloat16", "int8 states": "int8"}
CPU = torch.device("cpu")
SMOOTH = 51  # steps under the running median of the plot
Step = Callable[[dict[str, torch.Tensor]], float]


def offloaded(model: torch.nn.Module, settings: Settings, state_dtype: str) -> Step:
    """Return a step through the engine, everything on the device."""
    engine = offload.Engine(
        model,
        offload.AdamW(lr=settings.lr, weight_decay=settings.weight_decay),
        device="cpu",
        max_memory={"device": "6GiB", "cpu": "512MiB"},
        max_grad_norm=settings.max_grad_norm,
        state_dtype=state_dtype,
    )
    rates = scheduler(engine.optimizer, settings)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        rates.step()
        return float(loss.detach())

    return step


def plain(model: torch.nn.Module, settings: Settings) -> Step:
    """Return a step of torch alone."""
    options = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    take, optimizer = plain_step(model, settings.max_grad_norm or float("inf"), **options)
    rates = scheduler(optimizer, settings)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = take(batch)
        rates.step()
        return loss

    return step


def scheduler(optimizer: Any, settings: Settings) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the learning rates of a fine-tuning run."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: learning_rate_factor(done, settings))


def held_out_loss(model: torch.nn.Module, windows: Windows) -> float:
    """Return the mean loss of the held-out windows."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in windows.held_out]
    model.train()
    return statistics.fmean(losses)


def random_windows(vocabulary: int, settings: Settings) -> Windows:
    """Return windows for a model without a tokenizer."""
    ids = torch.randint(0, vocabulary, (12, settings.sequence_length), generator=torch.Generator().manual_seed(0))
    return Windows(ids[:8], ids[8:], ids[0, :4])


def plot(path: str, losses: dict[str, list[float]], held_out: dict[str, list[tuple[int, float]]]) -> None:
    """Draw the running medians of the training losses, and the held-out losses."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=False)
    for (name, values), style in zip(losses.items(), ("-", "--", "-.", ":"), strict=True):
        half = SMOOTH // 2
        middle = [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
        axes[0].plot(range(1, len(values) + 1), middle, style, label=name, linewidth=1.4)
        axes[1].plot(*zip(*held_out[name], strict=True), style, marker="o", markersize=3, label=name, linewidth=1.4)
    axes[0].set_title(f"training, running median of {SMOOTH} steps", fontsize=10)
    axes[1].set_title("held out", fontsize=10)
    for one in axes:
        one.set_xlabel("optimizer step")
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss (nats per token)")
    axes[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def turns(settings: Settings, *, tiny: bool) -> Iterator[tuple[int, dict[str, float], dict[str, float] | None]]:
    """Yield per step its number, each contender's loss, and where it is due each one's held-out loss."""
    models, steps = {}, {}
    for name in (PLAIN, *FORMATS):
        model, vocabulary = load_model("tiny" if tiny else "real")
        models[name] = model.train()
        steps[name] = plain(model, settings) if name == PLAIN else offloaded(model, settings, FORMATS[name])
    if tiny:
        windows = random_windows(vocabulary, settings)
    else:
        windows = text_windows(settings)
    due = {0, *settings.evaluated_after}
    train = Cut(windows.train)
    order = orders(len(train), settings)
    for number in range(settings.steps + 1):
        batch = train.batch(next(order)).inputs if number else {}
        losses = {name: step(batch) for name, step in steps.items()} if number else {}
        yield number, losses, {n: held_out_loss(m, windows) for n, m in models.items()} if number in due else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--text", type=Path, default=text_file())
    parser.add_argument("--plot", help="write the plot here")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, a few steps")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.tokens = 4, 16
    elif not (model_directory().exists() and arguments.text.exists()):
        sys.exit(f"{model_directory()} and {arguments.text}: expected the real model and text; run make finetune first")
    settings = Settings(
        model=model_directory(),
        data=arguments.text,
        steps=arguments.steps,
        sequence_length=arguments.tokens,
        lr=arguments.lr,
        warmup_steps=min(50, arguments.steps // 10),
        evaluation_sequences=16,
        evaluations=min(10, arguments.steps),
    )
    losses: dict[str, list[float]] = {name: [] for name in (PLAIN, *FORMATS)}
    held_out: dict[str, list[tuple[int, float]]] = {name: [] for name in losses}
    print("held out   " + "".join(f"{name:>30}" for name in losses), flush=True)
    for number, each, evaluated in turns(settings, tiny=arguments.smoke):
        for name, loss in each.items():
            losses[name].append(loss)
        if evaluated is not None:
            for name, loss in evaluated.items():
                held_out[name].append((number, loss))
            print(f"step {number:<6}" + "".join(f"{loss:>30.4f}" for loss in evaluated.values()), flush=True)
    result = {"tokens": arguments.tokens, "lr": arguments.lr, "losses": losses, "held_out": held_out}
    emit(arguments.json, result)
    if arguments.plot:
        plot(arguments.plot, losses, held_out)


if __name__ == "__main__":
    main()
