"""Reads checkpoints of DeepSpeed with ZeRO-1, 2 and 3, of any number of data-parallel ranks.

Owns the layout: flat groups, their partitions and padding. ZeRO-1 and 2 cut the flat vector of each param group into
equal parts, and save which elements of which parameter each rank has. ZeRO-3 cuts each parameter, and may have several
flat groups per param group. Tensor, pipeline and expert
parallelism are refused. Source: files that DeepSpeed 0.19 has written (tests/foreign/deepspeed_recorder.py).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.foreign.files import FileTensor
from offload.checkpoint.foreign.found import Facts, Found, Group
from offload.checkpoint.foreign.inert import Record, read_torch_file
from offload.checkpoint.sources import Joined, Part, Source, whole
from offload.errors import ConfigError

_OPTIMIZER_FILE = re.compile(
    r"(?P<prefix>(?:bf16_|fp16_)?)zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
# What DeepSpeed itself puts in a model's file. The rest is the script's client_state.
_OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "ds_config",
        "ds_version",
    }
)
_ELSEWHERE = "convert it with DeepSpeed's own tools (zero_to_fp32.py gives the weights)"


@dataclasses.dataclass(frozen=True, slots=True)
class _Rank:
    """What one rank has saved of the optimizer.

    Attributes:
        path: the file.
        saved: its dict.
        masters: flat fp32 partitions.
        states: of the optimizer, per flat partition.
        groups: options of the param groups, with the numbers of their flat partitions.
    """

    path: Path
    saved: Mapping[str, Any]
    masters: Sequence[FileTensor]
    states: Mapping[int, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Fragment:
    """Elements of a parameter in a flat partition."""

    rank: _Rank
    flat: int
    start: int
    numel: int


def is_zero(folder: Path) -> bool:
    """Tell whether a folder is one of DeepSpeed's."""
    return (folder / "latest").is_file() or any(folder.glob("*mp_rank_*_model_states.pt"))


def read_zero(folder: Path) -> Found:
    """Return what a checkpoint of DeepSpeed holds.

    Args:
        folder: what ``save_checkpoint`` was given, or a tag's folder in it.

    Raises:
        ConfigError: a file is missing, damaged or of a layout that is not known; the text names it.
    """
    place = _tag_folder(folder)
    ranks = _ranks(place)
    stage = _stage(ranks[0])
    models = [_model(place, ranks, number, stage) for number in range(len(ranks) if stage == 3 else 1)]
    model = models[0]
    shapes = _shapes(model, "param_shapes", place)
    fragments = _cut_parameters(shapes, ranks) if stage == 3 else _mapped(ranks)
    masters: dict[str, Source] = {}
    states: dict[str, dict[str, Any]] = {}
    groups = {flat: group for group in ranks[0].groups for flat in group["params"]}
    if sorted(groups) != list(range(len(shapes))):
        raise ConfigError(
            f"{place}: expected {len(shapes)} flat groups but got those of {sorted(groups)}; {_ELSEWHERE}"
        )
    for flat, name, shape in (
        (flat, name, shape) for flat, group in enumerate(shapes) for name, shape in group.items()
    ):
        found = fragments.get(name, [])
        if sum(fragment.numel for fragment in found) != math.prod(shape):
            raise ConfigError(
                f"{place}: expected {math.prod(shape)} elements of {name} in {len(ranks)} rank files but got "
                f"{sum(fragment.numel for fragment in found)}; {_ELSEWHERE}"
            )
        masters[name] = _join(shape, found, lambda one: one.rank.masters[one.flat])
        states[name] = _states(name, shape, found, groups[flat])
    weights: dict[str, Source] = {
        name: tensor for name, tensor in model["module"].items() if isinstance(tensor, FileTensor)
    }
    if stage == 3:
        buffers = {name: weights[name] for name in model.get("buffer_names", ()) if name in weights}
        weights = {**buffers, **masters, **_frozen(models, place)}
        for alias, name in model.get("shared_params", {}).items():
            weights[alias] = weights[name]
    return Found(
        path=str(place),
        weights=weights,
        masters=masters,
        states={name: state for name, state in states.items() if state},
        groups=[
            Group(
                tuple(name for flat in options["params"] for name in shapes[flat]),
                {key: value for key, value in options.items() if key != "params"},
            )
            for options in ranks[0].groups
        ],
        facts=Facts(
            kind=f"DeepSpeed ZeRO-{stage} of {len(ranks)} ranks",
            global_step=model.get("global_steps"),
            skipped_steps=int(model.get("skipped_steps") or 0),
            loss_scale=_loss_scale(ranks[0].saved.get("loss_scaler")),
            scheduler=model.get("lr_scheduler"),
            samples=model.get("global_samples"),
            client_state={key: _read(value) for key, value in model.items() if key not in _OWN_KEYS},
        ),
    )


