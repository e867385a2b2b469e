"""What a checkpoint's files are: readable by what docs/checkpoints.md says, and by any reader of safetensors."""

from __future__ import annotations

import ast
import enum
import gc
import json
import math
import mmap
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from harness import tight
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoints import Run, directory, net

from offload import CheckpointError
from offload.checkpoint.columns import divide
from offload.checkpoint.format import reader as reader_file
from offload.checkpoint.format import staging as staging_file
from offload.checkpoint.format.index import Entry, Index, Range
from offload.checkpoint.format.nested import Encoder, decode
from offload.checkpoint.format.reader import Reader, Source
from offload.checkpoint.format.safetensors import Member
from offload.checkpoint.format.staging import Staging
from offload.checkpoint.format.writer import FileWriter
from offload.planning.units import PAD_NUMEL, Slot, Unit
from swap import Aio, Fault, FaultAction, SwapDeadlineError

pytestmark = pytest.mark.usefixtures("single_torch_thread")
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "checkpoints.md"


def documented_reader() -> dict[str, Any]:
    """Return what the reader in the document defines; it may use safetensors, numpy and the standard library."""
    (source,) = (code for code in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL) if "def " in code)
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 30
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    roots = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in names}
    assert roots <= {"safetensors", "numpy", *sys.stdlib_module_names}
    found: dict[str, Any] = {}
    exec(source, found)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("file_bytes", [1 << 30, 20_000])
def test_the_reader_of_the_document(dtype: torch.dtype, file_bytes: int, tmp_path: Path) -> None:
    """It finds what the engine's own dicts have, also where files are so small that tensors are cut."""
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=dtype, initial_loss_scale=8.0)
    with run.engine as engine:
        run.train(range(2))
        folder = engine._checkpoints.save(
            tmp_path / "saved", tag=None, client_state=lambda: {"t": torch.arange(3)}, keep=None, file_bytes=file_bytes
        )
        parameters, packed = engine.state_dict(), engine.optimizer.state_dict()
    files = list(folder.glob("tensors-*"))
    assert len(files) == 1 if file_bytes == 1 << 30 else len(files) > 3
    reader = documented_reader()
    tensors = reader["read"](folder)
    assert tensors["value", "client_state.t"].tolist() == [0, 1, 2]
    trained = [name for name, p in run.model.named_parameters() if p.requires_grad]
    positions = {name: at for group in packed["param_groups"] for name, at in _named(run, group)}
    for name, _ in run.model.named_parameters():
        words = torch.from_numpy(tensors["parameter", name].copy())
        value = parameters[name]
        bits = value.view(torch.int16) if dtype == torch.bfloat16 else value
        assert torch.equal(words.view(torch.int16) if dtype == torch.bfloat16 else words, bits), name
        if name not in trained or not value.numel():
            continue
        state = packed["state"][positions[name]]
        assert numpy.array_equal(tensors["exp_avg", name], state["exp_avg"].numpy())
        assert numpy.array_equal(reader["master"](tensors, name), state.get("master", value).numpy())


def _named(run: Run, group: dict[str, Any]) -> list[tuple[str, int]]:
    names = {id(p): name for name, p in run.model.named_parameters()}
    assert run.engine.optimizer is not None
    ordered = [names[id(p)] for g in run.engine.optimizer.param_groups for p in g["params"]]
    return [(ordered[at], at) for at in group["params"]]


def test_any_reader_of_safetensors(tmp_path: Path) -> None:
    """The library checks for itself that the files have neither holes nor overlaps."""
    from safetensors.torch import load_file

    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=torch.bfloat16)
    with run.engine as engine:
        run.train(range(1))
        folder = engine.save_checkpoint(tmp_path / "saved")
        expected = engine.state_dict()
    found = load_file(folder / "tensors-00001.safetensors")
    for name in dict(run.model.named_parameters()):
        if expected[name].numel():
            assert torch.equal(found[f"parameter:{name}"], expected[name])
    json.loads((folder / "index.json").read_text(), parse_constant=lambda word: pytest.fail(word))


@given(
    sizes=st.lists(st.integers(1, 5).map(lambda pages: pages * PAD_NUMEL), min_size=1, max_size=8),
    element_bytes=st.integers(1, 16),
    limit=st.integers(1, 400_000),
)
def test_files_divide_all_elements(sizes: list[int], element_bytes: int, limit: int) -> None:
    """Every element is in one file, in order; no file is larger than it may be, but for a page of elements."""
    units = [
        Unit(index, f"u{index}", "float32", 4, True, numel, (Slot("p", (numel,), numel, 0, 0),))
        for index, numel in enumerate(sizes)
    ]
    spans = divide(units, [element_bytes] * len(units), limit)
    assert [span.file for span in spans] == sorted(span.file for span in spans)
    for unit in units:
        mine = [span for span in spans if span.unit == unit.index]
        assert (mine[0].begin, mine[-1].end) == (0, unit.numel)
        assert all(a.end == b.begin for a, b in zip(mine, mine[1:], strict=False))
        assert all(span.begin % PAD_NUMEL == 0 for span in mine)
    for file in {span.file for span in spans}:
        size = sum((span.end - span.begin) * element_bytes for span in spans if span.file == file)
        assert size <= max(limit, PAD_NUMEL * element_bytes)


