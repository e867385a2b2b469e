"""Linear layers in tiles, each of which is a module and so a unit: the device needs room for one tile at a time.

Owns what a tile is, its arithmetic, the way between the names of tiles and those of the layer they come from, and the
search for a size of tiles that does.
Next: :mod:`offload.planning.partition` makes units of tiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError, ConfigError
from offload.memory.budget import Tier
from offload.sizes import format_bytes, parse_bytes
from offload.torch_private import no_subclasses


class Tile(nn.Linear):
    """A part of a larger layer, initialised as that is."""

    comes_apart = True  # as :mod:`offload.planning.partition` asks

    def __init__(self, columns: int, rows: int, bias: bool, dtype: torch.dtype | None, *, of_features: int) -> None:
        """Make one on the meta device, of a layer with inputs of `of_features`."""
        self.of_features = of_features
        super().__init__(columns, rows, bias, "meta", dtype)

    def reset_parameters(self) -> None:
        """Initialise weight and bias as those of an ``nn.Linear`` of the whole size are."""
        bound = 1 / math.sqrt(self.of_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class _Whole(torch.Tensor):
    """Stands for a weight or bias in tiles: tells its shape, dtype and device, and has no elements."""

    of: str

    @classmethod
    def like(cls, name: str, tile: torch.Tensor, shape: tuple[int, ...]) -> _Whole:
        """Return what stands for the `name` of a layer with this tile."""
        with no_subclasses():
            made = torch.empty(1, dtype=tile.dtype, device=tile.device).expand(shape).as_subclass(cls)
            made.requires_grad_(tile.requires_grad)
            made.of = name
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<the {self.of} of a layer in tiles: {self.dtype}, {tuple(self.shape)}, {self.device}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if (func.__self__.__name__ if name == "__get__" else name) in _TOLD:
            with no_subclasses():
                return func(*args, **(kwargs or {}))
        of = next((arg.of for arg in args if isinstance(arg, cls)), "weight or bias")
        raise ConfigError(
            f"TiledLinear: has no {of} in one piece; its tiles have theirs, and whole() returns an nn.Linear"
        )


_TOLD = {
    *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "element_size", "itemsize", "nbytes"),
    *("dtype", "is_floating_point", "is_complex", "layout", "is_sparse", "requires_grad"),
    *("device", "get_device", "is_cpu", "is_cuda", "is_meta"),
}


class TiledLinear(nn.Module):
    """What an ``nn.Linear`` computes, from tiles of its weight.

    A tile is an ``nn.Linear`` of its own (:class:`Tile`), and ``tiles[o * in_splits + i]`` has the rows ``o`` and the
    columns ``i``. The first tile of each row has the row's part of the bias.

    With ``in_splits=1``, each output and each gradient of weight and bias is one matrix product, as of the whole
    layer. The gradient of the input is a sum of one product per tile. With more, outputs are sums, too: products are
    added in float32 and rounded once more. So input splits, and the input's gradient, differ in last bits.

    Its ``weight`` and ``bias`` tell shape, dtype and device, and nothing else: forwards of other modules ask for those.
    Its state dict has the names of the tiles. ``load_state_dict`` takes ``weight`` and ``bias`` of the whole layer,
    too; :func:`join_tiles` makes a state dict that has them.
    """

    def __init__(
        self,
        linear: nn.Linear | tuple[int, int],
        *,
        in_splits: int = 1,
        out_splits: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy a layer, or make a new one, initialised as ``nn.Linear`` is but with other random numbers.

        Args:
            linear: the layer, or (in_features, out_features).
            in_splits: parts of the input; they differ by one column at most.
            out_splits: parts of the output; they differ by one row at most.
            bias: of a new layer.
            device: of a new layer.
            dtype: of a new layer.

        Raises:
            ConfigError: the layer cannot be tiled, or has not so many rows or columns.
        """
        super().__init__()
        source = linear if isinstance(linear, nn.Module) else None
        if source is not None:
            why = _why_not(source)
            if why is not None:
                raise ConfigError(f"TiledLinear: expected a plain nn.Linear but {why}")
            self.in_features, self.out_features = source.in_features, source.out_features
            bias, device, dtype = source.bias is not None, source.weight.device, source.weight.dtype
        else:
            self.in_features, self.out_features = linear  # type: ignore[misc]
        for name, splits, features in (
            ("in_splits", in_splits, self.in_features),
            ("out_splits", out_splits, self.out_features),
        ):
            if isinstance(splits, bool) or not isinstance(splits, int) or not 1 <= splits <= features:
                raise ConfigError(
                    f"TiledLinear: expected {name} to be a whole number in 1..{features} but got {splits}"
                )
        self.in_splits, self.out_splits = in_splits, out_splits
        self.has_bias = bias
        whole = source.of_features if isinstance(source, Tile) else self.in_features
        self.tiles = nn.ModuleList(
            Tile(_length(columns), _length(rows), bias and columns.start == 0, dtype, of_features=whole)
            for rows, columns in self._places()
        )
        if source is None:
            self.tiles.to_empty(device=device or torch.get_default_device())
            self.reset_parameters()
        else:
            self._copy(source)

    def _copy(self, source: nn.Linear) -> None:
        for tile, (rows, columns) in zip(self._all(), self._places(), strict=True):
            values = {"weight": source.weight.detach()[rows, columns]}
            if tile.bias is not None:
                values["bias"] = source.bias.detach()[rows]
            for name, value in values.items():
                trained = getattr(source, name).requires_grad
                tile.register_parameter(name, nn.Parameter(value.clone(), requires_grad=trained))
        self.train(source.training)

    def reset_parameters(self) -> None:
        """Initialise all tiles as an ``nn.Linear`` of the whole size is."""
        for tile in self._all():
            tile.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) of (..., in_features)."""
        columns = input.tensor_split(self.in_splits, -1)
        rows = [self._row(number, columns) for number in range(self.out_splits)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)

    def _row(self, number: int, columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
        tiles = self._all()[number * self.in_splits : (number + 1) * self.in_splits]
        first: torch.Tensor = tiles[0](columns[0])
        if len(tiles) == 1:
            return first
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for tile, part in zip(tiles[1:], columns[1:], strict=True):
            total = total + tile(part)
        return total.to(first.dtype)

    def whole(self) -> nn.Linear:
        """Return an ``nn.Linear`` with a copy of the tiles' values."""
        first = self._all()[0]
        made = nn.Linear(self.in_features, self.out_features, self.has_bias, "meta", first.weight.dtype)
        for name, value in join_tiles(self, self.state_dict()).items():
            made.register_parameter(name, nn.Parameter(value, requires_grad=getattr(first, name).requires_grad))
        return made.train(self.training)

    def extra_repr(self) -> str:
        """Return its sizes."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.has_bias}"
        return f"{sizes}, in_splits={self.in_splits}, out_splits={self.out_splits}"

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            shape = (self.out_features, self.in_features)[: 2 if name == "weight" else 1]
            tile = getattr(self._all()[0], name)
            return None if tile is None else _Whole.like(name, tile, shape)
        return super().__getattr__(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.split_into(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def split_into(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Put tiles in the place of the whole layer's tensors, if the dict has such of the right shape."""
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for name, shape in shapes.items():
            value = state_dict.get(prefix + name)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                continue
            if name == "bias" and not self.has_bias:
                continue  # to be reported as unexpected
            del state_dict[prefix + name]
            for number, (rows, columns) in enumerate(self._places()):
                if name == "weight":
                    state_dict[f"{prefix}tiles.{number}.weight"] = value[rows, columns]
                elif columns.start == 0:
                    state_dict[f"{prefix}tiles.{number}.bias"] = value[rows]

    def joined(self, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Return the whole layer's tensors by name, of those of the tiles.

        Raises:
            ConfigError: some are missing; names the first.
        """

        def of(number: int, name: str) -> Any:
            key = f"{prefix}tiles.{number}.{name}"
            if key not in values:
                raise ConfigError(f"join_tiles: expected all tiles in the state dict but {key} is missing")
            return values[key]

        firsts = range(0, self.out_splits * self.in_splits, self.in_splits)
        rows = [[of(first + i, "weight") for i in range(self.in_splits)] for first in firsts]
        found = {"weight": torch.cat([torch.cat(row, 1) if len(row) > 1 else row[0] for row in rows])}
        if self.has_bias:
            found["bias"] = torch.cat([of(first, "bias") for first in firsts])
        return {prefix + name: value for name, value in found.items()}

    def _all(self) -> list[nn.Linear]:
        return list(self.tiles)  # type: ignore[arg-type]

    def _places(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each tile."""
        for rows in _parts(self.out_features, self.out_splits):
            for columns in _parts(self.in_features, self.in_splits):
                yield rows, columns


_LINEARS = (nn.Linear, Tile)
MOST_TILES = 64  # of the largest layer, where somebody looks for how many do


def tile_(model: nn.Module, *, larger_than: int | str) -> list[str]:
    """Put a :class:`TiledLinear` in the place of each ``nn.Linear`` whose weight is larger; before an engine is made.

    Outputs are split as often as is needed for tiles of `larger_than` bytes at most, and inputs only if a single row
    is larger. Other modules stay as they are.

    Args:
        model: it is changed.
        larger_than: bytes of a weight in its present dtype, or a size such as ``"64MiB"``.

    Returns:
        The paths of the layers that are tiled now.

    Raises:
        ConfigError: a layer so large cannot be tiled: its weight is tied, or the layer has hooks. Nothing is changed.
    """
    limit = parse_bytes(larger_than, subject="tile_: larger_than")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"tile_: expected larger_than to be a number of bytes >= 1 but got {larger_than!r}")
    if isinstance(model, nn.Linear) and type(model) in _LINEARS and model.weight.nbytes > limit:
        raise ConfigError("tile_: expected a model that has layers but got one; make offload.ops.TiledLinear of it")
    places = _places_of(model, limit)
    _refuse(model, {layer: found[0][2] for layer, found in places.items()})
    for layer, found in places.items():
        ins, outs = _splits(layer, limit)
        _put(TiledLinear(layer, in_splits=ins, out_splits=outs), found)
    return [path for found in places.values() for _, _, path in found]


