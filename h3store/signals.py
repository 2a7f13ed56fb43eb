"""Keeps the fault signals ours. Owns the wrappers that put our handler back after code that is known to replace it:
signal.signal, faulthandler and the set-up of DataLoader workers. Refuses to stop anybody from installing a
handler: theirs is kept as the one for foreign addresses."""

from __future__ import annotations

import faulthandler
import functools
import signal
from collections.abc import Callable
from typing import Any

from h3store._ffi import lib

__all__ = ["own"]

_FAULT_SIGNALS = (signal.SIGBUS, signal.SIGSEGV)


def _then_ensure(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        lib.h3_signals_install()
        return result

    wrapper.__h3store__ = True  # type: ignore[attr-defined]  # marks the wrapper, so that it is applied once
    return wrapper


def _wrap_signal(function: Callable[..., Any]) -> Callable[..., Any]:
    then_ensure = _then_ensure(function)

    @functools.wraps(function)
    def wrapper(signalnum: int, handler: Any) -> Any:
        return (then_ensure if signalnum in _FAULT_SIGNALS else function)(signalnum, handler)

    wrapper.__h3store__ = True  # type: ignore[attr-defined]  # as above
    return wrapper


@functools.cache
def own() -> None:
    """Wraps the functions that would take SIGBUS or SIGSEGV from us. Does nothing the second time."""
    signal.signal = _wrap_signal(signal.signal)
    faulthandler.enable = _then_ensure(faulthandler.enable)
    faulthandler.disable = _then_ensure(faulthandler.disable)
    from torch.utils.data._utils import signal_handling

    signal_handling._set_worker_signal_handlers = _then_ensure(signal_handling._set_worker_signal_handlers)
