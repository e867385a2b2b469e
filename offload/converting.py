"""Writes what another program has saved of a run as a checkpoint of this one, without an engine and without training.

Owns what such a checkpoint says that the other program did not: the optimizer's class, the dtypes, what begins anew.
Tensors pass through a few buffers, range by range; what fits is decided by :mod:`offload.importing`. Next:
:mod:`offload.checkpoint.format.folder`, where a checkpoint gets its name.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.columns import FILE_BYTES, MASTER, PARAMETER, Column, columns_of
from offload.checkpoint.foreign.found import Facts, Found
from offload.checkpoint.foreign.opening import open_foreign
from offload.checkpoint.foreign.torch_files import NamesError
from offload.checkpoint.format.folder import Folder, check_tag
from offload.checkpoint.format.index import Entry, Index, Range, StoredFile
from offload.checkpoint.format.nested import Encoder
from offload.checkpoint.format.safetensors import ITEMSIZES, Member
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.format.writer import FileWriter
from offload.checkpoint.saving import write_values
from offload.checkpoint.sources import PIECE_NUMEL, Source, elements, numel_of, on_cpu, whole
from offload.errors import CheckpointError, ConfigError
from offload.importing import Fitting, Names, fit
from offload.kernels import cpu_adam
from offload.kernels.optimizers import SGD, Adagrad, Adam, AdamW, Lion
from offload.kernels.ranges import StateKind
from offload.optim.rules import Rule, rule_of
from offload.planning.roles import States
from offload.planning.units import Unit, lay_out
from offload.spec import OptimizerSpec

OPTIMIZERS: dict[str, type[OptimizerSpec]] = {kind.__name__.lower(): kind for kind in (AdamW, Adam, SGD, Adagrad, Lion)}
DEADLINE_S = 600.0  # of one transfer: a slow drive is no error
_DTYPES = ("float32", "bfloat16", "float16")  # that are trained

Groups = Sequence[Sequence[str]]  # names of parameters


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """What was written.

    Attributes:
        path: of the checkpoint.
        index: of it.
        kind: what it was before.
        left_out: small facts that cannot be kept, with the reason.
    """

    path: Path
    index: Index
    kind: str
    left_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Optimizer:
    """What :mod:`offload.importing` asks of an optimizer."""

    param_groups: Sequence[Mapping[str, Any]]
    rule: Rule
    is_adamw: bool
    name: str


def convert(
    source: Path,
    model: nn.Module,
    directory: Path,
    *,
    guesses: Iterable[Groups] = (),
    optimizer: str | None = None,
    weights_only: bool = False,
    tag: str | None = None,
) -> Conversion:
    """Write a checkpoint of another program as one that ``engine.load_checkpoint`` loads.

    Args:
        source: what :func:`open_foreign` takes.
        model: with the names, shapes, dtypes and frozen parameters of the engine's; it may be on the meta device.
        directory: of checkpoints.
        guesses: param groups to be tried where the source numbers parameters, behind all trained ones in one group.
        optimizer: one of :data:`OPTIMIZERS`; None goes by the names of the states.
        weights_only: leave the optimizer out.
        tag: name of the checkpoint; None makes one of the number of steps.

    Raises:
        ConfigError: the source is no checkpoint, is damaged, or does not fit the model or the optimizer.
        CheckpointError: there is a checkpoint of this name, or the directory cannot be written to.
        swap.SwapError: the drive is full or fails. Nothing is left of the new checkpoint in any case.
    """
    fitting, made, groups = _fit(source, model, guesses, optimizer, weights_only=weights_only)
    states = () if made is None else made.rule.names
    by_name = _states_by_name(fitting, groups)
    members = {name for group in groups for name in group}  # what is in no group was frozen
    rows = [
        _Row.of(name, p, fitting.weights[name], by_name.get(name, {}), made if name in members else None)
        for name, p in model.named_parameters()
    ]
    encoder = Encoder()
    contents, left_out = _contents(encoder, rows, fitting, made, groups)
    tag = check_tag(f"step-{contents['step']:08d}" if tag is None else tag)
    folder = Folder(directory)
    if folder.at(tag).exists():
        raise CheckpointError(f"checkpoint {folder.path / tag}: is there already; name another --tag or directory")
    with folder.writing():
        needed = sum(row.size_bytes(states) for row in rows) + sum(t.nbytes for t in encoder.tensors.values())
        sequence = folder.next_sequence()
        with folder.begin(tag, needed) as new:
            buffers = BUFFERS + max((len(row.columns(states)) for row in rows), default=0)
            with Staging(buffers, BUFFER_BYTES, deadline_s=DEADLINE_S) as staging:
                entries, files = _write(new, rows, states, staging)
                more, other = write_values(new, encoder.tensors, staging)
            index = Index(tag, sequence, (*entries, *more), {**files, **other}, contents)
            path = folder.publish(new, tag, index.to_json())
    return Conversion(path, index, fitting.facts.kind, left_out)


# --- the source, and what it is compared with ------------------------------------------------------------------------


def _fit(
    source: Path, model: nn.Module, guesses: Iterable[Groups], optimizer: str | None, *, weights_only: bool
) -> tuple[Fitting, _Optimizer | None, Groups]:
    """Return what fits, the optimizer that goes on, and the names in its param groups, in the model's order.

    Raises:
        ConfigError: it does not fit, or the source numbers parameters and no guess has its groups.
    """
    trained = {} if weights_only else {id(p): _dtype_of(p) for p in model.parameters() if p.requires_grad}
    names = Names(model, trained)
    if weights_only:
        return fit(names, open_foreign(source, []), None, strict=True), None, []
    everything = [[name for name, parameter in model.named_parameters() if parameter.requires_grad]]
    order = {name: number for number, name in enumerate(everything[0])}
    names.weights(names.unprefixed(open_foreign(source, [])), strict=True)  # first: another model has other groups, too
    error: NamesError | None = None
    for guess in itertools.chain((None, everything), guesses):
        try:
            found = names.unprefixed(open_foreign(source, guess))
        except NamesError as failed:
            error = failed
            continue
        groups: Groups = guess or []
        if guess is None:  # the file has names
            firsts = [{names.first(name) for name in group.names} & order.keys() for group in found.groups]
            groups = [sorted(group, key=order.__getitem__) for group in firsts if group]
        made = _make_optimizer(found, model, groups, optimizer)
        return fit(names, found, made, strict=True), made, groups
    assert error is not None
    raise error


def _make_optimizer(found: Found, model: nn.Module, groups: Groups, wanted: str | None) -> _Optimizer:
    """Return the optimizer whose states and options were found.

    Raises:
        ConfigError: there are none, or none that is known has such states.
    """
    if not found.groups:
        raise ConfigError(
            f"{found.path}: expected an optimizer's state but it has weights alone; pass --weights-only to import these"
        )
    names = {
        key
        for state in found.states.values()
        for key, value in state.items()
        if key != "step" and isinstance(value, Source) and numel_of(value) > 1
    }
    fits = [key for key, kind in OPTIMIZERS.items() if names == set(kind.STATES) or (kind is SGD and not names)]
    saved = [group.options for group in found.groups]
    if "adam" in fits and any(options.get("decoupled_weight_decay") is False for options in saved):
        fits.reverse()
    if not fits or (wanted is not None and wanted not in fits):
        known = {key: sorted(kind.STATES) for key, kind in OPTIMIZERS.items()}
        expected = f"those of {wanted}, {known[wanted]}," if wanted is not None else f"one of {known}"
        raise ConfigError(
            f"{found.path}: expected an optimizer's states to be {expected} but got {sorted(names)}; import it into an "
            "engine with that optimizer (engine.import_checkpoint), or pass --weights-only"
        )
    kind = OPTIMIZERS[wanted or fits[0]]
    parameters = dict(model.named_parameters())
    by_name = {name: group.options for group in found.groups for name in group.names}
    given = []
    for group in groups:
        options = next((by_name[name] for name in group if name in by_name), saved[0])
        own = {option: options[option] for option in kind.TYPES if option in options}
        given.append({"params": [parameters[name] for name in group], **own})
    spec = kind(given)
    param_groups = [
        {"params": list(group["params"]), **options}
        for group, options in zip(given, spec.options_by_group(), strict=True)
    ]
    return _Optimizer(param_groups, rule_of(spec), kind is AdamW, kind.__name__)


def _states_by_name(fitting: Fitting, groups: Groups) -> dict[str, Mapping[str, Any]]:
    """Return the optimizer's states by the names of the parameters that its state dict numbers."""
    states = {} if fitting.packed is None else fitting.packed["state"]
    flat = [name for group in groups for name in group]
    return {flat[number]: state for number, state in states.items()}


