"""What tests of the pager share: writable ranges over scratch files, in every form of fault delivery that runs here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import torch

from h3store.codec import default_spec
from h3store.pager import Pager, Range, RangeConfig
from h3store.tensor import TieredTensor, over_range
from h3store.tiers import ScratchFile
from h3store.tiers.ddr import native_spec

DELIVERIES = ("signal", "signal-copy", "dispatch")
ROOT = Path(__file__).parents[1]


def scratch_range(
    pager: Pager,
    nbytes: int,
    *,
    dtype: str = "uint8",
    block_bytes: int = 64 * 1024,
    cyclic: bool = False,
    capacity_bytes: int = 0,
) -> Range:
    """A writable range of zeros that evicts into an unnamed file."""
    scratch = ScratchFile(Path(tempfile.gettempdir()))
    config = RangeConfig(
        nbytes,
        block_bytes,
        native_spec(default_spec(dtype, 0)),
        writable=True,
        cyclic=cyclic,
        capacity_bytes=capacity_bytes,
        file=scratch.native,
        owner=scratch,
        label="scratch",
    )
    return Range(pager, config)


def tiered_copy(tensor: torch.Tensor, pager: Pager, block_bytes: int = 64 * 1024) -> TieredTensor:
    """A writable TieredTensor with a tensor's values."""
    tiered = scratch_range(pager, max(tensor.nbytes, 1), dtype=str(tensor.dtype), block_bytes=block_bytes)
    copy = over_range(tiered, tensor.dtype, tuple(tensor.shape))
    copy.copy_(tensor)
    return copy


def resident_copy(tensor: torch.Tensor, delivery: str = "signal", block_bytes: int = 4096) -> TieredTensor:
    """The same, wholly resident, under a budget that keeps it so."""
    copy = tiered_copy(tensor, Pager(2 * tensor.nbytes + 64 * block_bytes, delivery), block_bytes)
    assert copy._h3_range.prefetch() == tensor.nbytes
    return copy


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def run_python(
    code: str, *, prelude: str = "", timeout_s: float = 120, **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Runs code in a process of its own, in the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        cwd=ROOT,
        timeout=timeout_s,
        text=True,
        capture_output=True,
        check=False,
        **kwargs,
    )  # type: ignore[call-overload]  # passed through


# Refuses userfaultfd the way container runtimes do: a seccomp filter that answers EPERM. x86-64 and aarch64 numbers.
REFUSE_USERFAULTFD = textwrap.dedent(
    """
    import ctypes, platform, struct, os
    _number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
    _arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
    def _op(code, jt, jf, k): return struct.pack("HBBI", code, jt, jf, k)
    _program = b"".join([
        _op(0x20, 0, 0, 4), _op(0x15, 0, 3, _arch), _op(0x20, 0, 0, 0), _op(0x15, 0, 1, _number),
        _op(0x06, 0, 0, 0x00050000 | 1), _op(0x06, 0, 0, 0x7FFF0000)])
    _buffer = ctypes.create_string_buffer(_program)
    class _Fprog(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    _libc = ctypes.CDLL(None, use_errno=True)
    assert _libc.prctl(38, 1, 0, 0, 0) == 0
    _fprog = _Fprog(6, ctypes.cast(_buffer, ctypes.c_void_p).value)
    assert _libc.prctl(22, 2, ctypes.byref(_fprog), 0, 0) == 0, ctypes.get_errno()
    assert _libc.syscall(_number, 1) == -1
    """
)
# And the device node, which root may open: hidden by becoming nobody.
BECOME_NOBODY = "import os\nos.setgid(65534); os.setuid(65534)\n"
