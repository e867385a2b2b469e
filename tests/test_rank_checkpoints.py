"""Checkpoints of several ranks: written in slices, loaded by any number of ranks, with the bits of one process."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_ranks import Ended, Raised, run
from test_checkpoint_format import documented_reader
from test_stage_1 import batch, compare_states, content, net, options

from offload import AdamW, Engine
from offload.checkpoint.columns import columns_of
from offload.checkpoint.layout import Columns, Layout
from offload.cli import main as cli
from offload.kernels.ranges import StateKind
from offload.planning.roles import States
from offload.planning.slices import owned_range
from offload.planning.units import Unit, lay_out

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

STEPS = 2  # of each world
CASES = [
    ((3, 1, 3), 3, "bfloat16-int8-host"),
    ((4, 2, 1), 4, "bfloat16-bfloat16-nvme"),
    ((2, 3), 6, "float32-float32-device"),
    ((1, 4), 4, "float16-float32-nvme"),
    ((3, 2, 1), 6, "bfloat16-float32-spill"),
    ((4, 3), 12, "float32-int8-nvme"),
]


class Drawing(torch.nn.Module):
    """Adds what is drawn, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(72, 72)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().float().sum()
        return self.inner(x + torch.randn(x.shape, dtype=x.dtype) + random.random()).float().square().mean()


def begin(name: str, path: str, world: int, accumulation: int, *, stage: int = 1, **more: Any) -> Engine:
    settings = options(name, path) | {"gradient_accumulation_steps": accumulation} | more
    settings |= {"stage": stage} if world > 1 else {}
    settings |= {"initial_loss_scale": 256.0} if name.startswith("float16") else {}  # with which steps are taken
    return Engine(net(name), AdamW(lr=0.01, weight_decay=0.1), **settings)


