"""Torch calls that touch tiered memory and never ask __torch_function__: the backward pass and compiled functions. Owns
the hooks that make each one operation, so that a block that can't be read is an exception there and not the end of the
process. Refuses to know what they touch: an error of any range that was there meanwhile is theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from h3store._ffi import lib
from h3store.pager import live_ranges

__all__ = ["install"]


class _Operation:
    """One operation on whatever ranges there are. Called when it ends; if nobody calls it, it still ends."""

    def __init__(self) -> None:
        self._entered: int | None = lib.h3_op_enter()

    def _leave(self) -> int | None:
        """Returns when it was entered, if it may have seen zeros in place of data."""
        entered, self._entered = self._entered, None
        return entered if entered is not None and lib.h3_op_leave(entered) else None

    def __call__(self) -> None:
        entered = self._leave()
        if entered is not None:
            for tiered in live_ranges():
                tiered.raise_error(entered)

    def __del__(self) -> None:
        self._leave()


def _as_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        operation = _Operation()
        try:
            return function(*args, **kwargs)
        finally:
            operation()

    return wrapper


def _hook_backward() -> None:
    run = _as_operation(torch.autograd.graph._engine_run_backward)
    for module in (torch.autograd.graph, torch.autograd):
        module._engine_run_backward = run  # type: ignore[attr-defined]  # private there, public to nobody


@functools.cache
def _hook_compiled() -> None:
    """Whatever torch.compile returns enters and leaves an operation by the hooks that dynamo runs around every call."""
    from torch._dynamo.eval_frame import OptimizeContext

    construct = OptimizeContext.__init__

    @functools.wraps(construct)
    def constructed(self: OptimizeContext, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        self.enter_exit_hooks.append(_Operation)

    OptimizeContext.__init__ = constructed  # type: ignore[method-assign]  # that is the hook


def _hook_compile() -> None:
    """Dynamo takes seconds to import, so it is hooked when first asked for."""
    compile_ = torch.compile

    @functools.wraps(compile_)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _hook_compiled()
        return compile_(*args, **kwargs)

    torch.compile = wrapper


@functools.cache
def install() -> None:
    """Puts the hooks in place. Does nothing the second time."""
    _hook_backward()
    _hook_compile()
