"""Weights on their way: threads that read ahead of the module that runs, and hold what it needs. Owns threads and
holds; refuses to know modules. A hint all along: what does not come early is read when it is touched.

One lock guards everything but the reading itself, which runs outside of it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from h3store.errors import H3Error
from h3store.modules.plan import Plan
from h3store.pager import Range
from h3store.units import MiB

__all__ = ["Stream", "Unit"]

Place = tuple[Range, int, int]  # range, offset, nbytes

_PIECE_BYTES = 2 * MiB  # read by one thread at a time: long enough to be cheap, short enough to share out
_THREADS = 4
_WAIT_S = 0.1  # between two looks at a signal
_IDLE_S = 5.0  # between two looks at whether the model is gone: its finalizer may not be able to tell


@dataclass(frozen=True)
class Unit:
    """One weight: bytes of a range."""

    tiered: Range
    offset: int
    nbytes: int

    def pieces(self, start: int, stop: int) -> list[Place]:
        """What threads share out of bytes [start, stop) of the weight; a block goes where its first byte goes."""
        block, end = self.tiered.block_bytes, self.offset + self.nbytes
        step = max(_PIECE_BYTES // block, 1) * block
        first, last = (min(-(-(self.offset + at) // block) * block, end) if at else self.offset for at in (start, stop))
        if first >= last:
            return []
        starts = [first, *range(first - first % step + step, last, step)]
        return [(self.tiered, at, to - at) for at, to in zip(starts, [*starts[1:], last], strict=True)]


@dataclass
class _Visit:
    """A step of one pass that is being read, ready or in use."""

    pending: int = 0  # pieces not yet there
    held: list[Place] = field(default_factory=list)
    released: bool = False


@dataclass(frozen=True)
class _Piece:
    """A run of bytes to be read for a step.

    Attributes:
        generation, position: of the step.
        visit: that waits for it.
        stays: the unit, if this part of it stays.
    """

    generation: int
    position: int
    visit: _Visit
    stays: int | None
    place: Place


class Stream:
    """Reads ahead along a plan, pass after pass.

    Args:
        units: the weights.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._plan: Plan | None = None
        self._wake = threading.Condition()
        self._stopped = False
        self._pid = os.getpid()
        self._generation = 0
        self._reset_positions()
        self._stay: dict[int, list[Place]] = {}  # by unit, what is held of it for good
        # What goes, and the generation whose window it is in; None for what stayed.
        self._leaving: deque[tuple[Place, int | None]] = deque()
        self.waits = self.early = self.unplanned = 0
        self._threads = [threading.Thread(target=self._work, name=f"h3store-weights-{i}", daemon=True)
                         for i in range(_THREADS)]
        self._working = len(self._threads)
        for thread in self._threads:
            thread.start()
        _streams.add(self)

    def _reset_positions(self) -> None:
        self._visits: dict[int, _Visit] = {}  # by position: pass times steps, plus step
        self._next = 0  # position that is expected to run next
        self._wanted = -1  # position that somebody waits for: goes first, whatever the window says
        self._fetch_at = 0  # position being read ahead
        self._pieces: deque[_Piece] = deque()  # of the steps before _fetch_at, in order
        self._window_used = 0
        self._reach = 0  # end of the pass in hand and the next: how far reading ahead may go

    @property
    def alive(self) -> bool:
        """Whether this process has the threads."""
        return not self._stopped and os.getpid() == self._pid

    @property
    def plan(self) -> Plan | None:
        """What it goes by."""
        return self._plan

    def set_plan(self, plan: Plan) -> None:
        """Goes by another plan from now on; what is in use stays held until its end."""
        with self._wake:
            for visit in self._visits.values():
                self._release(visit)
            self._generation += 1
            for unit, places in list(self._stay.items()):
                # equal parts stay; of one that is not whole the rest is forgotten below
                if sorted(self._resident_places(plan, unit), key=_offset) != sorted(places, key=_offset):
                    self._leaving.extend((place, None) for place in self._stay.pop(unit))
            self._plan = plan
            self._reset_positions()
            self._reach = len(plan.steps)
            self._wake.notify_all()

    # ---- what modules call ----

    def start_pass(self) -> None:
        """The first module is about to run."""
        if not self.alive:  # in a forked child another thread may hold the lock for ever
            return
        with self._wake:
            if self._plan is not None and self._plan.steps and self._next % len(self._plan.steps):
                self._skip_to(self._next + -self._next % len(self._plan.steps))

    def begin(self, key: Hashable) -> tuple[int, int] | None:
        """Waits until a module's weights are there; returns what to give to end(), None if it is not in the plan."""
        if not self.alive:
            return None
        with self._wake:
            position = self._find(key)
            if position is None:
                self.unplanned += 1
                return None
            self._skip_to(position)
            self._next = position + 1
            self._reach = max(self._reach, position + len(self._plan.steps))  # type: ignore[union-attr]  # found in it
            self._wanted = position
            token = self._generation, position
            visit = self._visits.get(position)
            is_early = position < self._fetch_at and visit is not None and visit.pending == 0
            self.early += is_early
            self.waits += not is_early
            self._wake.notify_all()
            while self._is_coming(token):
                self._wake.wait(_WAIT_S)
            return token

    def end(self, token: tuple[int, int]) -> None:
        """The module is done with its weights."""
        if not self.alive:
            return
        with self._wake:
            generation, position = token
            if generation == self._generation and position in self._visits:
                self._release(self._visits.pop(position))
                self._wake.notify_all()

    def _is_coming(self, token: tuple[int, int]) -> bool:
        if not self.alive or token[0] != self._generation:
            return False
        visit = self._visits.get(token[1])
        return token[1] >= self._fetch_at or (visit is not None and visit.pending > 0)

    def _find(self, key: Hashable) -> int | None:
        """The position of the module's next run: further than half a pass ahead it is one that ran out of order."""
        if not self.alive or self._plan is None:
            return None
        steps = self._plan.steps
        for ahead in range(len(steps) // 2 + 1):
            if steps[(self._next + ahead) % len(steps)].key == key:
                return self._next + ahead
        return None

    def _skip_to(self, position: int) -> None:
        for at in [at for at in self._visits if self._next <= at < position]:
            self._release(self._visits.pop(at))
        self._next = max(self._next, position)
        if self._fetch_at < position:
            self._fetch_at = position

    def _release(self, visit: _Visit) -> None:
        visit.released = True  # pieces still being read go when they are there
        self._leaving.extend((place, self._generation) for place in visit.held)
        visit.held = []

    # ---- what threads do ----

    def _work(self) -> None:
        try:
            self._work_on()
        finally:
            self._leave()

    def _work_on(self) -> None:
        while True:
            with self._wake:
                leaving, piece = None, None
                while not (self._stopped or leaving or piece):
                    leaving = self._leaving.popleft() if self._leaving else None
                    piece = None if leaving else self._next_piece()
                    if not (leaving or piece):
                        self._wake.wait(_IDLE_S)
                if self._stopped:
                    if leaving:
                        self._leaving.append(leaving)
                    return
            if leaving:
                _let_go(leaving[0])
                self._make_room(*leaving)
            elif piece:
                self._fetch(piece)

    def _make_room(self, place: Place, generation: int | None) -> None:
        with self._wake:
            if generation == self._generation:
                self._window_used -= place[2]
                self._wake.notify_all()

    def _next_piece(self) -> _Piece | None:
        """What is to be read next, if there is room for it."""
        while not self._pieces:
            if not self._plan_step():
                return None
        piece = self._pieces[0]
        if piece.stays is None:
            assert self._plan is not None
            nbytes = piece.place[2]
            if piece.position > self._wanted and self._window_used + nbytes > self._plan.window_bytes:
                return None
            self._window_used += nbytes
        return self._pieces.popleft()

    def _plan_step(self) -> bool:
        """Turns the next step into pieces; False when reading is far enough ahead."""
        plan = self._plan
        if plan is None or not plan.steps or self._fetch_at >= self._reach:
            return False
        step = plan.steps[self._fetch_at % len(plan.steps)]
        visit = self._visits[self._fetch_at] = _Visit()
        for unit in dict.fromkeys(step.units):
            nbytes = self._units[unit].nbytes
            coming: list[tuple[int | None, Place]] = [
                (None, place) for place in self._units[unit].pieces(plan.resident[unit], nbytes)]
            if unit not in self._stay:
                self._stay[unit] = []
                coming += [(unit, place) for place in self._resident_places(plan, unit)]
            for stays, place in coming:
                self._pieces.append(_Piece(self._generation, self._fetch_at, visit, stays, place))
                visit.pending += 1
        self._fetch_at += 1
        return True

    def _resident_places(self, plan: Plan, unit: int) -> list[Place]:
        return self._units[unit].pieces(0, plan.resident.get(unit, 0))

    def _fetch(self, piece: _Piece) -> None:
        visit, held = piece.visit, False
        if not visit.released or piece.stays is not None:
            # A block that fails here fails again where it is touched, which reports it; so does one without room.
            with contextlib.suppress(H3Error):
                piece.place[0].prefetch(*piece.place[1:])  # reads at queue depth, which pin does not
                piece.place[0].pin(*piece.place[1:])
                held = True
        with self._wake:
            visit.pending -= 1
            if held:
                is_current = piece.generation == self._generation and not self._stopped
                if piece.stays is not None and is_current:
                    self._stay[piece.stays].append(piece.place)
                elif piece.stays is None and is_current and not visit.released:
                    visit.held.append(piece.place)
                else:
                    self._leaving.append((piece.place, piece.generation if piece.stays is None else None))
            elif piece.stays is None and piece.generation == self._generation:
                self._window_used -= piece.place[2]
            if not (visit.pending and held) or self._leaving:
                self._wake.notify_all()

    def stop(self) -> None:
        """Asks the threads to let go of everything and to end; does not wait for that.

        For finalizers: a collector may run one in any thread, inside any lock, so it takes none that it must wait for.
        """
        self._stopped = True
        if os.getpid() == self._pid and self._wake.acquire(blocking=False):
            self._wake.notify_all()
            self._wake.release()

    def close(self) -> None:
        """Lets go of everything and ends the threads. Again does nothing."""
        self._stopped = True
        if os.getpid() != self._pid:
            return
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _leave(self) -> None:
        """A thread ends; the last one lets go of what is held."""
        with self._wake:
            self._stopped = True  # one that ends unasked must not leave anybody waiting
            self._working -= 1
            self._wake.notify_all()
            if self._working:
                return
            for visit in self._visits.values():
                self._leaving.extend((place, None) for place in visit.held)
            for places in self._stay.values():
                self._leaving.extend((place, None) for place in places)
            self._visits.clear()
            self._stay.clear()
        while self._leaving:
            _let_go(self._leaving.popleft()[0])


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


def _close_all() -> None:
    """Before the interpreter goes: a thread inside the pager must not outlive it."""
    for stream in list(_streams):
        stream.close()


atexit.register(_close_all)


def _offset(place: Place) -> int:
    return place[1]


def _let_go(place: Place) -> None:
    tiered, offset, nbytes = place
    tiered.unpin(offset, nbytes)
    with contextlib.suppress(H3Error):
        tiered.drop(offset, nbytes)
