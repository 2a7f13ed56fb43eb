"""attach: the weights of any torch module under a byte budget. Owns which weights are tiered, where they come from, and
the hooks that tell what runs; reading ahead is stream.py's, what stays is plan.py's."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from h3store.archive import Writer, checked_path
from h3store.errors import UsageError
from h3store.modules.plan import Step, make_plan, merged_order
from h3store.modules.stream import Stream, Unit
from h3store.pager import Pager
from h3store.store import Store, add_tensor
from h3store.tensor import byte_span, over_range, range_of
from h3store.units import KiB, format_bytes, parse_bytes

__all__ = ["Attached", "attach"]

_SMALL_BYTES = 64 * KiB  # what is smaller stays in ordinary memory, outside the budget
_MAX_CHUNK_BYTES = 512 * KiB
_MIN_CHUNK_BYTES = 16 * KiB
_CHUNKS_OF_BUDGET = 64  # at least that many chunks fit a budget
# Read rows here and there: reading them whole ahead would cost more than it saves.
_GATHERING = (nn.Embedding, nn.EmbeddingBag)
_WHOLE, _PART = 0, 1  # what was called: the model, or parts of it


@dataclass
class _Place:
    """Where a weight is used."""

    module: nn.Module
    name: str  # in the module
    full_name: str
    is_buffer: bool

    def put(self, value: Tensor) -> None:
        (self.module._buffers if self.is_buffer else self.module._parameters)[self.name] = value  # type: ignore[assignment]


@dataclass
class _Weight:
    """One weight and all its places: tied ones have several."""

    tensor: Tensor
    places: list[_Place] = field(default_factory=list)

    @property
    def is_transient(self) -> bool:
        """Whether no state_dict has it."""
        return all(place.is_buffer and place.name in place.module._non_persistent_buffers_set for place in self.places)


def attach(model: nn.Module, *, ddr_bytes: int | str, path: str | os.PathLike[str] | None = None) -> Attached:
    """Puts the weights of a module under a byte budget; it then computes what it did before, in less memory.

    The same operations give the same bits. Where torch itself takes another way for plain weights (its fast path of
    nn.MultiheadAttention and TransformerEncoderLayer in eval; a weight that was not contiguous) last bits may differ.

    Weights of 64 KiB and more become read-only TieredTensors over an archive. They are read ahead and held in the order
    in which submodules run, learnt from the first forward pass, while a part that fits the budget stays resident. With
    few cores, OMP_WAIT_POLICY=passive in the environment makes it faster: OpenMP's idle threads then do not spin on the
    processors that decode.

    Args:
        model: any module on the CPU, changed in place. Weights keep names, shapes and dtypes; they are frozen
            (requires_grad False), also after close(), and gradients flow through them to their inputs. Weights that
            are tied stay tied. Buffers of 64 KiB and more are tiered as well: a forward pass that writes into one
            gets ReadOnlyError. Buffers that no checkpoint keeps (persistent=False) stay as the model has them, outside
            the budget, if path names an archive that is there.
        ddr_bytes: hard bound on resident weight bytes, an int or text such as "4GiB".
        path: an archive. If it exists, weights are read from it by name, such as one made by h3store pack, and the
            model's own are dropped unread, so that they may be on the meta device. If it does not, they are written
            there. None: an unnamed temporary archive in the folder for temporary files. Weights that are read-only
            TieredTensors already are read from where they are.

    Returns:
        A handle with stats() and close(), also a context manager. It may be dropped: attachment ends with the model.

    Raises:
        UsageError: the archive lacks a weight, or has another shape or dtype under its name; the model is attached.
        BudgetError: a budget that holds no two blocks.
        StorageFullError, ArchiveError: the model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"attach() takes a torch module; got {type(model)}")
    budget = parse_bytes(ddr_bytes, "ddr_bytes")
    pager = Pager(budget)
    if any(isinstance(hook, _Hook) and hook.is_live for hook in model._forward_pre_hooks.values()):
        raise UsageError("this model is attached; close() its handle first")
    weights = list(_weights_of(model))
    with ExitStack() as resources:
        source = _Source(weights, pager, path, resources)
        large = [weight for weight in weights if _is_large(weight) and not source.leaves(weight)]
        tiered = [(weight, source.open(weight)) for weight in large]
        small = [(weight, source.read_small(weight)) for weight in weights
                 if not _is_large(weight) and (weight.tensor.is_meta or source.has(weight))]
        for weight, tensor in small + tiered:  # nothing fails from here on
            _replace(weight, tensor)
        return Attached(model, pager, [weight for weight, _ in tiered], [tensor for _, tensor in tiered])


