"""What bench/cpu_adam.py times: the kernels, their peers and the roofline, over one shared set of arrays."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from offload import _cpu_adam
from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.optimizers import LAMB, SGD, Adagrad, AdamW, Lion

SPEC = AdamW(lr=1e-4, weight_decay=0.1)
HYPER = Hyper(SPEC, step=10, grad_scale=0.5)
ROOFLINE = "roofline: four float32 arrays in place"
TORCH = "torch AdamW fused, fp32"
DEEPSPEED = "DeepSpeed CPUAdam, fp32"
SEQUENCE = "ZeRO-Offload sequence: cast, unscale, {}, cast"
FULL = "float32 gradient, float32 master"
ADD, ACCUMULATE = "torch add_, bf16 to fp32", "accumulate, bf16 to fp32"
SUBNORMAL = "25 % subnormal moments: "


def base(states: StateKind) -> str:
    """Name the step with bf16 gradient and fp32 master, which emits a bf16 parameter."""
    return f"base, {states.value} states"


def split(states: StateKind) -> str:
    """Name the step with bf16 gradient and split master."""
    return f"split, {states.value} states"


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to time."""

    name: str
    bytes_per_element: int  # read and written
    run: Callable[[], object]
    prepare: Callable[[], None] | None = None  # before each run, not timed


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a touched tensor on huge pages where the system gives them."""  # (numel,) dtype, HOST
    room = mmap.mmap(-1, numel * dtype.itemsize + (2 << 20))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % (2 << 20)
    return torch.frombuffer(room, dtype=dtype, count=numel, offset=start).zero_()


class Memory:
    """The arrays that all contenders share, and values in them that are usual in training."""

    def __init__(self, numel: int) -> None:
        torch.manual_seed(0)
        self.numel = numel
        self.master, self.exp_avg, self.exp_avg_sq, self.grad32 = (allocate(numel, torch.float32) for _ in range(4))
        self.grad, self.param, self.emitted = (allocate(numel, torch.bfloat16) for _ in range(3))
        self.remainder = allocate(numel, torch.int16)
        self.states = {
            StateKind.FLOAT32: (self.exp_avg, self.exp_avg_sq),
            StateKind.BFLOAT16: (allocate(numel, torch.bfloat16), allocate(numel, torch.bfloat16)),
            StateKind.INT8: (allocate(numel, torch.uint8), allocate(numel, torch.uint8)),
        }
        self.units = allocate(StateKind.INT8.units_bytes(numel), torch.uint8)
        self.master.normal_(std=0.02)
        self.grad32.normal_(std=1e-2)
        self.usual_moments()
        cpu_adam.split_master(self.master.data_ptr(), self.param.data_ptr(), self.remainder.data_ptr(), numel)
        for kind in (StateKind.BFLOAT16, StateKind.INT8):
            first, second = self.states[kind]
            cpu_adam.save_states(
                kind,
                values=(self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()),
                states=(first.data_ptr(), second.data_ptr()),
                units=self.units.data_ptr() if kind is StateKind.INT8 else 0,
                numel=numel,
            )

    def usual_moments(self) -> None:
        """Write moments of usual sizes."""
        self.grad.copy_(self.grad32)
        self.exp_avg.normal_(std=1e-3)
        self.exp_avg_sq.fill_(1e-4)

    def subnormal_moments(self) -> None:
        """Make every fourth moment subnormal."""
        self.exp_avg[::4] = 1e-40
        self.exp_avg_sq[::4] = 1e-40
        self.grad[::4] = 0
        self.grad32[::4] = 0

    def usual_again(self) -> None:
        """Undo :meth:`subnormal_moments`."""
        self.grad32.normal_(std=1e-2)
        self.usual_moments()

    def arrays(self, kind: MasterKind, states: StateKind = StateKind.FLOAT32) -> StepArrays:
        """Describe a step on bf16 gradients, which emits beside an fp32 master."""
        is_split = kind is MasterKind.SPLIT
        first, second = self.states[states]
        return StepArrays(
            numel=self.numel,
            grad=self.grad.data_ptr(),
            grad_dtype=Dtype.BFLOAT16,
            param=self.param.data_ptr() if is_split else 0,
            master=(self.remainder if is_split else self.master).data_ptr(),
            master_kind=kind,
            states=(first.data_ptr(), second.data_ptr()),
            state_kind=states,
            units=self.units.data_ptr() if states is StateKind.INT8 else 0,
            emit=0 if is_split else self.emitted.data_ptr(),
            emit_dtype=None if is_split else Dtype.BFLOAT16,
        )


def peers(memory: Memory) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers to compare with, on the shared fp32 arrays; DeepSpeed's where it is installed."""
    parameter = torch.nn.Parameter(memory.master)
    parameter.grad = memory.grad32
    options = {"lr": SPEC.lr, "weight_decay": SPEC.weight_decay}
    found: dict[str, torch.optim.Optimizer] = {TORCH: torch.optim.AdamW([parameter], fused=True, **options)}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        found[DEEPSPEED] = DeepSpeedCPUAdam([parameter], adamw_mode=True, **options)
    except ImportError:
        pass
    for name, optimizer in found.items():
        optimizer.state[parameter] = {
            "step": torch.tensor(10.0) if name == TORCH else 10,
            "exp_avg": memory.exp_avg,
            "exp_avg_sq": memory.exp_avg_sq,
        }
    return found


