"""Serves parameters that are used although no hook has announced it: tied weights, functional use, closures.

Owns the ``TorchFunctionMode`` that sees such uses, and what each module has used in this way before. Next:
:mod:`offload.module.hooks` puts the mode in force.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offload.interrupt import Deferral, calls_users_code
from offload.module.binding import Binding
from offload.module.forwards import Forwards
from offload.module.lending import Lending, Loan
from offload.module.saved import SavedTensors
from offload.module.torch_calls import Does, calling_frame, collects_state, what
from offload.shards.manager import Manager
from offload.torch_private import function_modes

# What needs no parameters on the device, and what a parameter's own class takes over or refuses.
_NOT_SERVED = (Does.LOOK, Does.OPEN, Does.MEASURE, Does.MAKE, Does.PASS, Does.ASSIGN, Does.WRITE)

_slow = [0, True]  # places of all threads where the fast path is off, and whether it was on before the first of them
_slow_lock = threading.Lock()


class UnannouncedUses:
    """Unannounced uses of one engine's parameters. See the module's text.

    Attributes:
        leases: per module the units that its forward is lent.
        watching: how many blocks of :meth:`watch` are under way.
    """

    def __init__(
        self,
        binding: Binding,
        forwards: Forwards,
        lending: Lending,
        saved: SavedTensors,
        manager: Manager,
        deferral: Deferral,
    ) -> None:
        """Prepare.

        Args:
            binding: knows whose parameters are where, and lent.
            forwards: under way; the innermost remembers.
            lending: lends for one operation.
            saved: what autograd keeps meanwhile.
            manager: tells whether parameters are ever away.
            deferral: holds Ctrl-C back while something is half done.
        """
        self.leases: Mapping[nn.Module, Sequence[int]] = binding.tree.leases
        self.watching = 0
        self._binding = binding
        self._forwards = forwards
        self._lending = lending
        self._saved = saved
        self._manager = manager
        self._deferral = deferral
        self._remembered: dict[nn.Module, tuple[int, ...]] = {}

    def remembered(self, module: nn.Module) -> tuple[int, ...]:
        """Return the units that a module's forward has used before without a lease."""
        return self._remembered.get(module, ())

    def use(self, indices: Sequence[int], call: Callable[[], Any]) -> Any:
        """Run `call`, which uses the parameters of the units `indices`; not all of them are lent.

        The innermost module remembers those that no hook has brought: where a prefetch brings one in time, the
        schedule must still learn of its use.
        """
        self._remember(indices)
        loans: list[Loan] = []
        with self._deferral:
            try:
                self._lend(indices, loans)
                return call()
            finally:
                for loan in loans:
                    loan.close()

    @property
    def in_forward(self) -> bool:
        """Whether a forward is under way in this thread, or is repeated in this backward pass."""
        under_way = self._forwards.under_way
        return bool(under_way) and under_way[-1][2].is_here()

    def lend(self, indices: Sequence[int]) -> None:
        """Lend units to the innermost forward, until it ends: it has their addresses."""
        self._remember(indices)
        with self._deferral:
            self._lend(indices, self._forwards.under_way[-1][1])

    def _lend(self, indices: Sequence[int], loans: list[Loan]) -> None:
        for index in sorted(indices, key=lambda index: not self._binding.is_bound(index)):  # first what is here
            loans.append(self._lending.lend(index))

    def _remember(self, indices: Sequence[int]) -> None:
        if self._forwards.under_way:
            module = self._forwards.under_way[-1][0]
            new = [index for index in indices if index not in self.leases[module]]
            self._remembered[module] = tuple(dict.fromkeys((*self.remembered(module), *new)))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Serve parameters that are used outside any module's forward.

        That is in a backward pass that repeats a part of the forward, where the user has gathered parameters, and in
        hooks of the user around the outermost module's forward. Below ours, saved-tensor hooks of the user stay in
        force.
        """
        with self._saved.missing_hooks() or contextlib.nullcontext(), self.seeing():
            self.watching += 1
            try:
                yield
            finally:
                self.watching -= 1

    def are_seen(self) -> bool:
        """Tell whether the mode is active: torch switches it off inside a function that it has seen.

        Backward may run there, or in a thread of its own.
        """
        if not self._manager.hides_parameters:
            return True
        return any(isinstance(mode, _SeeParameters) and mode.uses is self for mode in function_modes())

    def seeing(self) -> contextlib.AbstractContextManager[object]:
        """Return what brings parameters that are used unannounced, and makes torch choose its operators as if it did.

        Attention has a fast path for evaluation, of other operators, that torch takes only where no mode is active.
        """
        return _SeeParameters(self, self._binding) if self._manager.hides_parameters else _without_fast_path()


class _SeeParameters(TorchFunctionMode):
    """Brings parameters to the device that are used without their module's forward."""

    def __init__(self, uses: UnannouncedUses, binding: Binding) -> None:
        super().__init__()
        self.uses = uses
        self._binding = binding
        self._known = binding.identities()

    @calls_users_code
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:
            for value in args:
                if id(value) in self._known or type(value) in (list, tuple):
                    break
            else:  # as in nearly all calls
                return func(*args)
            kwargs = {}
        used = self._binding.units_of(args)
        if kwargs:
            used += self._binding.units_of(kwargs.values())
        if not used or all(map(self._binding.is_lent, used)) or what(func) in _NOT_SERVED:
            return func(*args, **kwargs)
        if collects_state(func, calling_frame(sys._getframe(1)), self.uses.leases):
            return args[0]
        return self.uses.use(list(dict.fromkeys(used)), lambda: func(*args, **kwargs))


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    with _slow_lock:
        if not _slow[0]:
            _slow[1] = torch.backends.mha.get_fastpath_enabled()
        _slow[0] += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _slow_lock:
            _slow[0] -= 1
            if not _slow[0]:
                torch.backends.mha.set_fastpath_enabled(bool(_slow[1]))