@given(data=st.data())
def test_files_are_written_from_several_places_at_once(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Whatever the sizes and the order in which regions grow, the bytes come back, in any cut."""
    folder = tmp_path_factory.mktemp("file")
    sizes = data.draw(st.lists(st.lists(st.integers(1, 40_000), min_size=1, max_size=4), min_size=1, max_size=3))
    regions = {
        f"r{row}": [Member(f"r{row}.{column}", "U8", (size,)) for column, size in enumerate(line)]
        for row, line in enumerate(sizes)
    }
    content = {
        member.key: numpy.random.default_rng(len(member.key) + member.size_bytes).bytes(member.size_bytes)
        for region in regions.values()
        for member in region
    }
    queues = {
        name: [(m.key, at, min(at + 9000, m.size_bytes)) for m in region for at in range(0, m.size_bytes, 9000)]
        for name, region in regions.items()
    }
    with Staging(len(regions) + 1, 16384, deadline_s=60) as staging:
        writer = FileWriter(folder / "f.safetensors", regions, staging)
        while queues:
            name = data.draw(st.sampled_from(sorted(queues)))
            key, begin, end = queues[name].pop(0)
            piece = numpy.frombuffer(content[key], numpy.uint8)[begin:end].copy()
            writer.append(name, key, piece.ctypes.data, end - begin)
            if not queues[name]:
                del queues[name]
        writer.finish()
        entries = tuple(
            Entry(
                "value",
                key,
                "U8",
                (len(value),),
                (Range("f.safetensors", key, 0, len(value), writer.sums[key].result()),),
            )
            for key, value in content.items()
        )
        source = Source(folder, Index("t", 1, entries, {"f.safetensors": writer.stored}, {}))
        with Reader({"": source.stretches(entries)}, staging) as reader:
            for value in content.values():
                found = numpy.empty(len(value), numpy.uint8)
                cut = data.draw(st.integers(0, len(value)))
                reader.take("", found.ctypes.data, cut)
                reader.take("", found.ctypes.data + cut, len(value) - cut)
                assert found.tobytes() == value


LATE_BYTES = 1 << 20


def test_a_file_that_something_may_still_be_written_to_is_not_closed(tmp_path: Path) -> None:
    """Its number would be another file's, which would get the bytes."""
    with Aio(deadline_s=0.05) as aio:
        aio.inject(Fault(action=FaultAction.DELAY, delay_s=0.4))
        content = numpy.full(2 * LATE_BYTES, 1, numpy.uint8)
        with pytest.raises(SwapDeadlineError), Staging(2, LATE_BYTES, deadline_s=0.05, aio=aio) as staging:
            writer = FileWriter(tmp_path / "f", {"r": [Member("m", "U8", (2 * LATE_BYTES,))]}, staging)
            try:
                writer.append("r", "m", content.ctypes.data, 2 * LATE_BYTES)
                writer.write_rest()
            finally:
                staging.settle()
                writer.close()
        others = [os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT) for number in range(4)]
        while aio.stats().in_flight:
            pass
        assert [os.fstat(fd).st_size for fd in others] == [0] * len(others)
        assert aio.stats().write_errors == 0
        for fd in others:
            os.close(fd)


def test_buffers_that_something_may_still_come_to_are_nobody_elses(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes([1]) * LATE_BYTES)
    with Aio(deadline_s=0.05) as aio, open(tmp_path / "f", "rb") as file:
        aio.inject(Fault(action=FaultAction.DELAY, delay_s=0.4))
        staging = Staging(8, LATE_BYTES, deadline_s=0.05, aio=aio)
        with staging:
            address = staging.take()
            staging.give(address, [aio.read(file.fileno(), 0, address, LATE_BYTES)])
        del staging
        gc.collect()
        others = [mmap.mmap(-1, size) for size in (8 * LATE_BYTES, 10 * LATE_BYTES, LATE_BYTES) * 4]
        while aio.stats().in_flight:
            pass
        assert not any(any(other[:]) for other in others)
        assert aio.stats().read_errors == 0  # it has come to where it belongs


