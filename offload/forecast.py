"""Will it fit, how long will a step take, and what would help? The answer, for models and machines that are not here.

Owns :class:`Forecast`, and how it is shown. Next: :mod:`offload.predicting` has the question,
:mod:`offload.planning.timing` the formula.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from offload.activations.ledger import with_margin
from offload.memory.budget import Tier
from offload.planning.hardware import Hardware
from offload.planning.moved import trained_of
from offload.planning.plan import Plan
from offload.planning.shared import least_of
from offload.planning.timing import Timing
from offload.planning.work import Work
from offload.sizes import PAGE_BYTES, figures, format_bytes

_NAMED = 3  # of units in one line
NEAR = 1.15  # of the bound without clipping, which a step that clips is to take


@dataclasses.dataclass(frozen=True, slots=True)
class Clipping:
    """What a step that clips takes more: its updates wait for the norm.

    Attributes:
        bound_s: of a step of the same plan that clips nothing.
        host_bytes: about the smallest host budget, in whole MiB, with which a step that clips takes :data:`NEAR` of it;
            the present one, if that is enough; None, if all that is on the drive would not be.
    """

    bound_s: float
    host_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What an engine would do. ``print(forecast)`` shows it.

    Attributes:
        plan: homes and bytes, as ``engine.plan``.
        hardware: the machine; None where nothing is known but its memory.
        work: of one micro-batch; None without a batch.
        timing: seconds of a step; None without either.
        tokens: of a step; None where the batch was given as tensors.
        savings: what would make a step shorter, with its seconds, the best first.
        clipping: what clipping takes; None where nothing clips, or there are no seconds.
        remedies: what would make the batch fit if it does not, each tried, the smallest change first.
        lanes: of one of several ranks, seconds that each lane takes alone; there is no `timing` then, but
            :attr:`least`.
    """

    plan: Plan
    hardware: Hardware | None
    work: Work | None
    timing: Timing | None
    tokens: int | None
    savings: Mapping[str, float]
    clipping: Clipping | None = None
    remedies: tuple[str, ...] = ()
    lanes: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the activations of the batch fit what the plan leaves them, as far as it is known."""
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that activations need on the device beyond what the plan leaves them."""
        return 0 if self.work is None else missing_bytes(self.plan, self.work)

    @property
    def peak_bytes(self) -> dict[Tier, int]:
        """Bytes of each tier at once: those of the plan, and on the device the activations of a micro-batch.

        Where the CPU is the device, the working region gives way to these.
        """
        work = self.work
        plan = self.plan if work is None else given_way(self.plan, work)
        found = {tier: plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) for tier in Tier}
        found[Tier.HOST] += plan.request.own_bytes
        if work is not None:
            found[Tier.DEVICE] += work.device_bytes
        return found

    @property
    def updates_as_kernel(self) -> str | None:
        """The optimizer's class whose updates were not measured, and count as a kernel's; None where there is none."""
        own, work = self.plan.request.own, self.work
        return None if own is None or work is None or work.measured_s is not None else own.name

    @property
    def without_gradient(self) -> list[str]:
        """The names of units that are trained, and get no gradient with this batch: an engine does not update them."""
        reached = None if self.work is None else self.work.reached
        return [] if reached is None else [unit.name for unit in trained_of(self.plan) if unit.index not in reached]

    @property
    def least(self) -> tuple[str, float] | None:
        """Of several ranks, the lane that takes longest of a micro-batch with its update, and its seconds. Else None.

        A step takes no less.
        """
        if not self.lanes or self.work is None or self.hardware is None:
            return None
        return max(least_of(self.plan, self.work, self.hardware).items(), key=lambda lane: lane[1])

    def remedy(self) -> str:
        """Return what would make a batch fit, or that nothing would which was tried."""
        tokens = self.tokens is not None  # else nobody knows what a smaller batch is
        tried = ", sequences of one token included" if tokens else "; take a smaller batch"
        nothing = f"no change that was tried does{tried}"
        ways = f"it fits with {', or with '.join(self.remedies)}" if self.remedies else nothing
        return f"device budget: {self._refusal()}; {ways}"

    def _refusal(self) -> str:
        need = 0 if self.work is None else self.work.device_bytes
        room = format_bytes(room_bytes(self.plan))
        return f"activations need {format_bytes(need)} at once but the plan leaves them {room}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        Returns:
            ``plan`` as its own, ``fits``, and ``remedies`` if it does not. With a batch: ``flops``, ``tokens``, and
            ``activation_bytes`` at their peak, of which ``device_activation_bytes`` are on the device, ``peak_bytes``
            per tier, ``without_gradient``, and of :class:`.Work` ``assumed``, ``unmeasured`` and ``too_large``. With a
            machine, too:
            ``hardware``, ``step_s``, ``bound_s``, ``fill_s``, ``binding``, ``spans`` with seconds per lane, ``bytes``
            per lane, ``early_units`` that are updated during backward, ``savings``, and ``updates_as_kernel``; if steps
            clip, ``clipping`` with the attributes of :class:`Clipping`; and if budgets are more than the machine has,
            what it has as ``beyond_machine``. Of several ranks, there are ``hardware`` and ``lanes`` instead, and of
            :attr:`least` ``binding`` and ``bound_s``.
        """
        found: dict[str, Any] = {"plan": self.plan.to_dict(), "fits": self.fits}
        if self.work is not None:
            found |= {"flops": self.work.flops, "activation_bytes": self.work.peak_bytes, "tokens": self.tokens}
            found |= {"device_activation_bytes": self.work.device_bytes}
            found["peak_bytes"] = {tier.value: size for tier, size in self.peak_bytes.items()}
            found |= {"assumed": self.work.assumed, "unmeasured": list(self.work.unmeasured)}
            found |= {"too_large": list(self.work.too_large), "without_gradient": self.without_gradient}
        if not self.fits:
            found["remedies"] = list(self.remedies)
        if self.timing is not None and self.hardware is not None:
            found |= {
                "hardware": self.hardware.name,
                "step_s": self.timing.step_s,
                "bound_s": self.timing.bound_s,
                "fill_s": self.timing.fill_s,
                "binding": self.timing.binding,
                "spans": [{"name": span.name, "seconds": dict(span.seconds)} for span in self.timing.spans],
                "bytes": dataclasses.asdict(self.timing.moved),
                "early_units": self.timing.early_units,
                "savings": dict(self.savings),
                "updates_as_kernel": self.updates_as_kernel,
            }
        if self.least is not None and self.hardware is not None:
            found |= {"hardware": self.hardware.name, "lanes": dict(self.lanes)}
            found["binding"], found["bound_s"] = self.least
        if self.beyond_machine:
            found["beyond_machine"] = {tier.value: has for tier, has in self.beyond_machine.items()}
        if self.clipping is not None:
            found["clipping"] = dataclasses.asdict(self.clipping)
        return found

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self._lines()])

    def _lines(self) -> Iterator[str]:
        if self.hardware is None and self.plan.request.device_is_host:
            yield (
                "for the CPU of this machine as the device; name a machine (hardware, --hardware) to plan for a GPU, "
                "or 'here' and a batch to measure this one"
            )
        if self.work is not None:
            yield (
                f"a micro-batch: {figures(self.work.flops / 1e12, 4)} TFLOP, {format_bytes(self.work.peak_bytes)} of "
                "activations at their peak" + self._held()
            )
            if self.work.unmeasured:
                yield f"  by their bytes, for they do not run alone: {', '.join(self.work.unmeasured)}"
            if self.work.too_large:
                names = ", ".join(self.work.too_large)
                yield f"  by their bytes, for too little memory is free to run them alone: {names}"
            if self.work.assumed:
                questions = "a question" if self.work.assumed == 1 else f"{self.work.assumed} questions"
                yield f"  assumed: yes, to {questions} of the model about values of tensors"
            if missing := self.without_gradient:
                others = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                named = f"{', '.join(missing[:_NAMED])}{others}"
                yield f"  no gradient with this batch: {named}; an engine leaves their updates out, seconds count them"
            peaks = ", ".join(f"{tier.value} {format_bytes(size)}" for tier, size in self.peak_bytes.items() if size)
            locked = self.plan.page_locked_bytes
            host = f"; {format_bytes(locked)} of cpu page-locked" if locked else ""
            yield f"at most at once: {peaks}{host}"
        yield from self._beyond()
        if not self.fits:
            yield f"DOES NOT FIT: {self._refusal()}"
            yield from (f"  fits with {remedy}" for remedy in self.remedies)
        if self.least is not None and self.hardware is not None:
            yield from self._shared(self.hardware, *self.least)
        if self.timing is None or self.hardware is None:
            return
        timing = self.timing
        rate = f", {figures(self.tokens / timing.step_s, 4)} tokens/s" if self.tokens else ""
        yield f"a step on {self.hardware.name}: {figures(timing.step_s)} s{rate}; {timing.binding} binds"
        for span in timing.spans:
            lanes = ", ".join(f"{lane} {figures(seconds)} s" for lane, seconds in span.seconds.items() if seconds)
            yield f"  {span.name}: {lanes}"
        fill_s = timing.fill_s if timing.fill_s > timing.bound_s * 1e-9 else 0.0  # sums of many numbers
        yield f"  bound {figures(timing.bound_s)} s, fill {figures(fill_s)} s"
        if self.updates_as_kernel is not None:
            yield f"  updates are counted as a kernel's; those of {self.updates_as_kernel} may take ten times as long"
        if self.plan.request.commit:
            yield "  commits are not in these seconds: what they write and wait for comes on top"
        for what, seconds in self.savings.items():
            yield f"  with {what}: {figures(seconds)} s"
        if self.clipping is not None:
            yield f"  every step clips: {self._clips(self.clipping, timing)}"

    @property
    def beyond_machine(self) -> dict[Tier, float]:
        """The bytes that the machine has of each tier of which the budgets, of all ranks, are more.

        Where the CPU is the device, both budgets are of the host's memory.
        """
        if self.hardware is None:
            return {}
        has = {Tier.DEVICE: self.hardware.device_bytes, Tier.HOST: self.hardware.host_bytes}
        return {tier: size for tier, size in has.items() if sum(self._budgets_of(tier)) > size}

    def _budgets_of(self, tier: Tier) -> list[int]:
        """Return the budgets that are of a tier's memory: those of all ranks, or of the device, if that is the host."""
        budgets, shared = self.plan.request.budgets, self.plan.request.device_is_host
        if tier is Tier.DEVICE:
            return [] if shared else [budgets[tier]]
        return [budgets[Tier.DEVICE]] * shared + [budgets[tier]] * self.plan.request.world_size

    def _beyond(self) -> Iterator[str]:
        name = self.hardware.name if self.hardware else ""
        for tier, has in self.beyond_machine.items():
            budgets, named = self._budgets_of(tier), f'max_memory["{tier.value}"]'
            many = self.plan.request.world_size if tier is Tier.HOST else 1
            what = f"{f'{many} times ' if many > 1 else ''}{named}, {format_bytes(budgets[-1])}, is"
            if self.plan.request.device_is_host:
                both = f'max_memory["{Tier.DEVICE.value}"] and {named}'
                what = f"{both}, {format_bytes(sum(budgets))} of the same memory, are"
            yield f"NOT OF THIS MACHINE: {what} more than the {format_bytes(has)} of {name}"

    def _shared(self, hardware: Hardware, binding: str, least_s: float) -> Iterator[str]:
        ranks = self.plan.request.world_size
        lanes = ", ".join(f"{lane} {figures(seconds)} s" for lane, seconds in self.lanes.items() if seconds)
        yield f"{ranks} ranks on one {hardware.name}, each with such a device: they share host memory and the drive"
        yield f"  each lane alone, for one micro-batch of each rank: {lanes}"
        yield f"  a step takes at least {figures(least_s)} s: the lane {binding} alone takes that"
        yield "  no step is predicted: no GPUs have exchanged anything yet; offload scale has figures on paper"

    def _held(self) -> str:
        work = self.work
        held = work is not None and work.held_bytes is not None
        return f", {format_bytes(work.device_bytes)} of them on the device" if held and work is not None else ""

    def _clips(self, clipping: Clipping, timing: Timing) -> str:
        share = timing.step_s / clipping.bound_s
        bound = f"{figures(clipping.bound_s)} s"
        text = f"{share:.2f} of the bound without clipping, {bound}"
        if share <= NEAR:
            return text
        if clipping.host_bytes is None:
            return f"{text}; no host budget brings it to {NEAR}"
        enough = f'max_memory["{Tier.HOST.value}"] = {clipping.host_bytes >> 20} MiB'
        return f"{text}; {NEAR} of these {bound} with {enough}"


def room_bytes(found: Plan) -> int:
    """Return what a plan leaves to activations; where the CPU is the device, working copies give way to them."""
    room = found.activation_bytes
    return room + found.working_bytes - found.least_working_bytes if found.request.device_is_host else room


def given_way(found: Plan, work: Work) -> Plan:
    """Return the plan with what is left of its working region, where the CPU is the device and activations want more.

    It gives way to them and to the margin that an engine keeps free, down to the units that must be there together.
    """
    if not found.request.device_is_host or work.device_bytes <= found.activation_bytes:
        return found
    wanted = with_margin(work.device_bytes) - found.activation_bytes
    left = max((found.working_bytes - wanted) // PAGE_BYTES * PAGE_BYTES, found.least_working_bytes)
    device = found.arena_bytes[Tier.DEVICE] - found.working_bytes + left
    return dataclasses.replace(found, working_bytes=left, arena_bytes={**found.arena_bytes, Tier.DEVICE: device})


def missing_bytes(found: Plan, work: Work) -> int:
    """Return the bytes of activations on the device that a plan has no room for."""
    return max(work.device_bytes - room_bytes(found), 0)
