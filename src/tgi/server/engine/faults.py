"""Fault injection for tests: a Device that breaks as TGI_FAULTS says, and what it does to the stream. Built only where
that variable is set; knows neither gRPC nor the model."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from tgi.errors import StartupError, TgiError
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.engine.device import Chosen, Constraint, Device
from tgi.shard_client.messages import Admit, Step

log = logging.getLogger(__name__)

KINDS = frozenset({"kill", "exit", "hang", "freeze", "slow", "oom", "raise", "nan", "cut", "corrupt"})
NUMBERS = frozenset({"step", "every", "token", "min_rows", "ms", "rank"})
PATHS = frozenset({"once", "armed"})


class InjectedFault(RuntimeError):
    """What `raise` raises."""


class StreamCut(TgiError):
    """What `cut` ends the stream with."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind and its triggers: all that are given must hold."""

    kind: str
    step: int | None = None  # counted from the process's start, 1 is the first
    every: int | None = None  # steps
    token: int | None = None  # a row of the launch has this id in its prompt or answer
    min_rows: int | None = None
    once: Path | None = None
    armed: Path | None = None
    ms: int = 0  # of `slow`
    rank: int = 0  # whose process breaks

    def holds(self, step: int, is_first: bool, num_rows: int, has_token: Callable[[int], bool]) -> bool:
        """`is_first`: the step's first launch, not a part of it that is tried again. What depends on the rows holds for
        parts too, so that bisection finds them; all else once for a step."""
        if self.token is None and self.min_rows is None and not is_first:
            return False
        return (
            (self.step is None or step == self.step)
            and (self.every is None or step % self.every == 0)
            and (self.min_rows is None or num_rows >= self.min_rows)
            and (self.token is None or has_token(self.token))
            and (self.armed is None or self.armed.exists())
            and (self.once is None or _claim(self.once))
        )