def _dtype_of(parameter: nn.Parameter) -> str:
    """Return a trained parameter's dtype.

    Raises:
        ConfigError: it cannot be trained.
    """
    name = str(parameter.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)}: expected one of {', '.join(_DTYPES)} but got {name}; "
            "freeze it"
        )
    return name


# --- what is written -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """One parameter of the new checkpoint.

    Attributes:
        unit: that has it alone.
        value: its elements: fp32 where it is trained in 16 bits.
        states: of the optimizer, by name; those that are missing are zeros.
        updates: that it has had.
    """

    unit: Unit
    value: Source
    states: Mapping[str, Source]
    updates: int

    @classmethod
    def of(
        cls, name: str, parameter: nn.Parameter, value: Source, states: Mapping[str, Any], made: _Optimizer | None
    ) -> _Row:
        """Return the row of a parameter; `made` is the optimizer that trains it."""
        dtype = str(parameter.dtype).removeprefix("torch.")
        slots, numel = lay_out([(name, tuple(parameter.shape))])
        unit = Unit(0, name, dtype, parameter.element_size(), made is not None, numel, slots)
        updates = int(float(made.rule.with_step(states)["step"])) if states and made is not None else 0
        return cls(unit, value, states, updates)

    @property
    def name(self) -> str:
        """Of the parameter."""
        return self.unit.slots[0].name

    def columns(self, states: Sequence[str]) -> list[Column]:
        """Return what is stored of it; `states` are those of the optimizer."""
        return columns_of(self.unit, States(tuple(states), StateKind.FLOAT32), None)

    def size_bytes(self, states: Sequence[str]) -> int:
        """Return the bytes that are stored of it."""
        return sum(column.size_bytes(self.unit.slots[0].numel) for column in self.columns(states))

    def pieces(self, states: Sequence[str], begin: int, end: int) -> dict[str, torch.Tensor]:
        """Return the elements [begin, end) of each column, by label."""
        dtype = getattr(torch, self.unit.dtype)
        narrow = self.unit.trainable and dtype is not torch.float32
        part = elements(on_cpu(self.value, torch.float32 if narrow else dtype), begin, end).contiguous()
        found = {PARAMETER: part}
        if narrow:
            parameter = found[PARAMETER] = torch.empty(end - begin, dtype=dtype)
            if dtype is torch.bfloat16:
                rest = found[MASTER] = torch.empty(end - begin, dtype=torch.int16)
                cpu_adam.split_master(part.data_ptr(), parameter.data_ptr(), rest.data_ptr(), end - begin)
            else:
                half, single = cpu_adam.Dtype.FLOAT16, cpu_adam.Dtype.FLOAT32
                cpu_adam.convert(part.data_ptr(), single, parameter.data_ptr(), half, end - begin)
                found[MASTER] = part
        if self.unit.trainable:
            for name in states:
                value = self.states.get(name)
                zeros = torch.zeros(end - begin)
                found[name] = (
                    zeros if value is None else elements(on_cpu(value, torch.float32), begin, end).contiguous()
                )
        return found


def _write(
    folder: Path, rows: Sequence[_Row], states: Sequence[str], staging: Staging
) -> tuple[list[Entry], dict[str, StoredFile]]:
    """Write the parameters' files; returns what the index says of them."""
    shares: list[list[_Row]] = [[]]
    size = 0
    for row in rows:
        if shares[-1] and size + row.size_bytes(states) > FILE_BYTES:
            shares.append([])
            size = 0
        shares[-1].append(row)
        size += row.size_bytes(states)
    entries: list[Entry] = []
    files: dict[str, StoredFile] = {}
    for number, share in enumerate(shares, start=1):
        file = f"tensors-{number:05d}.safetensors"
        regions: dict[str, list[Member]] = {}
        for row in share:
            for column in row.columns(states):
                member = Member(f"{column.label}:{row.name}", column.dtype, row.unit.slots[0].shape)
                regions.setdefault(f"{column.label} {column.dtype}", []).append(member)
        order = sorted(regions, key=lambda label: -ITEMSIZES[regions[label][0].dtype])
        writer = FileWriter(folder / file, {label: regions[label] for label in order}, staging)
        try:
            for row in share:
                _write_row(writer, row, states)
            writer.finish()
        finally:
            staging.settle()
            writer.close()
        files[file] = writer.stored
        for row in share:
            entries += _entries(row, states, file, writer)
    return entries, files


