"""TieredTensor: a torch tensor over a tiered range. Owns what the subclass must do around an operation: error checks,
read-only enforcement, keeping the type on views, and residency first where faults are dear. Refuses to move bytes:
the memory is real, and the pager fills what is touched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from h3store._ffi import lib
from h3store.errors import H3Error, ReadOnlyError, UsageError
from h3store.pager import Range
from h3store.signals import own
from h3store.tensor import dlpack
from h3store.tensor.gather import FORMS
from h3store.tensor.panels import PANELS
from h3store.tensor.under import range_under

__all__ = ["TieredTensor", "operands", "over_range", "range_of"]

_plain = torch._C.DisableTorchFunctionSubclass
_FORMS = FORMS | PANELS
# In-place methods that change no element: allowed on read-only tensors.
_METADATA_ONLY = frozenset(
    {
        "requires_grad_",
        "detach_",
        "retain_grad",
        "squeeze_",
        "unsqueeze_",
        "t_",
        "transpose_",
        "rename_",
        "swapaxes_",
        "swapdims_",
        "register_hook",
    }
)
# What makes views or asks for sizes, and so reads no element.
_VIEWS = (
    "__getitem__ view view_as reshape split split_with_sizes chunk unbind t transpose permute narrow select squeeze "
    "unsqueeze expand flatten unflatten as_strided detach data_ptr size stride dim numel element_size is_contiguous "
    "storage_offset untyped_storage requires_grad_ diagonal movedim swapaxes swapdims unfold"
)
_TOUCH_NOTHING = frozenset(_VIEWS.split())
# Of those, what never copies and changes nothing: no check but that of a failed fill is due (a number may be a tensor).
_PURE_VIEWS = frozenset(
    getattr(torch.Tensor, name) for name in _TOUCH_NOTHING - {"__getitem__", "reshape", "flatten", "requires_grad_"}
)
_GETITEM = torch.Tensor.__getitem__
_BASIC_KEYS = frozenset({int, slice, type(None), type(Ellipsis)})
_BASE = vars(torch._C.TensorBase)["_base"]
_IN_PLACE_DUNDERS = frozenset(
    {
        "__setitem__",
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
    }
)


class TieredTensor(torch.Tensor):
    """A CPU tensor whose bytes live in an archive and come into memory a block at a time when touched.

    Ordinary strided memory: data_ptr(), numpy(), C++ extensions and torch.compile see a plain tensor. Views are
    TieredTensors; results of computation are plain tensors. Tensors of h3store.load() are read-only.

    Raises from any operation on it:
        CorruptBlockError, ArchiveError: a block that the operation touched could not be read; the result is dropped.
        ReadOnlyError: an in-place or out= operation on a read-only tensor.
        StoreClosedError: never: memory stays valid as long as a tensor over it lives.
    """

    _h3_range: Range | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__":
            with _plain():
                result = func(*args, **kwargs)
            # A retyped tensor is a view of the plain one, so its base must stay plain: else bases had bases for ever.
            return result if getattr(func, "__self__", None) is _BASE else _retype(result)
        if func in _PURE_VIEWS or (func is _GETITEM and _is_basic(args[1])):
            return _view(func, args, kwargs)
        return _run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Returns a plain tensor in ordinary memory with the same values."""
        copy = pickling.plain_copy(self)
        for name, value in pickling.python_state(self).items():
            setattr(copy, name, deepcopy(value, memo))
        memo[id(self)] = copy
        return copy

    def __copy__(self) -> torch.Tensor:
        """Returns another tensor over the same memory."""
        return pickling.shallow_copy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as a reference where an archive holds its values, else by value; torch.save writes values."""
        return pickling.reduce(self, protocol)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Returns a view that faults as it is touched; not writeable if the tensor is read-only."""
        tiered = range_of(self)
        with _plain():
            array = torch.Tensor.numpy(self, force=force)
        if tiered is not None and not tiered.writable:
            array.flags.writeable = False
        return array

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Returns a capsule over this memory; a read-only tensor's says so.

        Raises:
            BufferError: read-only, and the consumer speaks a version of DLPack (before 1.0) that cannot say so.
        """
        tiered = range_of(self)
        return dlpack.export(self, read_only=tiered is not None and not tiered.writable, **kwargs)

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Points this tensor at other memory, which torch does without asking __torch_function__."""
        _run(torch.Tensor.set_, (self, *args), kwargs)
        self._h3_range = None
        return self

    def share_memory_(self) -> torch.Tensor:
        """Refuses: shared memory would be a copy that no budget bounds and no commit sees."""
        raise UsageError(
            "share_memory_() would copy a TieredTensor out of its store; send the tensor itself to other processes (it "
            "travels as a reference), or clone() it first"
        )

    def __format__(self, format_spec: str) -> str:
        """A tensor of one element formats as its number, as plain tensors do."""
        if self.dim() == 0:
            return self.item().__format__(format_spec)
        return object.__format__(self, format_spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        if dtype is not None and array.dtype != dtype:
            return array.astype(dtype)
        return array.copy() if copy else array


def over_range(tiered: Range, dtype: torch.dtype, shape: tuple[int, ...]) -> TieredTensor:
    """Returns a tensor over the start of a range; it keeps the range alive."""
    own()
    if 0 in shape:
        flat = torch.empty(0, dtype=dtype, device="cpu")
    else:
        count = int(np.prod(shape, dtype=np.int64))
        flat = torch.frombuffer(tiered.buffer(), dtype=dtype, count=count)
    tensor = flat.reshape(shape).as_subclass(TieredTensor)
    tensor._h3_range = tiered
    return tensor


def range_of(tensor: torch.Tensor) -> Range | None:
    """Returns the range under a tensor, or None if it is ordinary memory."""
    known: Range | None = getattr(tensor, "_h3_range", None)
    if known is not None:
        return known
    with _plain():
        return range_under(tensor)


def operands(values: Any) -> Iterator[TieredTensor]:
    """Yields the TieredTensors among arguments, one level of list, tuple or dict deep."""
    for value in values:
        if isinstance(value, TieredTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, TieredTensor))
        elif isinstance(value, dict):
            yield from operands(value.values())


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns (offset, nbytes) of the smallest run that holds every element, from the start of its range, or of its
    storage where it is ordinary memory."""
    with _plain():
        if tensor.numel() == 0:
            return 0, 0
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        item = tensor.element_size()
        start = int(lib.h3_range_start(tensor.data_ptr()))
        offset = tensor.data_ptr() - start if start else int(tensor.storage_offset()) * item
        return offset, int(last + 1) * item


@functools.lru_cache(maxsize=4096)
def _writes_by_name(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name in _METADATA_ONLY:
        return False
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_DUNDERS


def _may_write(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    return _writes_by_name(func) or (bool(kwargs) and ("out" in kwargs or bool(kwargs.get("inplace"))))


def _refuse(tensor: TieredTensor, func: Callable[..., Any]) -> None:
    tiered = range_of(tensor)
    if tiered is None or tiered.writable:
        return
    name = getattr(func, "__name__", str(func))
    raise ReadOnlyError(
        f"{name} would write to {tiered.label or 'a read-only tensor'}, which "
        + (
            tiered.frozen
            or 'is read-only; clone() it first, or take the tensor anew from a store that is open with mode="r+"'
        )
    )


def _targets(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Iterator[TieredTensor]:
    """The TieredTensors that the call says it will write."""
    if _writes_by_name(func) or kwargs.get("inplace"):
        yield from operands(args[:1] if args else kwargs.values())
    if "out" in kwargs:
        yield from operands((kwargs["out"],))


def _prefetch_whole(tensor: TieredTensor, tiered: Range) -> None:
    """Without userfaultfd an operand that fits half the budget is made resident first: no faults, one pass.

    A hint: a block that fails here and is touched fails again in the operation, which then reports it.
    """
    offset, nbytes = byte_span(tensor)
    if nbytes <= tiered.pager.ddr_bytes // 2:
        with suppress(H3Error):
            tiered.prefetch(offset, nbytes)


def _transformed() -> bool:
    """Inside vmap, jvp and the like, forward-mode differentiation, or a mode that wants to see each plain operation."""
    return (
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _is_basic(key: Any) -> bool:
    """Whether what stands in square brackets makes a view."""
    return type(key) in _BASIC_KEYS or (type(key) is tuple and all(type(item) in _BASIC_KEYS for item in key))


def _view(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs what reads and writes no element."""
    with _plain():
        entered = lib.h3_op_enter()
        try:
            result = func(*args, **kwargs)
        finally:
            if lib.h3_op_leave(entered):
                _raise_errors(operands(args), entered)
    return _retype(result)