def _read(value: Any) -> Any:
    """Return a value with tensors in the place of those that are not read yet."""
    if isinstance(value, FileTensor):
        return whole(value)
    if type(value) in (list, tuple):
        return type(value)(_read(one) for one in value)
    return {key: _read(one) for key, one in value.items()} if type(value) is dict else value


def _tag_folder(folder: Path) -> Path:
    """Return the folder of the files: that of the latest tag, or the folder itself."""
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    tag = latest.read_text(encoding="utf-8").strip()
    place = folder / tag
    if Path(tag).name != tag or not place.is_dir():
        raise ConfigError(f"{latest}: expected the name of a folder beside it but got {tag!r}; copy the folder, too")
    return place


def _ranks(place: Path) -> list[_Rank]:
    """Return what each rank has saved of the optimizer."""
    found: dict[int, Path] = {}
    for path in sorted(place.iterdir()):
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match:
            _refuse_parallel(place, match["mp"])
            found[int(match["rank"])] = path
        elif re.match(r"layer_\d+|.*expert_\d+", path.name):
            raise ConfigError(
                f"{path}: expected ZeRO alone but got pipeline or expert parallelism; put the weights of its layer_* "
                "files into one state dict, save it by torch.save and import that with strict=False"
            )
    if not found and (place / "zero").is_dir():
        raise ConfigError(
            f"{place}: expected *_optim_states.pt of ZeRO-1, 2 or 3 but got a universal checkpoint; import the folder "
            "that it was made of, or a file of torch.save with the weights in zero/*/fp32.pt, with strict=False"
        )
    if not found:
        raise ConfigError(
            f"{place}: expected *_optim_states.pt of ZeRO-1, 2 or 3 but got none; copy all files of the folder (a run "
            "without ZeRO is imported from its own torch.save files)"
        )
    ranks = [_rank(found[number]) for number in sorted(found)]
    count = ranks[0].saved.get("partition_count")
    world = max(count) if isinstance(count, (list, tuple)) and count else count
    if not isinstance(world, int):
        raise ConfigError(f"{ranks[0].path}: expected partition_count as a number but got {count!r}; {_ELSEWHERE}")
    for number in range(world):
        if number not in found:
            name = re.sub(r"zero_pp_rank_\d+", f"zero_pp_rank_{number}", ranks[0].path.name)
            raise ConfigError(f"{place / name}: expected the file of each of {world} ranks but it is missing; copy it")
    if len(found) != world:
        raise ConfigError(f"{place}: expected {world} rank files but got {len(found)}; remove those of another run")
    return ranks


def _refuse_parallel(place: Path, mp_rank: str) -> None:
    if int(mp_rank):
        raise ConfigError(
            f"{place}: expected ZeRO alone but got tensor parallelism (mp_rank_{mp_rank}); join it by DeepSpeed's "
            "ds_to_universal.py, put the weights in zero/*/fp32.pt into one state dict, save it by torch.save and "
            "import that with strict=False"
        )


def _rank(path: Path) -> _Rank:
    content = read_torch_file(path)
    saved = content.get("optimizer_state_dict") if isinstance(content, Mapping) else None
    if not isinstance(saved, Mapping):
        raise ConfigError(f"{path}: expected optimizer_state_dict in it; {_ELSEWHERE}")
    base = saved.get("base_optimizer_state", saved.get("optimizer_state_dict"))
    masters = saved.get("single_partition_of_fp32_groups", saved.get("fp32_flat_groups"))
    if not isinstance(base, Mapping) or "param_groups" not in base or not isinstance(masters, (list, tuple)):
        raise ConfigError(
            f"{path}: expected an optimizer's dict and flat fp32 groups but got {sorted(map(str, saved))[:8]}; "
            f"save it again without elastic_checkpoint and with a later DeepSpeed, or {_ELSEWHERE}"
        )
    return _Rank(path, saved, masters, base.get("state", {}), base["param_groups"])


def _stage(rank: _Rank) -> int:
    stage = rank.saved.get("zero_stage", 1)  # the optimizer for bf16 of ZeRO-1 does not say
    number = stage.arguments[0] if isinstance(stage, Record) and stage.arguments else stage
    if number not in (1, 2, 3):
        raise ConfigError(f"{rank.path}: expected ZeRO stage 1, 2 or 3 but got {number!r}; {_ELSEWHERE}")
    return int(number)


def _model(place: Path, ranks: Sequence[_Rank], number: int, stage: int) -> Mapping[str, Any]:
    name = f"zero_pp_rank_{number}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    if not (place / name).is_file():
        raise ConfigError(f"{place / name}: expected the file of each of {len(ranks)} ranks but it is missing; copy it")
    content = read_torch_file(place / name)
    if not isinstance(content, Mapping) or not isinstance(content.get("module"), Mapping):
        raise ConfigError(f"{place / name}: expected the model's state dict in 'module'; {_ELSEWHERE}")
    return content