def _write_row(writer: FileWriter, row: _Row, states: Sequence[str]) -> None:
    numel = row.unit.slots[0].numel
    for begin in range(0, numel, PIECE_NUMEL):
        pieces = row.pieces(states, begin, min(begin + PIECE_NUMEL, numel))
        for column in row.columns(states):
            part = pieces[column.label]
            key = f"{column.label}:{row.name}"
            writer.append(f"{column.label} {column.dtype}", key, part.data_ptr(), part.nbytes)


def _entries(row: _Row, states: Sequence[str], file: str, writer: FileWriter) -> list[Entry]:
    slot, found = row.unit.slots[0], []
    for column in row.columns(states):
        key = f"{column.label}:{slot.name}"
        place = Range(file, key, 0, slot.numel, writer.sums[key].result())
        found.append(Entry(column.label, slot.name, column.dtype, slot.shape, (place,) if slot.numel else ()))
    return found


def _contents(
    encoder: Encoder, rows: Sequence[_Row], fitting: Fitting, made: _Optimizer | None, groups: Groups
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return everything beside the parameters, as an engine describes itself, and what cannot be kept of it."""
    run = {"step": 0, "skipped_steps": 0}
    described = None
    if made is not None and fitting.packed is not None:
        run |= fitting.packed.get("run", {})
        named = zip(fitting.packed["param_groups"], groups, strict=True)
        described = {
            "class": made.name,
            "states": list(made.rule.names),
            "state_dtype": "float32",
            "groups": [{**group, "params": list(members)} for group, members in named],
            "records": None,
            "run": run,
            "grad_norm": None,
        }
    buffers = {name: value for name, value in fitting.weights.items() if isinstance(value, torch.Tensor)}
    client, left_out = _client_state(fitting.facts)
    contents = {
        "step": run["step"],
        "written_by": {"torch": str(torch.__version__)},
        "parameters": {row.name: {"trained": row.unit.trainable, "updates": row.updates} for row in rows},
        "optimizer": encoder.encode(described, "optimizer"),
        "accumulation": {"gradients": {}, "micro_batches": {"done": 0, "meant": False}},
        "buffers": {name: encoder.encode(value, f"buffer:{name}") for name, value in buffers.items()},
        "extra": {},
        "random": None,
        "client_state": encoder.encode(client, "client_state"),
    }
    return contents, left_out


def _client_state(facts: Facts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the small facts as plain values, and why some are left out."""
    kept: dict[str, Any] = {}
    left_out = []
    for field in dataclasses.fields(facts):
        try:
            value = _plain(getattr(facts, field.name))
            Encoder().encode(value, field.name)
            kept[field.name] = value
        except CheckpointError as error:
            left_out.append(str(error))
    return {"imported": kept}, tuple(left_out)


def _plain(value: Any) -> Any:
    """Return nested values with the tensors of files in memory: they are small."""
    if isinstance(value, Source):
        return whole(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else value
