"""Fine-tunes a causal language model of Hugging Face through the engine.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import psutil
import torch
from torch import nn

from offload.activations.causal_loss import chunk_loss
from offload.activations.rss import trim_heap
from offload.checkpoint.format.folder import Folder, first_whole
from offload.cli.finetune.adapters import with_adapters
from offload.cli.finetune.data import Data, load_data
from offload.cli.finetune.logs import Log, evaluation_scalars, open_log, step_scalars
from offload.cli.finetune.packing import require_apart
from offload.cli.finetune.past import Past, checkpoints_of, refuse_another_run
from offload.cli.finetune.progress import LinkMeter, Progress, RssMeter
from offload.cli.finetune.report import MemoryReport, Report, StepRecord, perplexity, render, write_json, write_plot
from offload.cli.finetune.sequences import Batch, Sequences, orders
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.cli.finetune.stopping import Stop, Stopped
from offload.cli.models import load_tokenizer, quiet_transformers, read_causal_model, require_model
from offload.memory import machine
from offload.memory.device import Device
from offload.memory.devices import open_device
from offload.meta_models import compute_again, positions_of

if TYPE_CHECKING:
    from offload.checkpoint.pretrained import Weights
    from offload.engine import Engine


def learning_rate_factor(done: int, settings: Settings) -> float:
    """Return the factor on the learning rate after `done` steps: linear warm-up, then a cosine to a tenth."""
    if done < settings.warmup_steps:
        return (done + 1) / (settings.warmup_steps + 1)
    rest = max(1, settings.steps - settings.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (done - settings.warmup_steps) / rest)))


def evaluate(engine: Engine, sequences: Sequences, settings: Settings, device: torch.device) -> float:
    """Return the mean loss over the tokens that count; the engine is left in training mode."""
    engine.eval()
    total, targets = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(sequences), settings.batch_size):
            batch = sequences.batch(range(begin, min(begin + settings.batch_size, len(sequences))))
            total += float(engine(**batch.on(device)).loss) * batch.targets
            targets += batch.targets
    engine.train()
    return total / targets


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
    tokens: int
    meter: LinkMeter


def take_step(engine: Engine, batches: Sequence[Batch], device: torch.device) -> float:
    """Train on the micro-batches of one optimizer step; return the mean loss over the tokens that count.

    The engine divides by the number of micro-batches. So the loss of one with more tokens than others gets the weight
    that makes it a mean over the tokens of the step.
    """
    targets = sum(batch.targets for batch in batches)
    losses = []
    for batch in batches:
        loss = engine(**batch.on(device)).loss
        losses.append(loss.detach())
        weight = batch.targets * len(batches) / targets
        engine.backward(loss if weight == 1 else loss * weight)
        engine.step()
        del loss  # the graph holds the activations
    return sum(float(loss) * batch.targets for loss, batch in zip(losses, batches, strict=True)) / targets


def train(
    engine: Engine,
    data: Data,
    settings: Settings,
    progress: Progress,
    device: torch.device,
    *,
    log: Log,
    stop: Stop | None = None,
    past: Past | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Training:
    """Run the steps with evaluations before, between and after them; those of `past` have been taken already.

    Raises:
        Stopped: it was asked for; the step in progress was taken and saved first.
    """
    assert engine.optimizer is not None  # run() gives the engine one
    past = past or Past()
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: learning_rate_factor(done, settings))
    if past.schedule is not None:
        scheduler.load_state_dict(dict(past.schedule))
        for group in engine.optimizer.param_groups:  # making a scheduler has set the first rate
            group["lr"] = settings.lr * learning_rate_factor(past.done, settings)  # of as many steps as there are now
    order = orders(len(data.train), settings)
    for _ in range(past.done * settings.gradient_accumulation_steps):
        next(order)
    meter, due = LinkMeter(), settings.evaluated_after

    def evaluated(done: int, when: str) -> None:
        if data.held_out is None:
            return
        loss = evaluate(engine, data.held_out, settings, device)
        past.evaluations.append((done, loss))
        log.add(done, evaluation_scalars(loss))
        if done == settings.steps:
            progress.close()
        progress.note(f"held-out loss {loss:.4f} (perplexity {perplexity(loss):.2f}) {when}")

    if not past.evaluations:
        evaluated(0, "before training")
    trim_heap()  # sequences of growing length leave holes of every size
    engine.train()
    for number in range(past.done + 1, settings.steps + 1):
        before, begin = engine.stats(), clock()
        rate = float(engine.optimizer.param_groups[0]["lr"])
        batches = [data.train.batch(next(order)) for _ in range(settings.gradient_accumulation_steps)]
        mean = take_step(engine, batches, device)
        scheduler.step()
        if number in due:
            engine.drain()  # else a part of the step would count to the evaluation
        seconds = clock() - begin
        tokens = sum(batch.tokens for batch in batches)
        past.seconds += seconds
        past.tokens += tokens
        stats = engine.stats()
        past.steps.append(StepRecord(number, mean, engine.grad_norm, rate, seconds, tokens))
        progress.step(past.steps[-1], stats.used_bytes, meter.add(before, stats))
        log.add(number, step_scalars(past.steps[-1], before, stats))
        if number == settings.steps and settings.output is not None:  # the lanes behind it are no longer of steps
            losses = [(record.step, record.loss) for record in past.steps]
            engine.report(settings.output / "report.html", losses=losses)
        if number in due:
            evaluated(number, f"after step {number}")
            trim_heap()
        ends = stop is not None and stop.asked
        keep(engine, past, settings, data.digests, scheduler.state_dict(), progress, last=ends)
        if ends and number < settings.steps:
            progress.close()
            raise Stopped(_stopped(settings, number))
    return Training(past.steps, past.evaluations, past.seconds, past.tokens, meter)


def keep(
    engine: Engine,
    past: Past,
    settings: Settings,
    digests: Mapping[str, str],
    schedule: Mapping[str, Any],
    progress: Progress,
    *,
    last: bool,
) -> None:
    """Commit the step that was taken, or save a checkpoint, as the settings say; the `last` step in any case."""
    number = past.done
    last = last or number == settings.steps
    if settings.is_durable:
        engine.client_state = past.to_state(settings, digests, schedule, small=True)
    if settings.save_every and (number % settings.save_every == 0 or last):
        state = past.to_state(settings, digests, schedule)
        folder, count = checkpoints_of(settings), settings.keep_checkpoints
        if engine.config.background_checkpoints and not last:
            pending = engine.save_checkpoint(folder, client_state=state, keep=count, wait=False)
            progress.note(f"checkpoint {pending.path}, copied while training goes on")
        else:
            progress.note(f"checkpoint {engine.save_checkpoint(folder, client_state=state, keep=count)}")


def _stopped(settings: Settings, step: int) -> str:
    """Return what is said of a run that was told to end."""
    if settings.save_every:
        kept = "a checkpoint was saved; go on with --resume"
    elif settings.is_durable:
        kept = "it was committed; go on with --resume"
    else:
        kept = "nothing was saved: pass --save-every or --run-dir"
    return f"ended by SIGTERM after step {step} of {settings.steps}; {kept}"


def load_model(folder: Path, settings: Settings) -> tuple[nn.Module, Weights | None]:
    """Return a causal language model in its own dtype, for training; with adapters.

    Returns:
        The model, and where the values are of what is on the meta device.

    Raises:
        ConfigError: it cannot be loaded, or its loss cannot be chunked.
        FinetuneError: sequences are longer than its positions, or the adapters cannot be put on it.
    """
    read, weights = read_causal_model(folder)
    model: Any = read
    positions = positions_of(model)
    if positions is not None and settings.sequence_length > positions:
        raise FinetuneError(
            f"sequence_length: expected at most {positions}, the positions that {folder.name} has, but got "
            f"{settings.sequence_length}; take shorter sequences"
        )
    if settings.gradient_checkpointing:
        compute_again(model)
    if settings.chunked_loss:
        chunk_loss(model)
    return with_adapters(model, settings), weights


@contextlib.contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Let a model keep no keys and values for later tokens; its config is what it was behind that."""
    config = model.config.get_text_config()
    before = getattr(config, "use_cache", False)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before


