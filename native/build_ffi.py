"""Builds h3store._native: every C file of this folder, declared to cffi by the same header the C compiler reads."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def declarations(header: str) -> str:
    """The header as cffi can read it: no preprocessor lines, no comments."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    return "\n".join(line for line in header.splitlines() if not line.lstrip().startswith("#"))


ffibuilder = FFI()
ffibuilder.cdef(declarations((HERE / "h3store.h").read_text()))
ffibuilder.set_source(
    "h3store._native",
    '#include "h3store.h"',
    sources=[os.path.relpath(path, ROOT) for path in sorted(HERE.glob("*.c"))],
    depends=[os.path.relpath(path, ROOT) for path in sorted(HERE.glob("*.h"))],
    include_dirs=[os.path.relpath(HERE, ROOT)],
    # -z now: a fault handler must never enter the dynamic linker's lazy binding.
    extra_compile_args=["-O3", "-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-fno-math-errno",
                        "-D_FILE_OFFSET_BITS=64", *os.environ.get("H3_CFLAGS", "").split()],
    extra_link_args=["-pthread", "-lm", "-Wl,-z,now", *os.environ.get("H3_LDFLAGS", "").split()],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffibuilder.compile(verbose=True)
