from collections.abc import Sequence

def step(
    *,
    rule: int,
    state_kind: int,
    mode: int,
    numel: int,
    grad: int,
    grad_dtype: int,
    param: int,
    master: int,
    master_kind: int,
    state0: int,
    state1: int,
    units: int,
    emit: int,
    constants: Sequence[float],
    seed: int,
    number: int,
    offset: int,
    targets: tuple[int, int, int, int, int] = ...,
) -> None: ...
def lamb_moments(
    *,
    numel: int,
    grad: int,
    grad_dtype: int,
    param: int,
    master: int,
    master_kind: int,
    exp_avg: int,
    exp_avg_sq: int,
    constants: Sequence[float],
    param_squares: float,
    direction_squares: float,
) -> tuple[float, float]: ...
def lamb_apply(
    *,
    numel: int,
    param: int,
    master: int,
    master_kind: int,
    exp_avg: int,
    exp_avg_sq: int,
    emit: int,
    constants: Sequence[float],
    neg_step: float,
) -> None: ...
def recode_states(
    *,
    save: bool,
    state_kind: int,
    numel: int,
    exp_avg_fp32: int,
    exp_avg_sq_fp32: int,
    exp_avg: int,
    exp_avg_sq: int,
    units: int,
    seed: int,
    step: int,
    offset: int,
) -> None: ...
def sum_of_squares(address: int, dtype: int, numel: int, blocks: int = 0) -> tuple[float, int]: ...
def join_block_sums(blocks: int, count: int) -> float: ...
def take_gradient(
    src: int, src_dtype: int, dst: int, dst_dtype: int, numel: int, add: bool, measure: bool, blocks: int = 0
) -> tuple[float, int]: ...
def convert(src: int, src_dtype: int, dst: int, dst_dtype: int, numel: int) -> None: ...
def split_master(src: int, param: int, remainder: int, numel: int) -> None: ...
def join_master(param: int, remainder: int, dst: int, numel: int) -> None: ...
def stream_in_place(a: int, b: int, c: int, d: int, factor: float, numel: int) -> None: ...
def count_split_failures(first: int, last: int) -> int: ...
def cuda_texts() -> dict[str, str]: ...
def set_num_threads(count: int) -> None: ...
def num_threads() -> int: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def force_isa(name: str) -> None: ...