def ram_budget(budget_bytes: Mapping[str, int], given: Mapping[Any, Any], device: Device) -> int | None:
    """Return the budgets of the tiers that live in RAM, None where one was not given."""
    needed = ("device", "cpu") if device.addressable else ("cpu",)
    return sum(budget_bytes[tier] for tier in needed) if all(tier in given for tier in needed) else None


def run(settings: Settings, *, stream: TextIO | None = None) -> Report:
    """Fine-tune as `settings` say, showing progress on `stream` (standard output).

    Returns:
        The report; it is also written to ``settings.output``, with a page of charts.

    Raises:
        FinetuneError: data or adapters cannot be used.
        OffloadError: of the engine: impossible budgets, unknown options, non-finite losses.
        Stopped: SIGTERM came while it trained. The step in progress was taken and saved first.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    import offload

    out = stream if stream is not None else sys.stdout
    refuse_another_run(settings)
    begin = time.perf_counter()
    options = offload.Config.load(
        settings.engine_options,
        max_grad_norm=settings.max_grad_norm,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        **_durable_options(settings),
    )
    given = options.budgets()
    tokenizer, data = _tokenized(settings)
    from transformers import AutoModelForCausalLM  # noqa: F401 (counts to the baseline)

    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
    meter = RssMeter()
    model, weights, parameters = _shown_model(settings, data, out)
    positions = positions_of(model)
    optimizer = offload.AdamW(lr=settings.lr, weight_decay=settings.weight_decay)
    engine = offload.Engine(model, optimizer, options, weights=weights)
    try:
        device = engine.device
        print(engine.plan, file=out, flush=True)
        end = tokenizer.eos_token_id

        length = settings.sample_tokens
        if positions is not None:
            length = min(length, positions + 1 - len(data.prompt))  # the last token is not read

        def sample() -> str:
            with without_cache(model):
                tokens = continue_text(engine, data.prompt, length, device, end)
            return str(tokenizer.decode(tokens))

        past = _past(engine, settings, data.digests, out)
        if settings.packing is True:
            with without_cache(model):
                require_apart(engine, settings.batch_size, device)
        if past.sample_before is None:
            past.sample_before = sample()
        trim_heap()
        done = past.done
        with (
            contextlib.closing(open_log(settings, done)) as log,
            contextlib.closing(Progress(out, steps=settings.steps)) as progress,
            Stop() as stop,
            without_cache(model),
        ):
            training = train(engine, data, settings, progress, device, log=log, stop=stop, past=past)
        stats = engine.stats()
        ram = ram_budget(stats.budget_bytes, given, open_device(device))
        memory = MemoryReport(meter.baseline_bytes, meter.peak_bytes(), ram)
        saved = _save(engine, tokenizer, settings) if settings.save_model else None
        report = Report(
            model=settings.model.name,
            parameters=parameters,
            tokens_per_step=round(training.tokens / settings.steps),
            steps=training.steps,
            evaluations=training.evaluations,
            prompt=str(tokenizer.decode(data.prompt.tolist())) if settings.sample_tokens else "",
            sample_before=past.sample_before,
            sample_after="",
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
        if settings.output is not None:
            write_json(report, settings.output / "report.json")  # what the last sample meets costs neither
        sample_after = sample()
    finally:
        meter.close()
        engine.close(restore=False)
    report = dataclasses.replace(report, sample_after=sample_after, total_seconds=time.perf_counter() - begin)
    print(f"\n{render(report)}", file=out)
    if settings.output is not None:
        write_report(report, settings.output, out)
        if saved is not None:
            print(f"{saved.name + ':':<7} {saved}", file=out)
    return report


def _durable_options(settings: Settings) -> dict[str, Any]:
    """Return what a durable run's engine is to look for."""
    if not settings.is_durable:
        return {}
    checkpoints = checkpoints_of(settings) if settings.resume and settings.output is not None else None
    return {"resume": settings.resume, "checkpoint_dir": checkpoints}