def _claim(path: Path) -> bool:
    """Create the file; False where it was there before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def parse_faults(text: str) -> list[Fault]:
    """`kind:key=value,…;kind:…`. Raises StartupError naming the word that is not known."""
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise StartupError(f"TGI_FAULTS: {kind!r} is not known: choose {', '.join(sorted(KINDS))}")
    fault = Fault(kind)
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        if key in PATHS and value:
            fault = replace(fault, **{key: Path(value)})
        elif key in NUMBERS:
            fault = replace(fault, **{key: _number(key, value)})
        else:
            raise StartupError(f"TGI_FAULTS: {word!r} is not known: choose {', '.join(sorted(NUMBERS | PATHS))}=…")
    return fault


def _number(key: str, value: str) -> int:
    least = 0 if key in ("token", "ms", "rank") else 1
    if not value.isdecimal() or int(value) < least:
        raise StartupError(f"TGI_FAULTS: {key}={value} must be a whole number of at least {least}")
    return int(value)


class Tamper:
    """What happens to the next Step that the stream sends. The device's thread asks for it, the stream's does it."""

    def __init__(self) -> None:
        self._kinds: deque[str] = deque()

    def ask(self, kind: str) -> None:
        self._kinds.append(kind)

    def __call__(self, step: Step) -> Step:
        """Raises StreamCut where that was asked for."""
        if not self._kinds:
            return step
        if self._kinds.popleft() == "cut":
            raise StreamCut("injected: the stream is cut")
        return replace(step, handles=array("Q", [*step.handles, 1 << 40]))  # a row without an id


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    inner: object
    breaks: npt.NDArray[np.bool_]  # [rows]: their logits are to be no numbers
    takes: npt.NDArray[np.bool_] | None = None


class FaultyDevice:
    """A Device before another: breaks at the launches that the faults name, else hands everything on."""

    def __init__(self, device: Device, faults: list[Fault], tamper: Tamper) -> None:
        log.warning("faults are injected (TGI_FAULTS): %s", ", ".join(fault.kind for fault in faults))
        self._device = device
        self._faults = faults
        self._tamper = tamper
        self._ids: dict[int, set[int]] = {}  # by handle: its prompt and answer
        self._handle_of: dict[int, int] = {}  # by row
        self._step = 0  # since the process's start
        self._number = 0  # of the plan that was launched last
        self.depth = device.depth

    @property
    def max_blocks(self) -> int:
        return self._device.max_blocks

    def check(self, admit: Admit) -> str | None:
        return self._device.check(admit)

    def apply(self, changes: RowChanges) -> None:
        for row in changes.removed:
            self._ids.pop(self._handle_of.pop(row, -1), None)
        for row, admit in changes.added:
            self._handle_of[row] = admit.handle
            self._ids[admit.handle] = set(np.frombuffer(admit.prompt_ids + admit.generated_ids, np.uint32).tolist())
        self._device.apply(changes)

    def launch(self, plan: StepPlan) -> _Launched:
        breaks = self._inject(plan)
        return _Launched(plan, self._device.launch(plan), breaks)

    def forward(self, plan: StepPlan) -> _Launched:
        breaks = self._inject(plan)
        return _Launched(plan, self._device.forward(plan), breaks)

    def has_forwarded(self, launched: object) -> bool:
        assert isinstance(launched, _Launched)
        return self._device.has_forwarded(launched.inner)

    def choose(self, launched: object, constraint: Constraint | None = None) -> None:
        assert isinstance(launched, _Launched)
        launched.takes = None if constraint is None else constraint.takes
        self._device.choose(launched.inner, constraint)

    def collect(self, launched: object) -> Chosen:
        assert isinstance(launched, _Launched)
        chosen = self._device.collect(launched.inner)
        samples, takes = launched.plan.samples, launched.takes
        handles, breaks = launched.plan.handles[samples], launched.breaks[samples]
        if takes is not None:
            handles, breaks = handles[takes], breaks[takes]
        for handle, token in zip(handles.tolist(), chosen.ids.tolist()):
            if handle in self._ids:
                self._ids[handle].add(token)
        return replace(chosen, is_nan=chosen.is_nan | breaks) if breaks.any() else chosen

    def idle(self) -> None:
        self._device.idle()

    # --- the faults ----------------------------------------------------------

    def _inject(self, plan: StepPlan) -> npt.NDArray[np.bool_]:
        """Do what is due at this launch. Which rows are to have logits that are no numbers: [rows]."""
        is_first = plan.number != self._number
        self._number = plan.number
        self._step += is_first
        breaks = np.zeros(plan.num_rows, np.bool_)
        if not plan.number:
            return breaks  # a step of the warm-up
        for fault in self._faults:
            if not fault.holds(self._step, is_first, plan.num_rows, lambda token: bool(self._with(plan, token).any())):
                continue
            if fault.kind == "nan":
                breaks |= self._broken(plan, fault)
            elif fault.kind in ("cut", "corrupt"):
                self._tamper.ask(fault.kind)
            else:
                _break(fault)
        return breaks

    def _with(self, plan: StepPlan, token: int) -> npt.NDArray[np.bool_]:
        return np.array([token in self._ids.get(handle, ()) for handle in plan.handles.tolist()], np.bool_)

    def _broken(self, plan: StepPlan, fault: Fault) -> npt.NDArray[np.bool_]:
        """The rows with the token; without one, the first that chooses."""
        if fault.token is not None:
            return self._with(plan, fault.token)
        return plan.samples & (np.cumsum(plan.samples) == 1)


def _break(fault: Fault) -> None:
    match fault.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(1)
        case "hang":
            _hang()
        case "slow":
            time.sleep(fault.ms / 1e3)
        case "oom":
            raise torch.OutOfMemoryError("injected: out of memory")
        case _:
            raise InjectedFault("injected: a launch fails")


def _hang() -> NoReturn:
    for _ in itertools.count():
        threading.Event().wait()
    raise AssertionError
