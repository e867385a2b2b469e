"""What each key of a DeepSpeed configuration is here: a table of plain values.

``docs/deepspeed.md`` shows the same table. Next: :mod:`offload.integrations.deepspeed.config` reads a file by it.

Source: DeepSpeed 0.19.8, and older keys that scripts still have.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from typing import Any


class Does(enum.Enum):
    """What happens to a key."""

    MAPPED = "mapped"
    NEEDLESS = "no meaning here"
    LEFT_OUT = "left out"  # asked for and not done; losses are the same
    REFUSED = "refused"  # done otherwise, losses would be others


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Keys of one section that are treated alike.

    Attributes:
        section: dotted path of the section; empty for the top.
        names: of the keys. One that ends in ``.*`` is a section whose keys are not told apart.
        does: what happens to them.
        here: what they are here, why not, or what to do instead.
        off: values with which they ask for nothing, beside None, False and an empty or disabled section. Where True
            is one, False asks.
    """

    section: str
    names: tuple[str, ...]
    does: Does
    here: str
    off: tuple[Any, ...] = ()

    def asks(self, value: Any) -> bool:
        """Tell whether a value asks for something."""
        if isinstance(value, Mapping):
            said = list(_enabled(value))
            return any(said) if said else bool(value)
        if any(one is True for one in self.off):
            return value is False
        return value not in (None, False, *self.off)


def _enabled(section: Mapping[str, Any]) -> Iterator[bool]:
    for name, value in section.items():
        if name == "enabled":
            yield bool(value)
        elif isinstance(value, Mapping):
            yield from _enabled(value)


def _row(section: str, names: str, does: Does, here: str, *off: Any) -> Row:
    return Row(section, tuple(names.split()), does, here, off)


_M, _N, _L, _R = Does.MAPPED, Does.NEEDLESS, Does.LEFT_OUT, Does.REFUSED
_ZERO, _STATES, _PARAM = "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"