def _shapes(model: Mapping[str, Any], key: str, place: Path) -> list[Mapping[str, tuple[int, ...]]]:
    found = model.get(key)
    if not isinstance(found, (list, tuple)) or not all(isinstance(group, Mapping) for group in found):
        raise ConfigError(f"{place}: expected {key} in the model's file; save it again with a later DeepSpeed")
    return list(found)


def _mapped(ranks: Sequence[_Rank]) -> dict[str, list[_Fragment]]:
    """Return the fragments of each parameter, in order, as ZeRO-1 and 2 say themselves."""
    fragments: dict[str, list[_Fragment]] = {}
    for rank in ranks:
        mappings = rank.saved.get("param_slice_mappings")
        if not isinstance(mappings, (list, tuple)):
            raise ConfigError(f"{rank.path}: expected param_slice_mappings; save it again with a later DeepSpeed")
        for flat, mapping in enumerate(mappings):
            for name, address in mapping.items():
                fragments.setdefault(name, []).append(_Fragment(rank, flat, address["start"], address["numel"]))
    return fragments


def _cut_parameters(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Sequence[_Rank]
) -> dict[str, list[_Fragment]]:
    """Return the fragments of each parameter under ZeRO-3: equal ones of all ranks, of which the last are padded."""
    fragments: dict[str, list[_Fragment]] = {}
    for flat, group in enumerate(shapes):
        used = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            cut = -(-numel // len(ranks))
            fragments[name] = [
                _Fragment(rank, flat, used, max(min(cut, numel - number * cut), 0)) for number, rank in enumerate(ranks)
            ]
            used += cut
    return fragments


def _frozen(models: Sequence[Mapping[str, Any]], place: Path) -> dict[str, Source]:
    """Return frozen parameters under ZeRO-3, of which each rank has a part."""
    found: dict[str, Source] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        numel = math.prod(shape)
        cut = -(-numel // len(models))
        parts = []
        for number, model in enumerate(models):
            piece = model["frozen_param_fragments"][name]
            if math.prod(piece.shape) < min(cut, max(numel - number * cut, 0)):
                raise ConfigError(f"{place}: expected {cut} elements of {name} of each rank; {_ELSEWHERE}")
            parts.append(Part(piece, 0, max(min(cut, numel - number * cut), 0)))
        found[name] = Joined(shape, parts)
    return found


def _join(shape: Sequence[int], fragments: Sequence[_Fragment], flat_of: Any) -> Joined:
    """Return a tensor whose elements are fragments of flat ones."""
    parts = []
    for fragment in fragments:
        try:
            flat = flat_of(fragment)
        except (IndexError, KeyError) as error:
            raise ConfigError(f"{fragment.rank.path}: expected the flat group {fragment.flat}; {_ELSEWHERE}") from error
        if fragment.numel and not math.prod(flat.shape):
            raise ConfigError(
                f"{fragment.rank.path}: expected fp32 masters but flat group {fragment.flat} is empty, as with an "
                "optimizer on NVMe; load it in DeepSpeed, call engine.save_16bit_model, and import that file with "
                "strict=False"
            )
        if fragment.start + fragment.numel > math.prod(flat.shape):
            raise ConfigError(
                f"{fragment.rank.path}: expected {fragment.start + fragment.numel} elements in flat group "
                f"{fragment.flat} but got {math.prod(flat.shape)}; {_ELSEWHERE}"
            )
        parts.append(Part(flat, fragment.start, fragment.numel))
    return Joined(tuple(shape), parts)


def _states(
    name: str, shape: Sequence[int], fragments: Sequence[_Fragment], group: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a parameter's states; none where it has not been updated."""
    per_fragment = [fragment.rank.states.get(fragment.flat, {}) for fragment in fragments]
    kept: dict[str, Any] = {}
    for key, value in per_fragment[0].items():
        if key == "step":
            continue
        if any(key not in states for states in per_fragment):
            raise ConfigError(f"{name}: expected {key} in the files of all its ranks; {_ELSEWHERE}")
        if isinstance(value, FileTensor):
            kept[key] = _join(shape, fragments, lambda one, key=key: one.rank.states[one.flat][key])
    step = per_fragment[0].get("step", group.get("step"))
    if kept and step is not None:
        kept["step"] = whole(step).item() if isinstance(step, FileTensor) else step
    return kept


def _loss_scale(scaler: Any) -> dict[str, float] | None:
    """Return a dynamic loss scale in the engine's terms."""
    if not isinstance(scaler, Record) or "last_overflow_iter" not in scaler.attributes:
        return None
    return {
        "scale": float(scaler["cur_scale"]),
        "tolerance": int(scaler.get("cur_hysteresis", 1)),
        "good_steps": int(scaler["cur_iter"]) - 1 - int(scaler["last_overflow_iter"]),
    }
