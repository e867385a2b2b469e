"""Fine-tunes a causal language model of Hugging Face on a text, through the engine.

Owns the run: text to token windows, training steps with their progress line, held-out loss, samples before and after,
the report. Knows the engine only by its public face (:class:`Trainer`), so that the run is tested without one. Heavy
libraries are imported where they are used. Next: :mod:`offload.report`, and :mod:`offload.cli` for the command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import psutil
import torch

from offload.errors import OffloadError
from offload.report import (
    LinkReport,
    MemoryReport,
    Report,
    StepRecord,
    duration_text,
    render,
    size_text,
    write_json,
    write_plot,
)
from offload.stats import Stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PLAIN_LINE_EVERY_S = 5.0


class FinetuneError(OffloadError):
    """The run cannot start or go on; the text says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of a run.

    Attributes:
        model: folder of the model and its tokenizer.
        text: UTF-8 file to train on.
        output: folder for ``report.json`` and ``loss.png``; None writes neither.
        save_model: also write the trained model to ``output/model``.
        steps: optimizer steps.
        sequence_length: tokens per sequence.
        batch_size: sequences per micro-batch.
        gradient_accumulation_steps: micro-batches per optimizer step.
        lr, weight_decay, max_grad_norm: of AdamW; the learning rate warms up over `warmup_steps`, then falls as a
            cosine to a tenth.
        held_out: share of the text, at its end, that is not trained on.
        evaluation_sequences: sequences of the held-out text in one evaluation.
        evaluations: evaluations after the first, evenly over the run.
        sample_tokens: tokens of the sample continuation; 0 takes no samples.
        prompt: text to continue; None takes the beginning of a held-out paragraph.
        gradient_checkpointing: recompute activations in backward instead of keeping them.
        seed: of the order of the training windows and of dropout.
        engine_options: further options of :class:`offload.Config`.
    """

    model: Path
    text: Path
    output: Path | None = None
    save_model: bool = False
    steps: int = 100
    sequence_length: int = 512
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    lr: float = 2e-5
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 5
    held_out: float = 0.05
    evaluation_sequences: int = 8
    evaluations: int = 3
    sample_tokens: int = 40
    prompt: str | None = None
    gradient_checkpointing: bool = False
    seed: int = 0
    engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {getattr(self, name)}")
        for name in ("evaluation_sequences", "evaluations"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {getattr(self, name)}")
        if self.sequence_length < 2:
            raise FinetuneError("sequence_length: a sequence of one token has no next token; use at least 2")
        if not 0 < self.held_out < 1:
            raise FinetuneError(f"held_out: expected a share in (0, 1) but got {self.held_out}")
        if self.sample_tokens < 0 or self.warmup_steps < 0:
            raise FinetuneError("sample_tokens and warmup_steps: expected whole numbers >= 0")
        if self.save_model and self.output is None:
            raise FinetuneError("save_model: no output folder is given")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.batch_size * self.gradient_accumulation_steps


class Trainer(Protocol):
    """The part of :class:`offload.Engine` that a run uses."""

    optimizer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""

    def backward(self, loss: torch.Tensor) -> Any:
        """Run backward."""

    def step(self) -> Any:
        """Update the parameters at an accumulation boundary."""

    def train(self, mode: bool = True) -> Any:
        """Switch to training mode."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def stats(self) -> Stats:
        """Return the counters."""

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Write the model in Hugging Face's format."""

    def close(self, *, restore: bool | None = None) -> None:
        """Give back everything."""

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the last step, if known."""

    @property
    def plan(self) -> Any:
        """The plan, a printable table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Windows:
    """Token windows of a text, cut without overlap.

    Attributes:
        train: (windows, sequence_length) int64, HOST.
        held_out: (evaluation_sequences or fewer, sequence_length) int64, HOST.
        prompt: (tokens,) int64, HOST: beginning of a held-out paragraph.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    prompt: torch.Tensor


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FinetuneError: it cannot be read, is not UTF-8 or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FinetuneError(
            f"text {path}: expected UTF-8 but byte {error.start} does not fit; convert it first, for example: "
            "iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise FinetuneError(f"text {path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise FinetuneError(f"text {path}: is empty")
    return text


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """Return the part to train on and the held-out rest, cut between paragraphs where there are any."""
    cut = int(len(text) * (1 - held_out))
    boundary = text.find("\n\n", cut)
    if boundary != -1 and boundary < len(text) - (len(text) - cut) // 2:
        cut = boundary + 2
    return text[:cut], text[cut:]


def make_windows(encode: Callable[[str], Sequence[int]], text: str, settings: Settings) -> Windows:
    """Tokenise `text` and cut it into windows; held-out windows are spread evenly over the held-out part.

    Raises:
        FinetuneError: the text is too short for one window of each kind.
    """
    train_text, held_text = split_text(text, settings.held_out)
    length = settings.sequence_length
    train, held = list(encode(train_text)), list(encode(held_text))
    counts = len(train) // length, len(held) // length
    if min(counts) < 1:
        raise FinetuneError(
            f"text: expected at least {length} tokens to train on and {length} held out (sequence_length) but got "
            f"{len(train)} and {len(held)}; take a longer text, or a shorter sequence_length"
        )
    train_windows = torch.tensor(train[: counts[0] * length]).view(-1, length)
    held_windows = torch.tensor(held[: counts[1] * length]).view(-1, length)
    wanted = min(settings.evaluation_sequences, counts[1])
    chosen = torch.linspace(0, counts[1] - 1, wanted).round().long()
    prompt = settings.prompt if settings.prompt is not None else first_sentences(held_text)
    return Windows(train_windows, held_windows[chosen], torch.tensor(list(encode(prompt)) or train[:1]))


def first_sentences(text: str, *, words: int = 24) -> str:
    """Return the first words of the first paragraph of `text` that has twice as many, or of the text."""
    for paragraph in text.split("\n\n"):
        parts = paragraph.split()
        if len(parts) >= 2 * words:
            return " ".join(parts[:words])
    return " ".join(text.split()[:words])


def batches(windows: torch.Tensor, settings: Settings, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches for ever: every window once per epoch, in an order drawn from the seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while True:
        while len(order) < settings.batch_size:
            order.extend(torch.randperm(len(windows), generator=generator).tolist())
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        tokens = windows[chosen].to(device)
        yield {"input_ids": tokens, "labels": tokens}


def learning_rate_factor(done: int, settings: Settings) -> float:
    """Return the factor on the learning rate after `done` steps: linear warm-up, then a cosine to a tenth."""
    if done < settings.warmup_steps:
        return (done + 1) / (settings.warmup_steps + 1)
    rest = max(1, settings.steps - settings.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (done - settings.warmup_steps) / rest)))


def evaluate(engine: Trainer, windows: torch.Tensor, settings: Settings, device: torch.device) -> float:
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
    engine: Trainer, prompt: torch.Tensor, tokens: int, device: torch.device, stop: int | None
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


class Progress:
    """Shows one line per step: rewritten in place on a terminal, else a plain line every few seconds."""

    def __init__(self, stream: TextIO, *, steps: int, tokens_per_step: int) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._shown_at: float | None = None
        self._width = 0
        self._seconds = 0.0  # an exponential mean of the step time

    def step(self, record: StepRecord, used_bytes: Mapping[str, int], binding_link: str) -> None:
        """Show a finished step."""
        weight = 1.0 if record.step <= 2 else 0.2  # the first step warms up
        self._seconds += weight * (record.seconds - self._seconds)
        now = time.monotonic()
        last = record.step == self._steps
        due = self._shown_at is None or now - self._shown_at >= PLAIN_LINE_EVERY_S
        if not (self._live or last or due):
            return
        self._shown_at = now
        tiers = "  ".join(f"{tier} {size_text(size)}" for tier, size in used_bytes.items())
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:.4f}",
            f"{self._tokens_per_step / max(self._seconds, 1e-9):.0f} tokens/s",
            tiers,
            f"bound by {binding_link}",
        ]
        if not last:
            parts.append(f"{duration_text(self._seconds * (self._steps - record.step))} left")
        self._show(" | ".join(parts))

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._clear()
        print(text, file=self._stream, flush=True)

    def end(self) -> None:
        """Leave the last live line standing."""
        if self._live and self._width:
            print(file=self._stream, flush=True)
            self._width = 0

    def _show(self, line: str) -> None:
        if not self._live:
            print(line, file=self._stream, flush=True)
            return
        line = line[: max(20, shutil.get_terminal_size().columns - 1)]
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(line)

    def _clear(self) -> None:
        if self._live and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream)
            self._width = 0


class LinkMeter:
    """Adds up what the links carried between pairs of snapshots, so that evaluations are left out."""

    def __init__(self) -> None:
        self.size_bytes: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def add(self, before: Stats, after: Stats) -> str:
        """Count what happened between two snapshots; return the link that was busy longest between them."""
        busy: dict[str, float] = {}
        for name, link in after.links.items():
            busy[name] = link.seconds - before.links[name].seconds
            self.size_bytes[name] = self.size_bytes.get(name, 0) + link.bytes - before.links[name].bytes
            self.seconds[name] = self.seconds.get(name, 0.0) + busy[name]
        return max(busy, key=busy.__getitem__)

    @property
    def binding_link(self) -> str:
        """The link that was busy longest over all."""
        return max(self.seconds, key=self.seconds.__getitem__) if self.seconds else "compute"

    def per_step(self, steps: int) -> dict[str, LinkReport]:
        """Return means per step."""
        count = max(1, steps)
        return {name: LinkReport(self.size_bytes[name] / count, self.seconds[name] / count) for name in self.seconds}


class RssMeter:
    """Highest resident memory of this process from construction on; `baseline_bytes` is what it was then.

    The kernel's own high-water mark where it can be reset, else a sampling thread.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.baseline_bytes: int = self._process.memory_info().rss
        self._peak_bytes = self.baseline_bytes
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self._thread = threading.Thread(target=self._sample, name="rss-meter", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        """Return the highest resident memory so far."""
        if self._thread is None:
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    self._peak_bytes = max(self._peak_bytes, int(line.split()[1]) * 1024)
        else:
            self._peak_bytes = max(self._peak_bytes, self._process.memory_info().rss)
        return self._peak_bytes

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """Outcome of :func:`train`."""

    steps: list[StepRecord]
    evaluations: list[tuple[int, float]]
    seconds: float
    meter: LinkMeter


def train(
    engine: Trainer,
    windows: Windows,
    settings: Settings,
    progress: Progress,
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Training:
    """Run the steps with evaluations before, between and after them."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda done: learning_rate_factor(done, settings))
    supply = batches(windows.train, settings, device)
    records: list[StepRecord] = []
    meter = LinkMeter()
    after = {round(settings.steps * (i + 1) / settings.evaluations) for i in range(settings.evaluations)}
    loss = evaluate(engine, windows.held_out, settings, device)
    evaluations = [(0, loss)]
    _give_back_memory()
    progress.note(f"held-out loss {loss:.4f} before training")
    spent = 0.0
    engine.train()
    for number in range(1, settings.steps + 1):
        before, begin = engine.stats(), clock()
        losses = []
        rate = float(scheduler.get_last_lr()[0])
        for _ in range(settings.gradient_accumulation_steps):
            loss_tensor = engine(**next(supply)).loss
            losses.append(loss_tensor.detach())
            engine.backward(loss_tensor)
            engine.step()
            del loss_tensor  # the graph holds the activations
        scheduler.step()
        mean = sum(float(value) for value in losses) / len(losses)
        seconds = clock() - begin
        spent += seconds
        stats = engine.stats()
        binding = meter.add(before, stats)
        records.append(StepRecord(number, mean, engine.grad_norm, rate, seconds))
        progress.step(records[-1], stats.used_bytes, binding)
        if number in after:
            loss = evaluate(engine, windows.held_out, settings, device)
            evaluations.append((number, loss))
            _give_back_memory()
            if number == settings.steps:
                progress.end()
            progress.note(f"held-out loss {loss:.4f} after step {number}")
    return Training(records, evaluations, spent, meter)


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


def _give_back_memory() -> None:
    """Ask the C library for the pages of freed tensors: sequences of growing length leave holes of every size."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def ram_budget(budget_bytes: Mapping[str, int], given: Mapping[Any, Any], device: torch.device) -> int | None:
    """Return the budgets of the tiers that live in RAM, None where one was not given."""
    needed = ("device", "cpu") if device.type == "cpu" else ("cpu",)
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
    )
    text = read_text(settings.text)
    torch.manual_seed(settings.seed)
    tokenizer = load_tokenizer(settings.model)
    with _quiet_transformers():
        windows = make_windows(lambda part: tokenizer(part, add_special_tokens=False)["input_ids"], text, settings)
    from transformers import AutoModelForCausalLM  # noqa: F401 (counts to the baseline)

    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
    meter = RssMeter()
    with _quiet_transformers():
        model = load_model(settings.model, settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{settings.model.name}: {parameters / 1e6:.1f} M parameters; {len(windows.train)} windows of "
        f"{settings.sequence_length} tokens to train on, {len(windows.held_out)} held out",
        file=out,
    )
    engine = offload.Engine(
        model, optimizer=offload.AdamW(lr=settings.lr, weight_decay=settings.weight_decay), config=options
    )
    try:
        device = engine.device
        print(engine.plan, file=out, flush=True)
        stop = tokenizer.eos_token_id
        samples = []
        progress = Progress(out, steps=settings.steps, tokens_per_step=settings.tokens_per_step)

        def sample() -> None:
            if settings.sample_tokens:
                tokens = continue_text(engine, windows.prompt, settings.sample_tokens, device, stop)
                samples.append(str(tokenizer.decode(tokens)))

        sample()
        _give_back_memory()
        training = train(engine, windows, settings, progress, device)
        sample()
        stats = engine.stats()
        memory = MemoryReport(meter.baseline_bytes, meter.peak_bytes(), ram_budget(stats.budget_bytes, given, device))
        if settings.save_model and settings.output is not None:
            with _quiet_transformers():
                engine.save_pretrained(settings.output / "model")
                tokenizer.save_pretrained(settings.output / "model")
    finally:
        meter.close()
        engine.close(restore=False)
    report = Report(
        model=settings.model.name,
        parameters=parameters,
        tokens_per_step=settings.tokens_per_step,
        steps=training.steps,
        evaluations=training.evaluations,
        prompt=str(tokenizer.decode(windows.prompt.tolist())) if samples else "",
        sample_before=samples[0] if samples else "",
        sample_after=samples[1] if samples else "",
        train_seconds=training.seconds,
        total_seconds=time.perf_counter() - begin,
        memory=memory,
        peak_bytes=stats.peak_bytes,
        budget_bytes=stats.budget_bytes,
        links=training.meter.per_step(settings.steps),
        binding_link=training.meter.binding_link,
        settings=dataclasses.asdict(settings),
        machine=machine(device),
    )
    print(f"\n{render(report)}", file=out)
    if settings.output is not None:
        write_json(report, settings.output / "report.json")
        print(f"\nreport: {settings.output / 'report.json'}", file=out)
        try:
            write_plot(report, settings.output / "loss.png")
            print(f"plot:   {settings.output / 'loss.png'}", file=out)
        except ImportError:
            print("plot:   left out: matplotlib is not installed; pip install 'offload[finetune]'", file=out)
        if settings.save_model:
            print(f"model:  {settings.output / 'model'}", file=out)
    return report


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on."""
    import offload

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "offload": offload.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "ram_bytes": psutil.virtual_memory().total,
        "device": f"{device.type}: {name}",
    }
