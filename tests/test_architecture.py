"""Imports go one way, and each duty has one home.

The rules are data below; the checker works on sources, so that it is itself tested on small synthetic ones.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Wings of the house and single files beside them, from the bottom to the top. A file may import from lower layers, and
# from its own wing without a circle. Wings of one layer do not import each other; single files of one layer may.
OFFLOAD_LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors",
        "sizes",
        "stats",
        "interrupt",
        "classes",
        "torch_private",
        "labels",
        "groups",
        "nested",
        "wrappers",
        "spec",
        "config",
        "known_models",
        "spans",
        "report",
        "trace",
        "replacing",
        "cache",
    ),
    ("seeing",),
    ("kernels",),
    ("distributed",),
    ("memory",),
    ("planning", "activations"),
    ("shards",),
    ("optim", "module"),
    ("checkpoint",),
    ("life", "optimizer", "several"),
    ("request",),
    ("build",),
    (
        "background",
        "closing",
        "deciding",
        "importing",
        "converting",
        "snapshot",
        "run_state",
        "sleeping",
        "durable",
        "watching",
        "training",
    ),
    ("checkpoints",),
    ("engine", "engine_runs", "engine_tensors"),
    ("pretrained", "initialisation", "measuring", "meta_models", "ops", "rehearsing", "remedies"),
    ("forecast",),
    ("trials",),
    ("predicting",),
    ("integrations",),
    ("deepspeed",),
    ("cli",),
    ("__main__",),
)
SWAP_LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "stats"),
    ("io", "space"),
    ("durable",),
    ("backing", "lifetime", "transfers"),
    ("commits", "objects"),
    ("store",),
)
LAYERS = {"offload": OFFLOAD_LAYERS, "swap": SWAP_LAYERS}

# package or module -> what it may not import, directly and at any depth of the source
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "swap": ("torch", "offload", "transformers"),
    "offload.config": ("torch",),
    "offload.distributed.records": ("torch",),
    "offload.distributed.words": ("torch",),
    "offload.groups": ("torch",),
    "offload.spec": ("torch",),
    "offload.seeing": ("torch",),
    "offload.cli.top": ("torch",),
    "offload.kernels": ("torch",),
    "offload.planning.hardware": ("torch",),
    "offload.planning.clusters": ("torch",),
    "offload.planning.scale": ("torch",),
    "offload.known_models": ("torch",),
    "offload.planning.asked": ("torch",),
    "offload.planning.homes": ("torch",),
    "offload.planning.plan": ("torch",),
    "offload.planning.planner": ("torch",),
    "offload.planning.sizing": ("torch",),
    "offload.planning.roles": ("torch",),
    "offload.planning.slices": ("torch",),
    "offload.planning.units": ("torch",),
    "offload.planning.schedule": ("torch",),
}
# compiled module -> the files that may import it
FACES = {
    "swap._aio": ("swap.io.extension",),
    "offload._cpu_adam": ("offload.kernels.extension",),
}
REBINDS_DATA = {"offload.module.binding", "offload.module.absent"}  # the latter of a parameter whose engine is gone
REBINDS_DATA |= {"offload.torch_private"}  # of a tensor that it makes
SHARD_FIELDS = (
    "state",
    "_state",
    "readers",
    "writing",
    "drops",
    "home_buffer",
    "spare_buffer",
    "work_buffer",
    "side",
    "version",
)
WRITES_SHARD_STATE = {"offload.shards.copies"}
USES_EVENTS = {f"offload.shards.{name}" for name in ("copies", "gradients", "leases")}  # and so change a state
PRIVATE_TORCH = re.compile(r"\btorch\._[A-Za-z]|\bfrom torch(\.\w+)*(\._\w+| import (.*\W)?_\w)|\btorch\.autograd\._")
USES_PRIVATE_TORCH = {"offload.torch_private"}
ASKS_KIND = re.compile(r"\btorch\.(cuda|accelerator|xpu|mps)\b|\bdevice\.type (==|!=|in|not in)|\.is_(cuda|cpu)\b")
KNOWS_DEVICES = {f"offload.memory.{name}" for name in ("accelerator", "devices", "page_lock")}
# file -> the one private attribute of another object that it may write: a tensor of our own class, two of torch's own
WRITES_PRIVATE = {"offload.module.handles": "_incoming", "offload.optim.takeover": "_opt_called"}
WRITES_PRIVATE |= {"offload.torch_private": "_maybe_set"}
MAY_PRINT = {f"offload.{name}" for name in ("__main__", "cli.main", "cli.finetune.run", "cli.finetune.progress")}
MAY_PRINT |= {"offload.cli.drive.command", "offload.cli.checkpoint.operations"}
MAY_PRINT |= {f"offload.cli.{name}" for name in ("completion", "generate", "merge", "plan", "scale", "top")}

Sources = Mapping[str, str]  # dotted module name -> source text


def read_sources(root: Path = ROOT) -> dict[str, str]:
    """Return the sources of both packages; files that do not exist yet are simply not there."""
    sources = {}
    for package in LAYERS:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def imported(name: str, source: str, modules: set[str]) -> set[str]:
    """Return the dotted names that `name` imports, anywhere in its source, relative imports resolved."""
    package = name if name in LAYERS else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            for (
                alias
            ) in node.names:  # `from offload import hooks` names a module, `from offload import Engine` does not
                full = f"{base}.{alias.name}"
                found.add(full if full in modules or full in FACES or base in LAYERS else base)
    return found


def rank_of(name: str) -> int | None:
    """Return the layer of a module, counted from the bottom; None for a package and for an unknown module."""
    package, _, rest = name.partition(".")
    for rank, layer in enumerate(LAYERS.get(package, ())):
        if rest.split(".")[0] in layer:
            return rank
    return None


def apart(name: str, target: str) -> bool:
    """Tell whether two modules of one layer are in different wings; single files beside the wings are in none."""
    first, second = name.split("."), target.split(".")
    return first[1] != second[1] and max(len(first), len(second)) > 2


def import_violations(sources: Sources) -> Iterator[str]:
    modules = set(sources)
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        package, _, rest = name.partition(".")
        targets = imported(name, source, modules)
        for prefix, forbidden in FORBIDDEN.items():
            if name == prefix or name.startswith(prefix + "."):
                for target in sorted(targets):
                    if target.split(".")[0] in forbidden:
                        yield f"{name} imports {target}, which {prefix} must not know"
        for face, homes in FACES.items():
            if face in targets and name not in homes:
                yield f"{name} imports {face}; only {' and '.join(homes)} may"
        if not rest:
            continue  # the package's __init__ collects the public names
        rank = rank_of(name)
        if rank is None:
            yield f"{name} has no layer; add it to the layers in tests/test_architecture.py"
            continue
        graph[name] = set()
        for target in sorted(targets):
            target_package, _, target_rest = target.partition(".")
            if target_package != package or target in FACES:
                continue
            if not target_rest or (target not in modules and rank_of(target) is None):
                # `from offload import Engine`: a public name, which the package takes from every layer
                if rank < rank_of_top(package):
                    yield f"{name} imports the package {package} itself; import the defining module"
                continue
            target_rank = rank_of(target)
            if target_rank is None:
                continue  # reported for that module itself
            if target_rank > rank:
                yield f"{name} (layer {rank}) imports {target} (layer {target_rank}): imports go down only"
            elif target_rank == rank and apart(name, target):
                yield f"{name} imports {target}: wings of one layer do not know each other"
            elif target_rank == rank and target != name:
                graph[name].add(target)
    yield from cycles(graph)


def rank_of_top(package: str) -> int:
    """Return the lowest layer that may use the package's public names: what is built on the library."""
    return next((rank for rank, layer in enumerate(LAYERS[package]) if "cli" in layer), len(LAYERS[package]))


