"""Data loaders as thin as DeepSpeed's.

Next: :mod:`offload.integrations.deepspeed.engine` makes one where a script gives ``training_data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from offload.errors import ConfigError

WORKERS = 2  # as in DeepSpeed, per device


class RepeatingLoader:
    """Begins a loader anew where it ends, for ever."""

    def __init__(self, loader: Iterable[Any]) -> None:
        """Begin `loader`."""
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def make_loader(
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool,
    pin_memory: bool,
    drop_last: bool,
    sampler: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    workers: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> DataLoader[Any]:
    """Return a loader that draws samples in DeepSpeed's order.

    That is the order of ``DistributedSampler``: shuffled with seed 0, and the same in each epoch unless somebody calls
    ``loader.sampler.set_epoch(number)``. Of several processes, each has every `world`-th sample, from its `rank`.

    Raises:
        ConfigError: it is no dataset.
    """
    streamed = isinstance(dataset, IterableDataset)
    if not streamed and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(f"training_data: expected a torch Dataset but got {type(dataset).__name__}; pass a dataset")
    if sampler is None and not streamed:
        sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=shuffle)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        drop_last=drop_last,
        num_workers=WORKERS if workers is None else workers,
    )