@given(st.data())
def test_a_part_of_a_tensor_is_read_by_the_blocks_it_lies_in(data: st.DataObject) -> None:
    """Whatever the ranges and the part: the bytes are right, others are not read, and damage in them is not seen."""
    block, numel = 24_576, data.draw(st.integers(1, 60_000), "elements")
    cuts = sorted(data.draw(st.sets(st.integers(1, max(numel - 1, 1)), max_size=3), "cuts") - {numel})
    begin = data.draw(st.integers(0, numel - 1), "begin")
    end = data.draw(st.integers(begin + 1, numel), "end")
    harmed = data.draw(st.integers(0, numel - 1), "harmed")
    value = numpy.arange(numel, dtype=numpy.uint16)
    spans = list(zip([0, *cuts], [*cuts, numel], strict=True))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        for module in (staging_file, reader_file):
            patch.setattr(module, "BLOCK_BYTES", block)
        folder = Path(name)
        with Staging(6, 16384, deadline_s=60) as staging:
            members = [Member(f"r{number}", "U16", (last - first,)) for number, (first, last) in enumerate(spans)]
            writer = FileWriter(folder / "f.safetensors", {"all": members}, staging)
            for member, (first, last) in zip(members, spans, strict=True):
                writer.append("all", member.key, value[first:].ctypes.data, 2 * (last - first))
            writer.finish()
            ranges = tuple(
                Range("f.safetensors", m.key, *span, writer.sums[m.key].result())
                for m, span in zip(members, spans, strict=True)
            )
            entry = Entry("value", "v", "U16", (numel,), ranges)
            source = Source(folder, Index("t", 1, (entry,), {"f.safetensors": writer.stored}, {}))
            first, last = next(span for span in spans if span[0] <= harmed < span[1])
            member = source.range_sums(entry, ranges[spans.index((first, last))])[1]
            with (folder / "f.safetensors").open("r+b") as file:
                file.seek(member.offset + 2 * (harmed - first))
                file.write(bytes([value[harmed] % 256 ^ 1]))
            at = 2 * (harmed - first) // block * block  # of the block that is damaged, in its range
            touched = first + at // 2 < end and min(first + (at + block) // 2, last) > begin
            found = numpy.empty(end - begin, numpy.uint16)
            stretches = list(source.stretches_of(entry, begin, end))
            assert sum(stretch.size_bytes for stretch in stretches) <= 2 * (end - begin) + 2 * block * len(spans)
            try:
                with Reader({"": stretches}, staging) as reader:
                    cut = data.draw(st.integers(0, end - begin), "cut")
                    reader.take("", found.ctypes.data, 2 * cut)
                    reader.take("", found.ctypes.data + 2 * cut, 2 * (end - begin - cut))
                assert not touched
                assert (found == value[begin:end]).all()
            except CheckpointError as error:
                assert touched and "is damaged" in str(error)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(value=PLAIN)
def test_plain_values_come_back(value: Any) -> None:
    encoded = json.loads(json.dumps(Encoder().encode(value, "client_state"), allow_nan=False))
    assert repr(decode(encoded, lambda name: pytest.fail(name))) == repr(value)


def test_tensors_in_plain_values_come_back() -> None:
    encoder = Encoder()
    value = {"a": [torch.arange(3), {1: torch.tensor(2.5)}], "a[0]": torch.zeros(0)}
    encoded = json.loads(json.dumps(encoder.encode(value, "state")))
    found = decode(encoded, encoder.tensors.__getitem__)
    assert len(encoder.tensors) == 3
    assert torch.equal(found["a"][0], value["a"][0]) and found["a"][1][1] == 2.5 and found["a[0]"].numel() == 0


class Half(float):
    def __float__(self) -> float:
        return 0.0


class Kind(str, enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (numpy.float64(0.1), 0.1),
        (numpy.float64("nan"), math.nan),
        (numpy.float32(0.5), 0.5),
        (numpy.int64(-3), -3),
        (numpy.uint8(200), 200),
        (numpy.bool_(True), True),
        (numpy.str_("a"), "a"),
        (Half(0.5), 0.5),
        (Kind.FAST, "fast"),
        (Level.HIGH, 3),
        ([{"x": (numpy.int32(1), {numpy.int64(2): numpy.float16(2)})}], [{"x": (1, {2: 2.0})}]),
    ],
)
def test_scalars_of_numpy_and_of_classes_made_of_plain_ones_come_back_plain(value: Any, plain: Any) -> None:
    encoded = json.loads(json.dumps(Encoder().encode(value, "client_state"), allow_nan=False))
    found = decode(encoded, lambda name: pytest.fail(name))
    assert repr(found) == repr(plain) and type(found) is type(plain)


class Custom:
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"model": {"x": [1, Custom()]}}, r"client_state.model.x\[1\]: .* Custom"),
        ({"f": len}, "client_state.f: .*builtin_function"),
        ({"n": numpy.zeros(3)}, "client_state.n: .*ndarray"),
        ({"n": numpy.complex64(1)}, "client_state.n: .*complex64"),
        ({"n": numpy.timedelta64(1, "ns")}, "client_state.n: .*timedelta64"),
        ({"n": numpy.longdouble(1)}, "client_state.n: .*longdouble"),
        ({"m": torch.zeros(2, device="meta")}, "client_state.m: .*meta"),
    ],
)
def test_other_values_are_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(CheckpointError, match=where + r".*scheduler"):
        Encoder().encode(value, "client_state")


def test_shapes_of_numbers() -> None:
    assert Member("x", "BF16", (2, 3)).size_bytes == 2 * math.prod((2, 3))