def _past(engine: Engine, settings: Settings, digests: Mapping[str, str], out: TextIO) -> Past:
    """Return what is over of the run: of a resumed one, what its last commit or its latest checkpoint has.

    Raises:
        CheckpointError, FinetuneError: there is none, or it is of another run.
    """
    if not settings.resume:
        return Past()
    if settings.is_durable:
        if engine.resumed is None:
            return Past()
        state = engine.resumed.client_state
    else:
        folder = Folder(checkpoints_of(settings))
        found = [folder.at(tag) for tag in reversed(folder.tags())]
        if not found and settings.resume is not True:
            return Past()
        state = first_whole(found, engine.load_checkpoint)[1] if found else engine.load_checkpoint(folder.path)
    past = Past.of_state(state, settings, digests)
    complete = ", and all are taken; ask for more with --steps" if past.done == settings.steps else ""
    print(f"resumed after step {past.done}{complete}", file=out, flush=True)
    return past


def _shown_model(settings: Settings, data: Data, out: TextIO) -> tuple[nn.Module, Weights | None, int]:
    """Return the model, its values, and how many parameters it has; says so, and what the data are."""
    with quiet_transformers():
        model, weights = load_model(settings.model, settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    first, *others = data.notes
    adapters = f", of which {trained} in adapters are trained" if settings.peft else ""
    print(f"{settings.model.name}: {parameters / 1e6:.1f} M parameters{adapters}; {first}", file=out)
    for note in others:
        print(note, file=out)
    return model, weights, parameters


def _tokenized(settings: Settings) -> tuple[Any, Data]:
    """Return the tokenizer, and the data as tokens."""
    require_model(settings.model)
    torch.manual_seed(settings.seed)
    tokenizer = load_tokenizer(settings.model, settings.chat_template)
    with quiet_transformers():
        return tokenizer, load_data(tokenizer, settings)


def _save(engine: Engine, tokenizer: Any, settings: Settings) -> Path:
    """Write the model, or its adapters alone, and the tokenizer; returns where to."""
    assert settings.output is not None  # the settings have checked it
    folder = settings.output / ("model" if settings.peft is None else "adapter")
    with quiet_transformers():
        engine.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def write_report(report: Report, folder: Path, out: TextIO) -> None:
    """Write the report and its plot into `folder`, and print where they are."""
    write_json(report, folder / "report.json")
    print(f"\nreport: {folder / 'report.json'}", file=out)
    if (folder / "report.html").is_file():  # a run that was complete leaves it as it was
        print(f"page:   {folder / 'report.html'}", file=out)
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