def largest_tiles(model: nn.Module, does: Callable[[], bool]) -> int | None:
    """Return the largest `larger_than` of :func:`tile_` with which something does; None if none was found.

    Args:
        model: in which tiles without values stand while `does` is called; then it is what it was.
        does: tells whether what is looked for does with the model as it is then.
    """
    layers = _places_of(model, 0)
    with contextlib.suppress(ConfigError), _instead(layers, lambda layer: nn.Identity()):  # there may be nothing else
        if not does():
            return None

    def holds(limit: int) -> bool:
        places = _places_of(model, limit)
        try:
            _refuse(model, {layer: found[0][2] for layer, found in places.items()})
            with _instead(places, lambda layer: _like(layer, limit)):
                return does()
        except ConfigError:  # a layer so large cannot be tiled
            return False

    largest = max((layer.weight.nbytes for layer in layers), default=0)
    low, high = largest // 2, largest
    while low and not holds(low):
        low, high = low // 2 if low * MOST_TILES > largest else 0, low
    if not low:
        return None
    while high - low > largest // (MOST_TILES * MOST_TILES) + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def with_tiles(error: BudgetError, model: nn.Module | None, does: Callable[[], bool]) -> BudgetError:
    """Return a refusal of a plan that names the tiles with which there would be one, or tells that nobody knows.

    Args:
        error: says what does not fit.
        model: whose layers may be in tiles; None: nobody looks for a size.
        does: tells whether there is a plan for the model as it is then.
    """
    if Tier.DEVICE.value not in error.budgets:
        return error
    size = None if model is None else largest_tiles(model, does)
    if size is None:
        text = f"{error}; if an nn.Linear is the largest layer, offload.ops.tile_(model, larger_than=...) may do, too"
        return BudgetError(text, budgets=error.budgets)
    text = f"{error}; or tile large layers before: offload.ops.tile_(model, larger_than={size}) does with these budgets"
    return BudgetError(text, budgets=error.budgets, larger_than=size)


