"""Fine-tunes a causal language model of Hugging Face on a text, through the engine.

Owns the run: training steps, held-out loss, samples before and after, the report. Knows the engine only by its public
face, so that the run is tested with a fake. Heavy libraries are imported where they are used. Next:
:mod:`offload.cli.finetune.report`; :mod:`offload.cli.finetune.settings` has the options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
import torch

from offload.activations.rss import trim_heap
from offload.checkpoint.format.folder import Folder
from offload.cli.finetune.past import Past, checkpoints_of
from offload.cli.finetune.progress import LinkMeter, Progress, RssMeter
from offload.cli.finetune.report import MemoryReport, Report, StepRecord, render, write_json, write_plot
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.cli.finetune.text import Windows, batches, make_windows, read_text
from offload.memory import machine
from offload.memory.device import Device
from offload.memory.devices import open_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from offload.engine import Engine


def learning_rate_factor(done: int, settings: Settings) -> float:
    """Return the factor on the learning rate after `done` steps: linear warm-up, then a cosine to a tenth."""
    if done < settings.warmup_steps:
        return (done + 1) / (settings.warmup_steps + 1)
    rest = max(1, settings.steps - settings.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (done - settings.warmup_steps) / rest)))


def evaluate(engine: Engine, windows: torch.Tensor, settings: Settings, device: torch.device) -> float:
    """Return the mean held-out loss; the engine is left in training mode."""
    engine.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(windows), settings.batch_size):
            tokens = windows[begin : begin + settings.batch_size].to(device)
            total += float(engine(input_ids=tokens, labels=tokens).loss) * len(tokens)
            count += len(tokens)
    engine.train()
    return total / count


def continue_text(
    engine: Engine, prompt: torch.Tensor, tokens: int, device: torch.device, stop: int | None
) -> list[int]:
    """Return up to `tokens` tokens that greedily continue `prompt` ((tokens,) int64); leaves training mode on."""
    engine.eval()
    sequence = prompt.to(device).unsqueeze(0)
    result: list[int] = []
    with torch.no_grad():
        for _ in range(tokens):
            following = int(engine(input_ids=sequence).logits[0, -1].argmax())
            if following == stop:
                break
            result.append(following)
            sequence = torch.cat([sequence, sequence.new_tensor([[following]])], dim=1)
    engine.train()
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """Outcome of :func:`train`."""

    steps: list[StepRecord]
    evaluations: list[tuple[int, float]]
    seconds: float
    meter: LinkMeter


def train(
    engine: Engine,
    windows: Windows,
    settings: Settings,
    progress: Progress,
    device: torch.device,
    *,
    past: Past | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Training:
    """Run the steps with evaluations before, between and after them; those of `past` have been taken already."""
    assert engine.optimizer is not None  # run() gives the engine one
    past = past or Past()
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: learning_rate_factor(done, settings))
    if past.schedule is not None:
        scheduler.load_state_dict(dict(past.schedule))
        for group, rate in zip(engine.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # making a scheduler has set the first one
    supply = batches(windows.train, settings, device)
    for _ in range(past.done * settings.gradient_accumulation_steps):
        next(supply)
    meter = LinkMeter()
    after = {round(settings.steps * (i + 1) / settings.evaluations) for i in range(settings.evaluations)}
    if not past.evaluations:
        loss = evaluate(engine, windows.held_out, settings, device)
        past.evaluations.append((0, loss))
        progress.note(f"held-out loss {loss:.4f} before training")
    trim_heap()  # sequences of growing length leave holes of every size
    engine.train()
    for number in range(past.done + 1, settings.steps + 1):
        before, begin = engine.stats(), clock()
        losses = []
        rate = float(engine.optimizer.param_groups[0]["lr"])
        for _ in range(settings.gradient_accumulation_steps):
            loss_tensor = engine(**next(supply)).loss
            losses.append(loss_tensor.detach())
            engine.backward(loss_tensor)
            engine.step()
            del loss_tensor  # the graph holds the activations
        scheduler.step()
        if number in after:
            engine.drain()  # else a part of the step would count to the evaluation
        mean = sum(float(value) for value in losses) / len(losses)
        seconds = clock() - begin
        past.seconds += seconds
        stats = engine.stats()
        binding = meter.add(before, stats)
        past.steps.append(StepRecord(number, mean, engine.grad_norm, rate, seconds))
        progress.step(past.steps[-1], stats.used_bytes, binding)
        if number in after:
            loss = evaluate(engine, windows.held_out, settings, device)
            past.evaluations.append((number, loss))
            trim_heap()
            if number == settings.steps:
                progress.close()
            progress.note(f"held-out loss {loss:.4f} after step {number}")
        if settings.is_durable:
            engine.client_state = past.to_state(settings, scheduler.state_dict(), small=True)
        if settings.save_every and (number % settings.save_every == 0 or number == settings.steps):
            state = past.to_state(settings, scheduler.state_dict())
            folder, keep = checkpoints_of(settings), settings.keep_checkpoints
            if engine.config.background_checkpoints and number < settings.steps:
                pending = engine.save_checkpoint(folder, client_state=state, keep=keep, wait=False)
                progress.note(f"checkpoint {pending.path}, copied while training goes on")
            else:
                progress.note(f"checkpoint {engine.save_checkpoint(folder, client_state=state, keep=keep)}")
    return Training(past.steps, past.evaluations, past.seconds, meter)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, offline.

    Raises:
        FinetuneError: the folder or its tokenizer is missing, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise FinetuneError("finetune: transformers is not installed; pip install 'offload[finetune]'") from error
    if not (folder / "config.json").is_file():
        raise FinetuneError(f"model {folder}: expected a folder with config.json, as save_pretrained writes it")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FinetuneError(f"model {folder}: its tokenizer cannot be loaded: {error}") from error
    return tokenizer


def load_model(folder: Path, settings: Settings) -> PreTrainedModel:
    """Load a causal language model in its own dtype, for training without a cache of keys and values.

    Raises:
        FinetuneError: it cannot be loaded.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError) as error:
        raise FinetuneError(f"model {folder}: cannot be loaded: {error}") from error
    model.config.use_cache = False
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep the progress bars of loading and saving off the run's own lines."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def ram_budget(budget_bytes: Mapping[str, int], given: Mapping[Any, Any], device: Device) -> int | None:
    """Return the budgets of the tiers that live in RAM, None where one was not given."""
    needed = ("device", "cpu") if device.addressable else ("cpu",)
    return sum(budget_bytes[tier] for tier in needed) if all(tier in given for tier in needed) else None