def cycles(graph: Mapping[str, set[str]]) -> Iterator[str]:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield "import cycle: " + " > ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                yield from visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        yield from visit(name, ())


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        found = [node.target]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found.extend(target.elts)
        elif isinstance(target, ast.Starred):
            found.append(target.value)
        else:
            yield target


def assigned_attributes(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, expression, attribute) of every `expression.attribute = ...` and constant setattr."""
    for node in ast.walk(ast.parse(source)):
        for target in _targets(node):
            if isinstance(target, ast.Attribute):
                yield node.lineno, ast.unparse(target.value), target.attr  # type: ignore[attr-defined]
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("setattr", "object.__setattr__")
            and len(node.args) == 3
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, ast.unparse(node.args[0]), str(node.args[1].value)


def duty_violations(sources: Sources) -> Iterator[str]:
    for name, source in sources.items():
        if not name.startswith(("offload", "swap")):
            continue
        for line, owner, attribute in assigned_attributes(source):
            private = attribute.startswith("_") and not attribute.startswith("__")
            if private and owner not in ("self", "cls") and WRITES_PRIVATE.get(name) != attribute:
                yield f"{name}:{line} assigns {owner}.{attribute}; only an object itself writes what is private to it"
            if attribute == "data" and owner != "self" and name not in REBINDS_DATA:
                yield f"{name}:{line} assigns {owner}.data; only binding.py rebinds a parameter's data"
            if attribute in SHARD_FIELDS and owner != "self" and name.startswith("offload"):
                if name not in WRITES_SHARD_STATE:
                    yield f"{name}:{line} assigns {owner}.{attribute}; only copies.py writes a shard's fields"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module == "offload.shards.shard" and name not in USES_EVENTS:
                if any(alias.name in ("Event", "advance") for alias in node.names):
                    yield f"{name}:{node.lineno} imports events; who changes a shard's state is in USES_EVENTS"
        if name not in USES_PRIVATE_TORCH:
            for line, text in enumerate(source.splitlines(), start=1):
                if PRIVATE_TORCH.search(text):
                    yield f"{name}:{line} uses private torch; it has a room, torch_private.py"
        if name not in KNOWS_DEVICES:
            for line, text in enumerate(source.splitlines(), start=1):
                if ASKS_KIND.search(text):
                    yield f"{name}:{line} asks for the kind of device; ask what it can, of memory/device.py"
        if name not in MAY_PRINT:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                    yield f"{name}:{node.lineno} prints; use logging"


def callable_attributes(sources: Sources) -> set[str]:
    """Return the names of attributes that hold something to call: annotated so, or called and no method anywhere."""
    found, called, methods, assigned, weak = set[str](), set[str](), set[str](), set[str](), set[str]()
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Attribute, ast.Name)):
                target, kind = node.target, ast.unparse(node.annotation)
                name = target.attr if isinstance(target, ast.Attribute) else target.id
                found.update([name] if "Callable[" in kind else [])
                weak.update([name] if "weakref.ref[" in kind else [])
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called.add(node.func.attr)
            elif isinstance(node, ast.ClassDef):
                methods.update(part.name for part in node.body if isinstance(part, ast.FunctionDef))
        assigned.update(attribute for _, _, attribute in assigned_attributes(source))
    return (found | (called & assigned - methods)) - weak


# file -> what it may fill in: the signal handler that was there before, whose place it takes for a while; a number of
# accelerate's, which has the name of something to call
KEEPS_CALLABLES = {"offload.interrupt": "_handler", "offload.integrations.accelerate": "step"}


def filled_in_violations(sources: Sources) -> Iterator[str]:
    """Yield where somebody gives an object something to call after it was made."""
    slots = callable_attributes(sources)
    for name, source in sources.items():
        constructors = [
            (node.lineno, node.end_lineno or 0)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__new__", "__post_init__")
        ]
        for line, owner, attribute in assigned_attributes(source):
            inside = any(first <= line <= last for first, last in constructors)
            if KEEPS_CALLABLES.get(name) == attribute:
                continue
            if attribute in slots and not (owner == "self" and inside):
                yield f"{name}:{line} fills in {owner}.{attribute}; give what is to be called to the constructor"


def test_nothing_to_call_is_filled_in_later() -> None:
    assert list(filled_in_violations(read_sources())) == []


def test_imports_go_one_way() -> None:
    assert list(import_violations(read_sources())) == []


def test_every_duty_has_one_home() -> None:
    assert list(duty_violations(read_sources())) == []


def test_native_code_knows_no_torch() -> None:
    pattern = re.compile(r"#\s*include\s*[<\"](torch|ATen|c10)/")
    files = [path for ext in ("*.cc", "*.cpp", "*.h") for path in (ROOT / "csrc").rglob(ext)]
    assert [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))] == []


def _modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_swap_runs_without_torch() -> None:
    assert _modules_after("import swap, swap.store") & {"torch", "offload", "numpy"} == set()


def test_options_need_neither_torch_nor_kernels() -> None:
    loaded = _modules_after("from offload import AdamW, Config; AdamW(lr=0.1), Config()")
    assert loaded & {"torch", "numpy", "offload._cpu_adam"} == set()


def test_import_is_quick() -> None:
    """Heavy libraries are imported by the functions that use them."""
    loaded = _modules_after("import offload, offload.cli.main")
    heavy = {"torch", "transformers", "matplotlib", "gguf", "accelerate", "peft", "safetensors", "tqdm"}
    assert loaded & {*heavy, "aiofiles"} == set()
    assert "aiofiles" not in _modules_after("import offload; offload.Engine")


# --- the checker itself ---


FILLED = "class A:\n    def __init__(self) -> None:\n        self.on_end: Callable[[], None] = lambda: None\n"


@pytest.mark.parametrize(
    "source",
    [
        FILLED + "a.on_end = done",
        FILLED + "    def attach(self, end: Any) -> None:\n        self.on_end = end",
        FILLED + "setattr(a, 'on_end', done)",
        "class A:\n    def __init__(self) -> None:\n        self.end = None\n    def f(self):\n        self.end()\n"
        "a.end = done",
    ],
)
def test_checker_finds_what_is_filled_in(source: str) -> None:
    assert any("fills in" in found for found in filled_in_violations({"offload.engine": source}))


@pytest.mark.parametrize(
    "source",
    [FILLED, FILLED + "a.numbers = 3", "class A:\n    def end(self): pass\na.end()", "a.count += f(1)"],
)
def test_checker_accepts_what_is_given_at_once(source: str) -> None:
    assert list(filled_in_violations({"offload.engine": source})) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"swap.store": "import torch"}, "swap.store imports torch"),
        ({"swap.store": "def f():\n    from torch.nn import Module"}, "swap.store imports torch.nn"),
        ({"swap.io.aio": "from offload.errors import OffloadError"}, "swap.io.aio imports offload.errors"),
        ({"swap.space.extents": "from swap.store import SwapStore", "swap.store": ""}, "imports go down only"),
        (
            {"offload.memory.budget": "import offload.shards.manager", "offload.shards.manager": ""},
            "imports go down only",
        ),
        ({"offload.memory.budget": "from offload.shards.manager import Manager"}, "imports go down only"),
        (
            {"offload.memory.budget": "from ..shards.manager import Manager", "offload.shards.manager": ""},
            "imports go down only",
        ),
        (
            {"offload.memory.budget": "from ..shards import manager", "offload.shards.manager": ""},
            "imports go down only",
        ),
        ({"offload.module.hooks": "from offload import Engine"}, "imports the package offload itself"),
        ({"offload.module.hooks": "import offload"}, "imports the package offload itself"),
        ({"offload.helpers": ""}, "has no layer"),
        ({"offload.optimizer": "from offload import _cpu_adam"}, "only offload.kernels.extension may"),
        ({"offload.planning.plan": "import torch"}, "offload.planning.plan must not know"),
        (
            {
                "offload.module.hooks": "from offload.module import handles",
                "offload.module.handles": "import offload.module.hooks",
            },
            "import cycle",
        ),
        ({"offload.module.hooks": "import offload.optim.rules", "offload.optim.rules": ""}, "do not know each other"),
    ],
)
def test_checker_finds_wrong_imports(sources: Sources, expected: str) -> None:
    assert any(expected in found for found in import_violations(sources)), list(import_violations(sources))


@pytest.mark.parametrize(
    "sources",
    [
        {"offload.shards.manager": "from offload.shards.shard import Shard\nfrom swap import SwapStore\nimport torch"},
        {"offload.shards.manager": "from . import shard", "offload.shards.shard": "from .errors import OffloadError"},
        {
            "offload.cli.finetune.run": "import offload\nfrom offload import Engine",
            "offload": "from .engine import Engine",
        },
        {"offload.kernels.extension": "from offload import _cpu_adam", "swap.io.extension": "from swap import _aio"},
        {"offload.config": "from offload.errors import ConfigError", "offload.errors": ""},
    ],
)
def test_checker_accepts_right_imports(sources: Sources) -> None:
    assert list(import_violations(sources)) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"offload.engine": "param.data = x"}, "only binding.py"),
        ({"offload.engine": "a, p.data = 1, x"}, "only binding.py"),
        ({"offload.engine": "setattr(p, 'data', x)"}, "only binding.py"),
        ({"offload.engine": "shard.state = State.DIRTY"}, "only copies.py"),
        ({"offload.module.hooks": "self.shards[0].state = State.DIRTY"}, "only copies.py"),
        ({"offload.shards.leases": "shard.readers += 1"}, "only copies.py"),
        ({"offload.shards.leases": "shard.writing = False"}, "only copies.py"),
        ({"offload.shards.working_set": "shard.work_buffer = target"}, "only copies.py"),
        ({"offload.engine": "from offload.shards.shard import Event, Role"}, "imports events"),
        ({"swap.transfers": "ticket._io = flying"}, "only an object itself"),
        ({"offload.memory.budget": "def f():\n    print('x')"}, "offload.memory.budget:2 prints"),
        ({"swap.store": "print('x')"}, "prints"),
        ({"offload.module.hooks": "with torch._C.DisableTorchFunction(): pass"}, "uses private torch"),
        ({"offload.module.hooks": "from torch.utils._python_dispatch import TorchDispatchMode"}, "uses private torch"),
        ({"offload.module.hooks": "from torch.nn import Module, _reduction"}, "uses private torch"),
        ({"offload.module.hooks": "x = 1\nif device.type == 'cpu': pass"}, "hooks:2 asks for the kind of device"),
        ({"offload.shards.tiers": "torch.cuda.synchronize()"}, "asks for the kind of device"),
    ],
)
def test_checker_finds_duties_in_the_wrong_place(sources: Sources, expected: str) -> None:
    assert any(expected in found for found in duty_violations(sources)), list(duty_violations(sources))


@pytest.mark.parametrize(
    "sources",
    [
        {"offload.module.binding": "param.data = x"},
        {"offload.shards.copies": "shard.state = State.DIRTY"},
        {"offload.shards.leases": "from offload.shards.shard import Event"},
        {"swap.transfers": "self._io = flying"},
        {"offload.optimizer": "self.state[p] = {}\nself.state = {}"},
        {"offload.engine": "x = param.data\nlogger.info('x')"},
        {"offload.cli.main": "print('x')"},
    ],
)
def test_checker_accepts_duties_at_home(sources: Sources) -> None:
    assert list(duty_violations(sources)) == []
