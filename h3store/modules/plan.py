"""What stays and what streams: pure functions over sizes and an order of steps. Knows no tensors and no threads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from h3store.units import MiB

__all__ = ["Plan", "Step", "make_plan", "merged_order"]

# Room for weights that come while the largest step runs: enough for every reading thread, and a part of the budget.
_AHEAD_BYTES = 16 * MiB
_AHEAD_SHARE = 32
_MOST_AHEAD = 8  # of a small budget at most one part in this many


@dataclass(frozen=True)
class Step:
    """One call of a module.

    Attributes:
        key: tells the module.
        units: numbers of the weights that it reads.
    """

    key: Hashable
    units: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How a pass over the steps uses a budget.

    Attributes:
        steps: in order of execution.
        resident: bytes at the start of each unit that stay; units that are in no step are not named.
        window_bytes: room for what comes early and goes after use.
    """

    steps: tuple[Step, ...]
    resident: Mapping[int, int]
    window_bytes: int


def make_plan(steps: Sequence[Step], sizes: Sequence[int], usable_bytes: int, grain_bytes: int = 1) -> Plan:
    """Returns what stays resident and how much room the rest gets.

    A pass reads every unit in the same order, so keeping the newest keeps nothing. Instead an equal part of each unit
    stays for good: the disk has work throughout the pass, and a step waits for the rest of its weights only.

    Args:
        steps: in order of execution.
        sizes: bytes per unit.
        usable_bytes: of the budget.
        grain_bytes: what stays of a unit is a multiple of this, or all.
    """
    fitting = tuple(Step(step.key, step.units if _total(step, sizes) <= usable_bytes else ()) for step in steps)
    units = list(dict.fromkeys(unit for step in fitting for unit in step.units))
    total = sum(sizes[unit] for unit in units)
    if total <= usable_bytes:
        return Plan(fitting, {unit: sizes[unit] for unit in units}, 0)
    largest = max(_total(step, sizes) for step in fitting)
    ahead = max(_AHEAD_BYTES, usable_bytes // _AHEAD_SHARE)
    ahead = min(ahead, usable_bytes // _MOST_AHEAD, (usable_bytes - largest) // 2)
    # Resident bytes r and the window fill what is usable: r + largest * (1 - r / total) + ahead = usable.
    share = (usable_bytes - largest - ahead) / (total - largest)
    resident, owed = {}, 0.0
    for unit in units:
        owed += sizes[unit] * share
        resident[unit] = min(int(owed) // grain_bytes * grain_bytes, sizes[unit])
        owed -= resident[unit]
    return Plan(fitting, resident, usable_bytes - sum(resident.values()))


def _total(step: Step, sizes: Sequence[int]) -> int:
    return sum(sizes[unit] for unit in set(step.units))


def merged_order(seen: Sequence[Hashable], known: Sequence[Hashable]) -> list[Hashable]:
    """Returns an order of execution that has all of both: as seen last, and what did not run this time where it was.

    Args:
        seen: keys of the last pass, repeats included.
        known: keys of the plan so far.
    """
    merged = list(seen)
    present = set(seen)
    before: Hashable | None = None
    for key in known:
        if key not in present:
            at = merged.index(before) + 1 if before is not None else 0
            merged.insert(at, key)
            present.add(key)
        before = key
    return merged