def run(settings: Settings, *, stream: TextIO | None = None) -> Report:
    """Fine-tune as `settings` say, showing progress on `stream` (standard output).

    Returns:
        The report; it is also written to ``settings.output``.

    Raises:
        FinetuneError: model or text cannot be used.
        OffloadError: of the engine: impossible budgets, unknown options, non-finite losses.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    import offload

    out = stream if stream is not None else sys.stdout
    begin = time.perf_counter()
    given = dict(settings.engine_options.get("max_memory") or {})
    options = offload.Config.load(
        settings.engine_options,
        max_grad_norm=settings.max_grad_norm,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        **_durable_options(settings),
    )
    tokenizer, windows = _tokenized(settings)
    from transformers import AutoModelForCausalLM  # noqa: F401 (counts to the baseline)

    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
    meter = RssMeter()
    model, parameters = _shown_model(settings, windows, out)
    engine = offload.Engine(
        model, optimizer=offload.AdamW(lr=settings.lr, weight_decay=settings.weight_decay), config=options
    )
    try:
        device = engine.device
        print(engine.plan, file=out, flush=True)
        stop = tokenizer.eos_token_id

        def sample() -> str:
            tokens = continue_text(engine, windows.prompt, settings.sample_tokens, device, stop)
            return str(tokenizer.decode(tokens))

        past = _past(engine, settings, out)
        if past.sample_before is None:
            past.sample_before = sample()
        trim_heap()
        done = past.done
        showing = Progress(out, steps=settings.steps, tokens_per_step=settings.tokens_per_step)
        with contextlib.closing(showing) as progress:
            training = train(engine, windows, settings, progress, device, past=past)
        sample_after = sample()
        stats = engine.stats()
        ram = ram_budget(stats.budget_bytes, given, open_device(device))
        memory = MemoryReport(meter.baseline_bytes, meter.peak_bytes(), ram)
        if settings.save_model and settings.output is not None:
            _save(engine, tokenizer, settings.output / "model")
    finally:
        meter.close()
        engine.close(restore=False)
    report = Report(
        model=settings.model.name,
        parameters=parameters,
        tokens_per_step=settings.tokens_per_step,
        steps=training.steps,
        evaluations=training.evaluations,
        prompt=str(tokenizer.decode(windows.prompt.tolist())) if settings.sample_tokens else "",
        sample_before=past.sample_before,
        sample_after=sample_after,
        train_seconds=training.seconds,
        total_seconds=time.perf_counter() - begin,
        memory=memory,
        peak_bytes=stats.peak_bytes,
        budget_bytes=stats.budget_bytes,
        links=training.meter.per_step(settings.steps - done),
        binding_link=training.meter.binding_link,
        settings=dataclasses.asdict(settings),
        machine=machine_of(open_device(device)),
    )
    print(f"\n{render(report)}", file=out)
    if settings.output is not None:
        write_report(report, settings.output, out)
        if settings.save_model:
            print(f"model:  {settings.output / 'model'}", file=out)
    return report


def _durable_options(settings: Settings) -> dict[str, Any]:
    """Return what a durable run's engine is to look for."""
    if not settings.is_durable:
        return {}
    checkpoints = checkpoints_of(settings) if settings.resume and settings.output is not None else None
    return {"resume": settings.resume, "checkpoint_dir": checkpoints}