def go_on(rank: int, world: int, micro_batches: int, name: str, path: str, first: int, last: int) -> dict[str, Any]:
    """Load the latest checkpoint, if there are steps before; take steps [first, last), and save.

    Another run of steps is of another stage.
    """
    losses, norms = {}, []
    stage = (3, 2, 1)[first // STEPS % 3]
    with begin(name, path, world, micro_batches // world, stage=stage) as engine:
        client = engine.load_checkpoint(f"{path}/saved") if first else None
        for step in range(first, last):
            for micro in range(micro_batches // world):
                number = step * micro_batches + micro * world + rank
                loss = engine(*batch(number))
                engine.backward(loss)
                losses[number] = loss.item()
                engine.step()
            norms.append(engine.grad_norm)
        packed = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(packed)
        folder = engine.save_checkpoint(f"{path}/saved", client_state={"step": last})
        found = {"client": client, "losses": losses, "norms": norms, "folder": str(folder), "packed": as_bytes(packed)}
        return found | content(engine)


def as_bytes(value: Any) -> Any:
    """Return nested values with bytes in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: as_bytes(one) for key, one in value.items()}
    return [as_bytes(one) for one in value] if isinstance(value, (list, tuple)) else value


def convert(rank: int, world: int, name: str, path: str, *, strict: bool) -> dict[str, Any]:
    """Load a checkpoint into an engine that stores things otherwise."""
    with begin(name, path, world, 1) as engine:
        engine.load_checkpoint(f"{path}/saved", strict=strict)
        return content(engine) | {"packed": as_bytes(engine.optimizer.state_dict())}


def check(worlds: tuple[int, ...], micro_batches: int, name: str, tmp_path: Path) -> None:
    """Go through `worlds`, with a checkpoint between two of them: all of it is one run of one process."""
    (tmp_path / "one").mkdir()
    (one,) = run(go_on, 1, 1, micro_batches, name, str(tmp_path / "one"), 0, STEPS * len(worlds))
    assert not isinstance(one, (Raised, Ended)), one
    norms, losses, every = list[float](), dict[int, float](), list[Any]()
    for number, world in enumerate(worlds):
        first, last = number * STEPS, (number + 1) * STEPS
        every = run(go_on, world, world, micro_batches, name, str(tmp_path), first, last)
        for found in every:
            assert not isinstance(found, (Raised, Ended)), found
            assert found["client"] == ({"step": first} if number else None)
            assert found["norms"] == every[0]["norms"]
            assert found["parameters"] == every[0]["parameters"]
            assert found["packed"] == every[0]["packed"]
            losses |= found["losses"]
        norms += every[0]["norms"]
    assert losses == one["losses"] and norms == one["norms"]
    assert every[0]["parameters"] == one["parameters"]
    assert every[0]["packed"] == one["packed"]
    compare_states(every, one)
    compare_files(Path(every[0]["folder"]), Path(one["folder"]))


def compare_files(folder: Path, other: Path) -> None:
    """Compare what two checkpoints hold, with a reader that knows no ranks."""
    read = documented_reader()["read"]
    found, expected = read(folder), read(other)
    stored = {key for key in expected if key[0] != "value"}
    assert stored == {key for key in found if key[0] != "value"}
    assert all((found[key] == expected[key]).all() for key in stored)


@pytest.mark.few(1)
@pytest.mark.parametrize(("worlds", "micro_batches", "name"), CASES[:2])
def test_other_numbers_of_ranks_go_on_with_the_same_bits(
    worlds: tuple[int, ...], micro_batches: int, name: str, tmp_path: Path
) -> None:
    check(worlds, micro_batches, name, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("worlds", "micro_batches", "name"), CASES[2:])
def test_more_numbers_of_ranks(worlds: tuple[int, ...], micro_batches: int, name: str, tmp_path: Path) -> None:
    check(worlds, micro_batches, name, tmp_path)


# --- what each rank has of its own ------------------------------------------------------------------------------------


def draw(rank: int, world: int, path: str) -> dict[str, Any]:
    """Save in the middle of an accumulation, go on, load and go on again; then look at the files."""
    torch.manual_seed(3)
    options = {"device": "cpu", "max_memory": {"device": "16MiB", "cpu": "16MiB"}, "gradient_accumulation_steps": 3}
    with Engine(Drawing(), AdamW(lr=0.1), dtype="bfloat16", stage=1, **options) as engine:
        torch.manual_seed(10 + rank)
        random.seed(20 + rank)

        def train(count: int) -> list[float]:
            found = []
            for _ in range(count):
                loss = engine(torch.full((2, 72), rank + 1.0, dtype=torch.bfloat16))
                engine.backward(loss)
                engine.step()
                found.append(loss.item())
            return [*found, engine.grad_norm or 0.0, *engine.module.seen.tolist()]

        train(4)
        engine.save_checkpoint(path, client_state={"rank": rank}, tag="inside", keep=1)
        first = train(4), content(engine)
        client = engine.load_checkpoint(path)
        second = train(4), content(engine)
        train(1)
        engine.save_checkpoint(path, client_state={"rank": rank}, tag="behind")
        seen = engine.module.seen.tolist()
        drawn = torch.rand(2).tolist()
    return {"first": first, "second": second, "client": client, "seen": seen, "drawn": drawn}


def draw_on(rank: int, world: int, path: str) -> Any:
    """Load both checkpoints with another number of ranks."""
    stage = {"stage": 1} if world > 1 else {}
    options = {"device": "cpu", "max_memory": {"device": "16MiB", "cpu": "16MiB"}}
    torch.manual_seed(3)
    with Engine(Drawing(), AdamW(lr=0.1), dtype="bfloat16", **stage, **options) as engine:
        torch.manual_seed(77)
        client = engine.load_checkpoint(path, tag="behind")
        drawn, seen = torch.rand(2).tolist(), engine.module.seen.tolist()
        try:
            engine.load_checkpoint(path, tag="inside")
        except Exception as error:
            return client, drawn, seen, f"{type(error).__name__}: {error}"
        return client, drawn, seen, ""


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    """Generators, buffers and client_state; and a checkpoint inside an accumulation goes on from there."""
    every = run(draw, 3, 3, str(tmp_path))
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["first"] == found["second"]
        assert found["client"] == {"rank": rank}
    assert len({tuple(found["drawn"]) for found in every}) == len({tuple(found["seen"]) for found in every}) == 3
    torch.manual_seed(77)
    fresh = torch.rand(2).tolist()
    for world in (1, 4):
        for rank, found in enumerate(run(draw_on, world, world, str(tmp_path))):
            assert not isinstance(found, (Raised, Ended)), found
            client, drawn, seen, error = found
            assert client == {"rank": 0} and seen == every[0]["seen"]
            assert drawn == (every[rank]["drawn"] if rank < 3 else fresh)
            assert f"was saved by 3 ranks between two steps and cannot be loaded by {world}; load it with 3" in error


# --- who writes what --------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(0, 20_000), min_size=1, max_size=6)


@given(sizes, st.integers(1, 5), st.sampled_from(["float32", "bfloat16"]), st.booleans(), st.integers(20_000, 10**6))
def test_the_ranges_of_all_ranks_make_up_every_tensor(
    sizes: list[int], world: int, dtype: str, trainable: bool, file_bytes: int
) -> None:
    """Also those of 8-bit states and their scales: no slice cuts a block."""
    named = [(f"p{number}", (size,)) for number, size in enumerate(sizes)]
    shared = world if trainable else 1
    slots, numel = lay_out(named, ranks=shared)
    unit = Unit(0, "u", dtype, 2 if dtype == "bfloat16" else 4, trainable, numel, slots, ranks=shared)
    columns = columns_of(unit, States(kind=StateKind.INT8), None)
    ends: dict[tuple[str, int], int] = {}
    for rank in range(world):
        layout = Layout(Columns([unit], [columns], (), {0: owned_range(numel, rank, world)}), file_bytes)
        for _, cell in layout._cells:
            key = cell.label, cell.where[1]
            assert cell.begin == ends.get(key, 0) < cell.end
            ends[key] = cell.end
    expected = {
        (column.label, position): column.numel(slot.numel)
        for column in columns
        for position, slot in enumerate(slots)
        if slot.numel
    }
    assert ends == expected


def test_they_load_where_things_are_stored_otherwise(tmp_path: Path) -> None:
    """One rank's parameters and states are those of three, whoever has saved them."""
    for found in run(go_on, 3, 3, 3, "bfloat16-int8-host", str(tmp_path), 0, 1):
        assert not isinstance(found, (Raised, Ended)), found
    for name, strict in (("float32-float32-device", True), ("float16-int8-host", False)):
        (one,) = run(partial(convert, strict=strict), 1, 1, name, str(tmp_path))
        for found in run(partial(convert, strict=strict), 3, 3, name, str(tmp_path)):
            assert not isinstance(found, (Raised, Ended)), found
            assert found["parameters"] == one["parameters"] and found["packed"] == one["packed"]


def test_commands_read_them_as_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, files = "bfloat16-int8-host", {}
    for world in (1, 3):
        path = tmp_path / str(world)
        path.mkdir()
        for found in run(go_on, world, world, 3, name, str(path), 0, 1):
            assert not isinstance(found, (Raised, Ended)), found
        assert cli.main(["checkpoint", "ls", str(path / "saved")]) == 0
        assert "latest" in capsys.readouterr().out
        assert cli.main(["checkpoint", "verify", str(path / "saved")]) == 0
        for kind, output in (("safetensors", "w"), ("torch", "t"), ("dcp", "d")):
            arguments = ["checkpoint", "export", str(path / "saved"), "--output", str(path / output), "--to", kind]
            assert cli.main(arguments) == 0
        names = ("w/model.safetensors", "d/__0_0.distcp")
        saved = torch.load(path / "t/checkpoint.pt", weights_only=True)
        files[world] = saved, [(path / one).read_bytes() for one in names]
    (one, plain), (several, others) = files[1], files[3]
    assert plain == others
    assert one.keys() == several.keys() and one["optimizer"]["param_groups"] == several["optimizer"]["param_groups"]
    for number, state in one["optimizer"]["state"].items():
        assert all(torch.equal(value, several["optimizer"]["state"][number][key]) for key, value in state.items())