Places = list[tuple[nn.Module, str, str]]  # where a layer is: its parent, its name there, and its path


def _places_of(model: nn.Module, limit: int) -> dict[nn.Linear, Places]:
    """Return the layers with larger weights, and where each is."""
    places: dict[nn.Linear, Places] = {}
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if isinstance(child, nn.Linear) and type(child) in _LINEARS and child.weight.nbytes > limit:
                places.setdefault(child, []).append((parent, name, f"{path}.{name}" if path else name))
    return places


def _splits(layer: nn.Linear, limit: int) -> tuple[int, int]:
    """Return in how many parts inputs and outputs of a layer are split for tiles of `limit` bytes at most."""
    row_bytes = layer.in_features * layer.weight.itemsize
    in_splits = min(math.ceil(row_bytes / limit), layer.in_features)
    tile_rows = max(limit // (math.ceil(layer.in_features / in_splits) * layer.weight.itemsize), 1)
    return in_splits, math.ceil(layer.out_features / tile_rows)


def _put(layer: nn.Module, places: Places) -> None:
    for parent, name, _ in places:
        setattr(parent, name, layer)


def _like(layer: nn.Linear, limit: int) -> TiledLinear:
    """Return tiles of `limit` bytes at most, as of a layer but without its values."""
    shape, (ins, outs) = (layer.in_features, layer.out_features), _splits(layer, limit)
    like: dict[str, Any] = {"bias": layer.bias is not None, "device": "meta", "dtype": layer.weight.dtype}
    made = TiledLinear(shape, in_splits=ins, out_splits=outs, **like)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(getattr(layer, name.rpartition(".")[2]).requires_grad)
    return made


@contextlib.contextmanager
def _instead(places: Mapping[nn.Linear, Places], make: Callable[[nn.Linear], nn.Module]) -> Iterator[None]:
    """Let what `make` makes of each layer stand in its places in the ``with`` block."""
    try:
        for layer, found in places.items():
            _put(make(layer), found)
        yield
    finally:
        for layer, found in places.items():
            _put(layer, found)


def join_tiles(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of `model` in which tiled layers have ``weight`` and ``bias`` of whole ones, as copies.

    Deferred tensors stay deferred.

    Raises:
        ConfigError: the dict has some tiles of a layer, but not all; names the first that is missing.
    """
    found = dict(state_dict)
    modules = model.named_modules(remove_duplicate=False)
    for path, layer in sorted(modules, key=lambda found: -found[0].count(".")):  # tiles may be tiled: those first
        prefix = f"{path}." if path else ""
        mine = [key for key in found if key.startswith(f"{prefix}tiles.")] if isinstance(layer, TiledLinear) else []
        if isinstance(layer, TiledLinear) and mine:
            whole = layer.joined(found, prefix)
            found = {key: value for key, value in found.items() if key not in mine} | whole
    return found


def split_tiles(model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which the tiled layers of `model` have tiles, as views: what :func:`join_tiles` undoes."""
    found = dict(state_dict)
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, TiledLinear):
            layer.split_into(found, f"{path}." if path else "")
    return found


def _refuse(model: nn.Module, layers: Mapping[nn.Linear, str]) -> None:
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, f"{path}.{name}" if path else name))
    for layer, path in layers.items():
        why = _why_not(layer)
        for parameter in layer.parameters():
            other = next((name for module, name in owners[id(parameter)] if module is not layer), None)
            why = why or (f"it shares a parameter with {other}" if other else None)
        if why is not None:
            raise ConfigError(
                f"tile_: {path} has {format_bytes(layer.weight.nbytes)}, but {why}; mend that, or pass a larger "
                "larger_than"
            )


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _why_not(layer: nn.Module) -> str | None:
    """Return why a layer cannot be tiled."""
    if type(layer) not in _LINEARS:
        return f"it is a {type(layer).__name__}"
    others = [type(p).__name__ for p in layer.parameters(recurse=False) if type(p) is not nn.Parameter]
    if others:
        return f"its parameters are of class {others[0]}, as of an engine or a quantizer; tile before"
    of_parameters = (p._backward_hooks or p._post_accumulate_grad_hooks for p in layer.parameters())
    if any(map(vars(layer).get, _HOOKS)) or any(of_parameters) or "forward" in vars(layer):
        return "it has hooks, or a forward of its own"
    if any(parameter.grad is not None for parameter in layer.parameters()):
        return "it has a gradient, which would be lost"
    return None


def _parts(length: int, count: int) -> Iterator[slice]:
    """Yield ranges as ``tensor_split`` makes them."""
    size, more = divmod(length, count)
    begin = 0
    for number in range(count):
        end = begin + size + (number < more)
        yield slice(begin, end)
        begin = end


def _length(part: slice) -> int:
    return int(part.stop - part.start)
