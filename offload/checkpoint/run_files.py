"""What a durable run's directory holds beside the swap store's files: one JSON file with what never changes in a run.

Owns the file, and the comparison with the engine that is to go on: model, optimizer, the cut into units and chunks. So
it can be read before anything is planned or locked. What changes with every step is in the store. Next:
:mod:`offload.build` asks here, :mod:`offload.durable` writes the rest.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from offload.checkpoint.beside import others_of
from offload.checkpoint.format.packed import unpack
from offload.config import Config
from offload.errors import ConfigError
from offload.module.binding import Binding
from offload.planning.plan import Plan
from offload.shards.commits import LATE_KEY, STATE_KEY, read_object
from swap import SwapCorruptError, SwapError, SwapStore, find_run
from swap.durable.disk import Disk
from swap.errors import error_class

logger = logging.getLogger(__name__)

FILE_NAME = "run.json"
FORMAT, VERSION = "offload-run", 2
_SHOWN = 3  # differences in an error


@dataclasses.dataclass(frozen=True, slots=True)
class RunFacts:
    """What never changes in a run.

    Attributes:
        run: its name, drawn by lot; the store's record has it, too.
        unit_bytes: by which the model was cut into units.
        chunk_numel: elements of an optimizer chunk.
        units: of the cut: name, dtype, whether it is trained, elements, whether chunks divide parameters.
        parameters: shape, dtype and whether it is trained, by name.
        optimizer: class, states, their format, whether the class makes its steps itself.
        wrappers: how parameters are made of inner tensors, by name.
    """

    run: str
    unit_bytes: int
    chunk_numel: int
    units: list[list[Any]]
    parameters: dict[str, list[Any]]
    optimizer: dict[str, Any]
    wrappers: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, unit_bytes: int, optimizer: str, wrappers: dict[str, Any]) -> RunFacts:
        """Return those of an engine; `optimizer` is the name of its class, `wrappers` is as in the facts."""
        request = plan.request
        return cls(
            run=secrets.token_hex(8),
            unit_bytes=unit_bytes,
            chunk_numel=plan.chunk_numel,
            units=[[unit.name, unit.dtype, unit.trainable, unit.numel, unit.whole] for unit in request.units],
            parameters={
                slot.name: [list(slot.shape), unit.dtype, "trained" if unit.trainable else "frozen"]
                for unit in request.units
                for slot in unit.slots
            },
            optimizer={
                "class": optimizer,
                "states": list(request.states.names),
                "state_dtype": request.states.kind.value,
                "steps by itself": request.own is not None,
            },
            wrappers=wrappers,
        )

    def differences(self, other: RunFacts) -> Iterator[str]:
        """Yield in which `other` differs from this run."""
        for name, ours in self.parameters.items():
            if name not in other.parameters:
                yield f"parameter {name} is missing"
            elif ours != other.parameters[name]:
                yield f"parameter {name} was {ours} and is {other.parameters[name]}"
        yield from (f"parameter {name} is new" for name in other.parameters if name not in self.parameters)
        for option, value in self.optimizer.items():
            if value != other.optimizer[option]:
                yield f"the optimizer's {option} was {value} and is {other.optimizer[option]}"
        for name, made in self.wrappers.items():
            if made != other.wrappers.get(name):
                yield f"{name} was made as {made} and is made as {other.wrappers.get(name)}"
        if self.units != other.units:
            yield "the model is cut into other units"
        if self.chunk_numel != other.chunk_numel:
            yield f"chunk_numel was {self.chunk_numel} and is {other.chunk_numel}"


class RunFiles:
    """A run directory, looked at before the store is opened.

    Attributes:
        path: the first directory.
        capacity_bytes: of the data files that are there; 0 where there are none.
        facts: of the run that was committed there, or of a new one; None before there is one.
        saved: the record of the last commit; None where there is none.
    """

    def __init__(self, config: Config) -> None:
        """Look at the directories of `config`; make those that are missing.

        Raises:
            ConfigError: there is a run and none is wanted, or the options contradict its cut.
            SwapCorruptError: the files are damaged.
            SwapError: they cannot be read, or another version wrote them.
        """
        self._paths = config.paths()
        self.path = self._paths[0]
        self._file = self.path / FILE_NAME
        for path in self._paths:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _failure(path, "cannot be made", error) from error
        self.capacity_bytes, committed = find_run(self._paths, STATE_KEY)
        self.facts = self._read() if committed else None
        self.saved: dict[str, Any] | None = None
        if self.facts is not None:
            self._check_options(config, self.facts)

    def _check_options(self, config: Config, facts: RunFacts) -> None:
        if config.resume is False:
            raise ConfigError(
                f"run_dir {self.path}: resume=False expects no run there but there is one; pass resume=True to go on "
                "with it, name another directory, or delete this one"
            )
        given = config.bytes_of("unit_bytes")
        if given is not None and given != facts.unit_bytes:
            raise ConfigError(
                f"unit_bytes: the run in {self.path} was cut by {facts.unit_bytes} bytes but got {given}; leave it out"
            )

    @property
    def name(self) -> str:
        """Of the run."""
        assert self.facts is not None
        return self.facts.run

    def open(
        self, store: SwapStore, now: RunFacts, groups: Iterable[list[str]], module: nn.Module, binding: Binding
    ) -> None:
        """Read the record of the last commit, if there is one, or begin a run.

        Args:
            store: the run's.
            now: facts of the engine.
            groups: names of its optimizer's groups' members.
            module: the model.
            binding: of its parameters.

        Raises:
            ConfigError: the run is another model's or optimizer's.
            SwapError: something cannot be read or written, or is damaged.
        """
        if self.facts is None:
            self._write(now)
            return
        self._check(now)
        record = self._read_record(store)
        theirs = [group["params"] for group in record["contents"]["optimizer"]["groups"]]
        if theirs != list(groups):
            raise ConfigError(
                f"run_dir {self.path}: expected param groups with the parameters of the run's, in their order; make "
                "the optimizer with all groups that the run had when it ended"
            )
        others = others_of(module, binding, record["contents"])
        if others:
            raise self._another(others)
        self.saved = record

    def renew(self) -> None:
        """Let the file be as new as a commit that comes, for whoever removes old files; write it if it is gone.

        Raises:
            SwapError: it could not be written.
        """
        assert self.facts is not None
        try:
            os.utime(self._file)
        except FileNotFoundError:
            self._write(self.facts)
        except OSError:
            logger.debug("%s: its times cannot be renewed", self._file, exc_info=True)

    def _check(self, now: RunFacts) -> None:
        """Check that an engine can go on with the run.

        Raises:
            ConfigError: it is another model's or optimizer's; names the first differences.
        """
        assert self.facts is not None
        found = list(self.facts.differences(now))
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise self._another("; ".join(found[:_SHOWN]) + more)

    def _another(self, others: str) -> ConfigError:
        return ConfigError(
            f"run_dir {self.path}: expected the run of this model and optimizer but got another one: {others}; name "
            "another directory, or make model and optimizer as in the run"
        )

    def _write(self, facts: RunFacts) -> None:
        """Write the facts of a new run; they are on the drive when this returns.

        Raises:
            SwapError: they could not be written.
        """
        disk, target = Disk(), str(self._file)
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(facts)}
        data = (json.dumps(content, indent=1) + "\n").encode("ascii")
        try:
            fd = os.open(target + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                disk.write(fd, data, 0)
                disk.sync(fd)
            finally:
                os.close(fd)
            disk.replace(target + ".new", target)
            disk.sync_directory(str(self._file.parent))
        except OSError as error:
            raise _failure(self._file, "cannot be written", error) from error
        self.facts = facts

    def _read_record(self, store: SwapStore) -> dict[str, Any]:
        """Return the record of the last commit.

        Raises:
            SwapCorruptError: it is damaged, or another run's.
        """
        assert self.facts is not None
        try:
            record: dict[str, Any] = unpack(read_object(store, STATE_KEY))
            record["late"] = unpack(read_object(store, LATE_KEY))
        except (KeyError, ValueError) as error:
            raise self._corrupt(f"its record cannot be read ({error})") from error
        if record.get("run") != self.facts.run:
            raise self._corrupt(f"expected the record of run {self.facts.run} but got that of {record.get('run')}")
        return record

    def _read(self) -> RunFacts:
        path = self._file
        try:
            content = json.loads(path.read_bytes())
            kind, version = content.pop("format"), content.pop("version")
            if kind == FORMAT and version != VERSION:
                raise SwapError(
                    f"{path}: expected version {VERSION} but got version {version!r}",
                    path=str(path),
                    remedy="go on with the version of this software that began the run",
                )
            return RunFacts(**content)
        except SwapError:
            raise
        except FileNotFoundError:
            raise self._corrupt(f"{FILE_NAME} is missing") from None
        except OSError as error:
            raise _failure(path, "cannot be read", error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._corrupt(f"{FILE_NAME} is damaged ({error})") from error

    def _corrupt(self, text: str) -> SwapCorruptError:
        return SwapCorruptError(
            f"run directory {self.path}: {text}",
            path=str(self.path),
            remedy="restore the directory from a copy, or name an empty one and load a checkpoint",
        )


def _failure(path: Path, text: str, error: OSError) -> SwapError:
    return error_class(error.errno)(
        f"{path}: {text}",
        errno=error.errno,
        path=str(path),
        remedy="name a directory that this user can write to, on a drive with room",
    )