def _past(engine: Engine, settings: Settings, out: TextIO) -> Past:
    """Return what is over of the run: of a resumed one, what its last commit or its latest checkpoint has.

    Raises:
        CheckpointError, FinetuneError: there is none, or it is of another run.
    """
    if settings.is_durable:
        if engine.resumed is None:
            return Past()
        state = engine.resumed.client_state
    elif settings.resume is True or (settings.resume and Folder(checkpoints_of(settings)).tags()):
        state = engine.load_checkpoint(checkpoints_of(settings))
    else:
        return Past()
    past = Past.of_state(state, settings)
    print(f"resumed after step {past.done}", file=out, flush=True)
    return past


def _shown_model(settings: Settings, windows: Windows, out: TextIO) -> tuple[PreTrainedModel, int]:
    """Return the model and how many parameters it has; says so."""
    with _quiet_transformers():
        model = load_model(settings.model, settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{settings.model.name}: {parameters / 1e6:.1f} M parameters; {len(windows.train)} windows of "
        f"{settings.sequence_length} tokens to train on, {len(windows.held_out)} held out",
        file=out,
    )
    return model, parameters


def _tokenized(settings: Settings) -> tuple[Any, Windows]:
    """Return the tokenizer, and the text in windows of tokens."""
    text = read_text(settings.text)
    torch.manual_seed(settings.seed)
    tokenizer = load_tokenizer(settings.model)
    with _quiet_transformers():
        windows = make_windows(lambda part: tokenizer(part, add_special_tokens=False)["input_ids"], text, settings)
    return tokenizer, windows


def _save(engine: Engine, tokenizer: Any, folder: Path) -> None:
    with _quiet_transformers():
        engine.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_report(report: Report, folder: Path, out: TextIO) -> None:
    """Write the report and its plot into `folder`, and print where they are."""
    write_json(report, folder / "report.json")
    print(f"\nreport: {folder / 'report.json'}", file=out)
    try:
        write_plot(report, folder / "loss.png")
        print(f"plot:   {folder / 'loss.png'}", file=out)
    except ImportError:
        print("plot:   left out: matplotlib is not installed; pip install 'offload[finetune]'", file=out)


def machine_of(device: Device) -> dict[str, Any]:
    """Return what the figures depend on."""
    import offload

    return {
        **machine.describe(),
        "offload": offload.__version__,
        "ram_bytes": psutil.virtual_memory().total,
        "device": f"{device.place.type}: {device.name()}",
    }