def contenders(memory: Memory) -> Iterator[Contender]:
    """Yield everything that is timed, the roofline first."""
    numel = memory.numel
    full = [t.data_ptr() for t in (memory.master, memory.exp_avg, memory.exp_avg_sq, memory.grad32)]
    optimizers = peers(memory)
    plain = replace(memory.arrays(MasterKind.FLOAT32), emit=0, emit_dtype=None)
    yield Contender(ROOFLINE, 32, lambda: _cpu_adam.stream_in_place(*full, 1.0, numel))
    for name, optimizer in optimizers.items():
        yield Contender(name, 28, optimizer.step)
    same = replace(plain, grad=memory.grad32.data_ptr(), grad_dtype=Dtype.FLOAT32)
    yield Contender(FULL, 28, lambda: cpu_adam.step(same, HYPER))
    for states in StateKind:
        size = 4 * states.itemsize  # two states, read and written
        for kind, name, step_bytes in (
            (MasterKind.FLOAT32, base(states), 12 + size),
            (MasterKind.SPLIT, split(states), 10 + size),
        ):
            yield Contender(name, step_bytes, _step(memory.arrays(kind, states), HYPER))

    def sequence(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def run() -> None:
            memory.grad32.copy_(memory.grad)
            memory.grad32.mul_(0.5)
            optimizer.step()
            memory.emitted.copy_(memory.master)

        return run

    for name, optimizer in optimizers.items():
        yield Contender(SEQUENCE.format(name), 48, sequence(optimizer))
    base_step = _step(memory.arrays(MasterKind.FLOAT32), HYPER)
    yield Contender(SUBNORMAL + base(StateKind.FLOAT32), 28, base_step, memory.subnormal_moments)
    for name, optimizer in optimizers.items():
        yield Contender(SUBNORMAL + name, 28, optimizer.step, memory.subnormal_moments)
    acc, grad = memory.grad32, memory.grad
    yield Contender(ADD, 10, lambda: acc.add_(grad), memory.usual_again)

    def accumulate() -> None:
        cpu_adam.take_gradient(
            src=grad.data_ptr(),
            src_dtype=Dtype.BFLOAT16,
            dst=acc.data_ptr(),
            dst_dtype=Dtype.FLOAT32,
            numel=numel,
            add=True,
            measure=False,
        )

    yield Contender(ACCUMULATE, 10, accumulate)
    yield Contender("sum of squares, bf16", 2, lambda: cpu_adam.sum_of_squares(grad.data_ptr(), Dtype.BFLOAT16, numel))
    yield from _others(memory.arrays(MasterKind.FLOAT32))


def _others(arrays: StepArrays) -> Iterator[Contender]:
    specs = {
        "Sgd": SGD(lr=1e-5),
        "Momentum": SGD(lr=1e-5, momentum=0.9),
        "Lion": Lion(lr=1e-5),
        "Adagrad": Adagrad(lr=1e-5),
        "Lamb": LAMB(lr=1e-5, weight_decay=0.0),
    }
    for name, spec in specs.items():
        count = len(spec.states)
        step_bytes = 2 + 4 + 16 + 4 + 4 + 8 + 2 if isinstance(spec, LAMB) else 12 + 8 * count
        step = _step(replace(arrays, states=arrays.states[:count]), Hyper(spec))
        yield Contender(f"{name}, fp32 master, emit", step_bytes, step)


def _step(arrays: StepArrays, hyper: Hyper) -> Callable[[], None]:
    return lambda: cpu_adam.step(arrays, hyper)