def _run(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs one operation with its error checks. Every operation on a TieredTensor pays for what is done here."""
    tensors = [value for value in args if type(value) is TieredTensor]
    if kwargs or len(tensors) != len(args):
        tensors = [*operands(args), *operands(kwargs.values())]
    if _may_write(func, kwargs):
        for target in _targets(func, args, kwargs):
            _refuse(target, func)
    with _plain():
        watched = [(tensor, tensor._version) for tensor in tensors if _is_watched(tensor)]
        entered = lib.h3_op_enter()
        try:
            form = _FORMS.get(func)
            result = form(args, kwargs) if form is not None and not _transformed() else None
            if result is None:
                for tensor in tensors:
                    tiered = tensor._h3_range
                    if tiered is not None and tiered.dispatch and getattr(func, "__name__", "") not in _TOUCH_NOTHING:
                        _prefetch_whole(tensor, tiered)
                result = func(*args, **kwargs)
        finally:
            if lib.h3_op_leave(entered):
                _raise_errors(tensors, entered)
        changed = [tensor for tensor, version in watched if tensor._version != version]
    for tensor in changed:
        _take_back(tensor, func)
    if getattr(func, "__name__", "") == "__set__":  # t.data = other: the memory under it is another now
        args[0]._h3_range = None
    return _retype(result)


def _is_watched(tensor: TieredTensor) -> bool:
    """Whether a write to it must be found out: it may be read-only, and it has a version to tell."""
    tiered = tensor._h3_range
    return (tiered is None or not tiered.writable) and not tensor.is_inference()


def _raise_errors(tensors: Iterable[TieredTensor], entered: int) -> None:
    for tensor in tensors:
        tiered = range_of(tensor)
        if tiered is not None:
            tiered.raise_error(entered)


def _take_back(tensor: TieredTensor, func: Callable[..., Any]) -> None:
    """An in-place path that the call's name did not tell: what it wrote to read-only memory is taken back."""
    tiered = range_of(tensor)
    if tiered is not None and not tiered.writable:
        tiered.drop()
        _refuse(tensor, func)


def _retype(result: Any) -> Any:
    """Views of tiered memory become TieredTensors; everything else stays what it is."""
    kind = type(result)
    if kind is torch.Tensor:
        tiered = range_under(result)
        if tiered is None:
            return result
        tensor = result.as_subclass(TieredTensor)
        tensor._h3_range = tiered
        return tensor
    if kind is list or kind is tuple:
        return kind(_retype(item) for item in result)
    return result


@contextmanager
def in_operation(ranges: Iterable[Range]) -> Iterator[None]:
    """Around foreign code that touches tiered memory: a failed fill raises here instead of ending the process."""
    held = list(ranges)
    entered = lib.h3_op_enter()
    try:
        yield
    finally:
        lib.h3_op_leave(entered)
        for tiered in held:
            tiered.raise_error(entered)


dlpack.take_back(_retype)

from h3store.tensor import pickling  # noqa: E402  # last: it needs the class