def _is_large(weight: _Weight) -> bool:
    return weight.tensor.numel() * weight.tensor.element_size() >= _SMALL_BYTES


def _weights_of(model: nn.Module) -> Iterator[_Weight]:
    found: dict[Any, _Weight] = {}
    for prefix, module in model.named_modules():
        for is_buffer, held in ((False, module._parameters), (True, module._buffers)):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if tensor.device.type not in ("cpu", "meta"):
                    raise UsageError(f"{prefix}.{name} is on {tensor.device}; attach() serves modules on the CPU")
                weight = found.setdefault(_identity(tensor), _Weight(tensor))
                weight.places.append(_Place(module, name, f"{prefix}.{name}".lstrip("."), is_buffer))
    yield from found.values()


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are one another's memory: tied weights are often two parameters over one storage."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _replace(weight: _Weight, tensor: Tensor) -> None:
    is_parameter = isinstance(weight.tensor, nn.Parameter)
    value = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
    value.__dict__.update({k: v for k, v in weight.tensor.__dict__.items() if k not in ("_h3_range", "_is_param")})
    for place in weight.places:
        place.put(value)


class _Source:
    """Where tiered weights come from: one archive, or those that they are in already."""

    def __init__(self, weights: list[_Weight], pager: Pager, path: str | os.PathLike[str] | None,
                 resources: ExitStack) -> None:
        self._pager = pager
        self._stores: dict[Path, Store] = {}
        self._path: Path | None = None if path is None else Path(checked_path(path))
        self._found = self._path is not None and self._path.exists()
        if self._found:
            if weights and not any(self.has(weight) for weight in weights):
                self._named(weights[0])  # raises
            return
        own = [weight for weight in weights if _is_large(weight) and _origin(weight.tensor) is None]
        for weight in own:
            if weight.tensor.is_meta:
                raise UsageError(f"{weight.places[0].full_name} is on the meta device and has no values; give the "
                                 "path of an archive that has them")
        if self._path is None and own:
            folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="h3store-"))
            self._path = Path(folder) / "weights.h3"  # its name goes when attach() returns; an open file stays
        if self._path is not None:
            small = [weight for weight in weights if not _is_large(weight) and not weight.tensor.is_meta]
            _write(self._path, own if path is None else own + small, _chunk_bytes(pager.ddr_bytes))

    def has(self, weight: _Weight) -> bool:
        """Whether an archive that was there before names a weight; buffers that no checkpoint keeps are not named."""
        return self._found and self._find(weight) is not None

    def leaves(self, weight: _Weight) -> bool:
        """Whether a large buffer stays as the model has it: no checkpoint keeps it, so no archive has it."""
        return self._found and weight.is_transient and not weight.tensor.is_meta and not self.has(weight)

    def open(self, weight: _Weight) -> Tensor:
        """The tiered tensor of a weight."""
        origin = _origin(weight.tensor)
        if origin is not None and (self._path is None or self._find(weight) is None):
            path, name, span = origin
            tiered = self._store(Path(path)).range(name, cyclic=True)
            whole = over_range(tiered, weight.tensor.dtype, (tiered.nbytes // weight.tensor.element_size(),))
            return whole.as_strided(weight.tensor.shape, weight.tensor.stride(), span)
        store, name = self._named(weight)
        return over_range(store.range(name, cyclic=True), weight.tensor.dtype, tuple(weight.tensor.shape))

    def read_small(self, weight: _Weight) -> Tensor:
        """A copy of a weight that has no values yet."""
        store, name = self._named(weight)
        return store.read(name).as_subclass(Tensor)

    def _named(self, weight: _Weight) -> tuple[Store, str]:
        name = self._find(weight)
        first = weight.places[0].full_name
        if name is None and weight.is_transient:
            raise UsageError(f"{first} is a buffer that no checkpoint keeps (persistent=False), so it must come from "
                             "the model, where it is on the meta device and has no values; build the model on the CPU, "
                             "or set that buffer to its values before attach()")
        if name is None or self._path is None:
            raise UsageError(f"{self._path or 'no archive'} holds no tensor {first!r}; pack the checkpoint of this "
                             "model, or attach without path")
        store = self._store(self._path)
        record, wanted = store.record(name), str(weight.tensor.dtype).removeprefix("torch.")
        if (record.dtype, record.shape) != (wanted, tuple(weight.tensor.shape)):
            raise UsageError(f"{self._path}: tensor {name!r} is {record.dtype} {record.shape}, the model's is {wanted} "
                             f"{tuple(weight.tensor.shape)}; convert the model first, say by model.to(dtype)")
        return store, name

    def _find(self, weight: _Weight) -> str | None:
        assert self._path is not None
        store = self._store(self._path)
        return next((place.full_name for place in weight.places if place.full_name in store), None)

    def _store(self, path: Path) -> Store:
        key = path.resolve()
        if key not in self._stores:
            self._stores[key] = Store(path, "r", pager=self._pager)
        return self._stores[key]


def _origin(tensor: Tensor) -> tuple[str, str, int] | None:
    """Archive and name of a tensor that is tiered and read-only, and its offset there in elements."""
    tiered = range_of(tensor)
    if tiered is None or tiered.origin is None or tiered.writable:
        return None
    path, name, _ = tiered.origin
    if not os.path.exists(path):  # of an archive without a name any more, such as one that an earlier attach() made
        return None
    return path, name, int(tensor.storage_offset())


def _chunk_bytes(budget: int) -> int:
    """Long chunks read and decode fastest, and a small budget must hold enough of them."""
    chunk = _MAX_CHUNK_BYTES
    while chunk > _MIN_CHUNK_BYTES and chunk * _CHUNKS_OF_BUDGET > budget:
        chunk //= 2
    return chunk


def _write(path: Path, weights: list[_Weight], chunk_bytes: int) -> None:
    with Writer(path, "w", visible=False) as writer:
        for weight in weights:
            add_tensor(writer, weight.places[0].full_name, weight.tensor.detach(), chunk_bytes=chunk_bytes)
        writer.commit()


class Attached:
    """What attach() returns.

    Attributes:
        ddr_bytes: the budget.
    """

    def __init__(self, model: nn.Module, pager: Pager, weights: list[_Weight], tensors: list[Tensor]) -> None:
        self.ddr_bytes = pager.ddr_bytes
        self._pager = pager
        self._nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._order = _Order(model, pager, weights, tensors)
        weakref.finalize(model, self._order.stream.stop).atexit = False  # stream.py sees to that

    def stats(self) -> dict[str, Any]:
        """Returns counters: of the budget (see Store.stats), and of modules.

        `weight_bytes` are tiered, `planned_resident_bytes` of them stay; `modules_early` ran with their weights read
        ahead in time, `modules_waited` had to wait for some, `modules_unplanned` ran out of the learnt order.
        """
        stream = self._order.stream
        return dict(self._pager.stats()) | {
            "weight_bytes": self._nbytes,
            "planned_resident_bytes": self._order.resident_bytes,
            "modules_early": stream.early,
            "modules_waited": stream.waits,
            "modules_unplanned": stream.unplanned,
        }

    def close(self) -> None:
        """Ends reading ahead and lets go of what is held. The model goes on, its weights read when they are touched."""
        self._order.remove_hooks()
        self._order.stream.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Attached({format_bytes(self._nbytes)} of weights, ddr_bytes={format_bytes(self.ddr_bytes)})"


class _Order:
    """What runs when: hooks on the modules that own tiered weights, and on the model itself."""

    def __init__(self, model: nn.Module, pager: Pager, weights: list[_Weight], tensors: list[Tensor]) -> None:
        self._units: dict[int, tuple[int, ...]] = {}  # by number of the module
        units, modules = [], {}
        for number, (weight, tensor) in enumerate(zip(weights, tensors, strict=True)):
            tiered = range_of(tensor)
            assert tiered is not None
            units.append(Unit(tiered, *byte_span(tensor)))
            for place in weight.places:
                if not isinstance(place.module, _GATHERING):
                    modules[id(place.module)] = place.module
                    self._units[id(place.module)] = (*self._units.get(id(place.module), ()), number)
        self.sizes = [unit.nbytes for unit in units]
        self.stream = Stream(units)
        largest = max((unit.tiered.block_bytes for unit in units), default=0)
        self._grain = max(largest, 1)
        # Room for what is not planned: rows of embeddings, and what the pager keeps for everybody's faults.
        self._usable = max(pager.ddr_bytes - max(6 * largest, pager.ddr_bytes // 64), 0)
        self._seen: list[int] = []
        self._learnt = False
        self._in_pass = False
        self._is_off = False  # the pass in hand ran something that the plan lacks
        self.resident_bytes = 0
        self._handles = [model.register_forward_pre_hook(_Hook(self._start, _WHOLE)),
                         model.register_forward_hook(_Hook(self._finish, _WHOLE), always_call=True)]
        self._running: dict[int, list[tuple[int, int] | None]] = {key: [] for key in modules}
        for key, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(_Hook(self._begin, key)))
            self._handles.append(module.register_forward_hook(_Hook(self._end, key), always_call=True, prepend=True))
        # Before the first pass the order in which modules were made is a good guess.
        self._set_order([id(module) for module in model.modules() if id(module) in modules])

    def _set_order(self, keys: list[Any]) -> None:
        plan = make_plan([Step(key, self._units[key]) for key in keys], self.sizes, self._usable, self._grain)
        self.resident_bytes = sum(plan.resident.values())
        self.stream.set_plan(plan)

    def _start(self, key: int) -> None:
        self._seen, self._is_off, self._in_pass = [], False, key != _PART
        self.stream.start_pass()

    def _finish(self, key: int) -> None:
        self._in_pass = False
        plan = self.stream.plan
        if plan is None or not self._seen:
            return
        known = [step.key for step in plan.steps]
        if not self._learnt:
            self._learnt = True
            if self._seen != known:
                self._set_order(list(self._seen))
        elif self._is_off:
            self._set_order(merged_order(self._seen, known))

    def _begin(self, key: int) -> None:
        if not self._in_pass and self._seen and key == self._seen[0]:  # parts of a model that is never called whole
            self._finish(_PART)
            self._start(_PART)
        token = self.stream.begin(key)
        self._is_off |= token is None
        self._seen.append(key)
        self._running[key].append(token)

    def _end(self, key: int) -> None:
        if self._running[key]:
            token = self._running[key].pop()
            if token is not None:
                self.stream.end(token)

    def remove_hooks(self) -> None:
        """Modules tell nothing any more."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """A hook that copies and pickles as one that does nothing: a copy of a model has weights of its own."""

    def __init__(self, call: Callable[[int], None] | None = None, key: int = 0) -> None:
        self._call, self._key = call, key

    @property
    def is_live(self) -> bool:
        """Not a copy's."""
        return self._call is not None

    def __call__(self, module: nn.Module, *_args: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(self._key)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