ROWS: tuple[Row, ...] = (
    _row("", "train_batch_size train_micro_batch_size_per_gpu", _M, "checked as DeepSpeed does; the loader's size"),
    _row("", "gradient_accumulation_steps", _M, "`gradient_accumulation_steps`"),
    _row("", "gradient_clipping", _M, "`max_grad_norm`; 0 clips nothing"),
    _row("", "steps_per_print", _M, "a line of `logging` at INFO every so many steps"),
    _row("", "dataloader_drop_last", _M, "of the loader"),
    _row("", "offload.*", _M, "options of `offload.Config`, on top; DeepSpeed does not look at this section"),
    _row("optimizer", "type params.*", _M, "the optimizer, unless `initialize` gets one"),
    _row("optimizer", "legacy_fusion", _N, "one kernel per optimizer"),
    _row("scheduler", "type params.*", _M, "the same rates, unless `initialize` gets a schedule"),
    _row("bf16", "enabled", _M, '`dtype="bfloat16"`, with exact fp32 masters'),
    _row("bf16", "immediate_grad_update", _N, "gradients leave as they come"),
    _row("bf16", "check_grad_overflow", _N, "a gradient that is not finite is a `NonFiniteError`; no step is skipped"),
    _row("bf16", "bf16_master_weights_and_grads", _R, "masters are fp32, in two more bytes"),
    _row("bf16", "bf16_optimizer_states", _R, 'rounds otherwise; `"offload": {"state_dtype": "bfloat16"}`'),
    _row("fp16", "enabled", _M, '`dtype="float16"`'),
    _row("fp16", "loss_scale", _M, "0: dynamic; else a scale that stays"),
    _row("fp16", "initial_scale_power", _M, "`initial_loss_scale`, the power of 2"),
    _row("fp16", "loss_scale_window", _M, "`loss_scale_window`"),
    _row("fp16", "hysteresis", _M, "`loss_scale_hysteresis`"),
    _row("fp16", "min_loss_scale", _M, "`min_loss_scale`"),
    _row("fp16", "consecutive_hysteresis", _R, "hysteresis is refilled when the scale grows; leave it out"),
    _row("fp16", "auto_cast", _R, "cast the batch: `batch.half()`"),
    _row("fp16", "fp16_master_weights_and_grads", _R, "masters are fp32; leave it out"),
    _row("", "torch_autocast.*", _R, "put `torch.autocast` around the forward"),
    _row(
        _ZERO,
        "stage",
        _M,
        "0 to 3: that of several processes (0 is 1, the same bits); one process has slices of nothing",
    ),
    _row(_PARAM, "device", _M, "`offload_param`; none: the plan chooses, the device first"),
    _row(_STATES, "device", _M, "`offload_optimizer`; none: the plan chooses"),
    _row(_PARAM, "nvme_path", _M, "`nvme_path`; two that differ share all bytes"),
    _row(_STATES, "nvme_path", _M, "as above"),
    _row(_PARAM, "pin_memory buffer_count buffer_size max_in_cpu", _N, 'the plan has them; `max_memory["cpu"]`'),
    _row(_STATES, "pin_memory buffer_count pipeline_read pipeline_write fast_init", _N, "the plan has them"),
    _row(_STATES, "ratio", _L, "all states are in one tier", 1, 1.0),
    _row(_STATES, "super_offload cpuadam_cores_perc", _L, "threads: `threads`", 0.8),
    _row(_ZERO, "cpu_offload", _M, "`offload_optimizer.device` cpu"),
    _row(_ZERO, "cpu_offload_params cpu_offload_param", _M, "`offload_param.device` cpu"),
    _row(_ZERO, "sub_group_size", _N, "chunks are planned; `chunk_numel`"),
    _row(
        _ZERO,
        "stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "prefetch_bucket_size max_live_parameters max_reuse_distance param_persistence_threshold "
        "model_persistence_threshold module_granularity_threshold",
        _N,
        'what fits `max_memory["device"]` is there',
    ),
    _row(
        _ZERO,
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save",
        _N,
        "`save_16bit_model` always gathers",
    ),
    _row(
        _ZERO,
        "reduce_bucket_size allgather_bucket_size overlap_comm contiguous_gradients round_robin_gradients "
        "reduce_scatter allgather_partitions use_multi_rank_bucket_allreduce zero_hpz_partition_size mics_shard_size "
        "mics_hierarchical_params_gather stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params "
        "stage3_allgather_sequential allgather_sequential",
        _N,
        "the engine exchanges units, in one order on all processes",
    ),
    _row(
        _ZERO,
        "cpu_offload_use_pin_memory ignore_unused_parameters legacy_stage1 parameter_alignment leaf_module.* "
        "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory load_from_fp32_weights elastic_checkpoint "
        "compute_grad_norm",
        _N,
        "how DeepSpeed goes about it",
    ),
    _row(
        _ZERO,
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param.*",
        _R,
        "nothing is rounded on its way",
    ),
    _row(_ZERO, "zenflow.*", _R, "every gradient counts in the step that it is of"),
    _row(
        "aio",
        "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events",
        _N,
        "`python -m offload tune DIR` measures the drive",
    ),
    _row("aio", "use_gds", _L, "bytes go through host memory"),
    _row(
        "activation_checkpointing",
        "partition_activations number_checkpoints contiguous_memory_optimization synchronize_checkpoint_boundary "
        "profile",
        _N,
        "of `deepspeed.checkpointing`; `torch.utils.checkpoint` works",
    ),
    _row("activation_checkpointing", "cpu_checkpointing", _M, '`activations="offload"`'),
    _row("", "wall_clock_breakdown", _M, "`log_every`, which is `steps_per_print`, or 10"),
    _row("", "memory_breakdown dump_state", _L, "`engine.stats()`, `engine.report()`"),
    _row("", "tensorboard.* wandb.* comet.* csv_monitor.*", _L, "log what `engine.stats()` says"),
    _row("", "flops_profiler.*", _L, "`torch.profiler`"),
    _row("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", _N, "any class of torch steps"),
    _row(
        "",
        "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor "
        "disable_allgather allgather_size sparse_gradients comms_logger.* use_data_before_expert_parallelism",
        _N,
        "gradients are added in fp32, in rank order",
    ),
    _row(
        "",
        "gradient_allreduce_op",
        _R,
        "gradients are averaged; leave it out, and multiply the loss by the number of processes",
        "mean",
    ),
    _row("", "disable_python_gc log_level vocabulary_size timers.*", _N, "how DeepSpeed goes about it"),
    _row(
        "checkpoint",
        "tag_validation use_node_local_storage parallel_write.* checkpoint_serialization writer.*",
        _N,
        "see `docs/checkpoints.md`",
    ),
    _row("checkpoint", "load_universal", _R, "load the folder that it was made of"),
    _row("data_types", "grad_accum_dtype", _N, "gradients are added in fp32"),
    _row("data_types", "param_dtype", _M, "has to be that of `bf16` or `fp16`"),
    _row("data_types", "buffer_dtype", _R, "buffers keep their dtype; cast them before", "fp32"),
    _row("data_types", "keep_in_fp32_modules", _R, "all parameters are cast; leave it out", "auto", []),
    _row("", "managed_gradient_accumulation", _R, "the engine counts micro-batches; leave it out", True),
    _row("", "amp.* nebula.*", _R, "`bf16` or `fp16`; `save_checkpoint` writes the files itself"),
    _row(
        "",
        "tensor_parallel.* expert_parallel.* pipeline.* data_parallel_size sequence_parallel_size hybrid_engine.*",
        _R,
        "each process has all of the model; leave it out",
        1,
    ),
    _row(
        "",
        "curriculum_learning.* data_efficiency.* progressive_layer_drop.* sparse_attention.*",
        _R,
        "other data or layers per step; leave it out, or do it in the script",
    ),
    _row(
        "",
        "compression_training.* quantize_training.* weight_quantization.* eigenvalue.*",
        _R,
        "weights would be others; leave it out",
    ),
    _row("", "elasticity.* autotuning.*", _R, "set the batch sizes; budgets are planned"),
    _row("", "compile.* graph_harvesting", _R, "parameters come and go; leave it out"),
)


def find(path: str) -> Row | None:
    """Return the row of a key, by its dotted path; None of one that is not known."""
    section, _, name = path.rpartition(".")
    for row in ROWS:
        if row.section == section and (name in row.names or f"{name}.*" in row.names):
            return row
    return None


def is_section(path: str) -> bool:
    """Tell whether a key has keys below it that are told apart."""
    return any(row.section == path or row.section.startswith(f"{path}.") for row in ROWS)


def names_in(section: str) -> list[str]:
    """Return the keys of a section, for a suggestion."""
    own = [name.removesuffix(".*") for row in ROWS if row.section == section for name in row.names]
    prefix = f"{section}." if section else ""
    below = {row.section[len(prefix) :].split(".")[0] for row in ROWS if row.section.startswith(prefix)}
    return [*own, *sorted(below - {""})]


def markdown() -> str:
    """Return the table as documents show it."""
    lines = ["| section | keys | what happens | here |", "|---|---|---|---|"]
    for row in ROWS:
        names = " ".join(f"`{name.removesuffix('.*')}`" for name in row.names)
        lines.append(f"| {f'`{row.section}`' if row.section else ''} | {names} | {row.does.value} | {row.here} |")
    return "\n".join(lines)
