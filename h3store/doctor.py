"""What this machine offers, and what to do where it offers too little.

Owns the checks behind `h3store doctor`. Each is bounded in time and leaves nothing behind; none changes a setting.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from h3store._ffi import ffi, lib
from h3store.units import GiB, MiB, format_bytes

# The disk probe writes this much at most, and stops earlier when its time is up.
DISK_PROBE_BYTES = 64 * MiB
DISK_PROBE_S = 0.5
_PIECE = 4 * MiB
# Every tensor takes one mapping or two; an eviction may split one for a moment.
MIN_MAP_COUNT = 65530
MIN_OPEN_FILES = 1024
MIN_MEMORY = 2 * GiB


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: "ok", "warn" (works, but less well) or "fail" (something will not work).
        value: what was found.
        advice: what to do; empty when there is nothing to do.
    """

    name: str
    status: str
    value: str
    advice: str = ""


def examine(path: str | Path = ".") -> list[Check]:
    """Runs every check, in about a second.

    Args:
        path: a folder on the disk that stores will live on; a file's folder is taken.
    """
    checks: list[Callable[[], Iterator[Check]]] = [
        _kernel, _delivery, _mappings, _memory, _limits, _processor, _versions, _cuda, lambda: _disk(Path(path))]
    return [check for group in checks for check in group()]


def as_dict(checks: list[Check]) -> dict[str, Any]:
    """Returns the findings as JSON can hold them; `status` is the worst of all."""
    worst = max(checks, key=lambda check: ("ok", "warn", "fail").index(check.status)).status
    return {"status": worst, "checks": [asdict(check) for check in checks]}


def _read(path: str, default: str = "") -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return default


def _probe() -> tuple[int, int]:
    error = ffi.new("int *")
    return lib.h3_probe(error), error[0]


def _kernel() -> Iterator[Check]:
    bits, error = _probe()
    yield Check("kernel", "ok", f"{platform.system()} {platform.release()}")
    euid = os.geteuid()
    yield Check("privilege", "ok", "root" if euid == 0 else f"user {euid}; none is needed")
    if bits & lib.H3_PROBE_UFFD_SYSCALL:
        yield Check("userfaultfd", "ok", "system call, user mode only")
    elif bits & lib.H3_PROBE_UFFD_DEVICE:
        yield Check("userfaultfd", "ok", "/dev/userfaultfd")
    else:
        yield Check("userfaultfd", "warn", f"refused ({os.strerror(error) if error else 'no reason given'})",
                    "tensors work through page protection, more slowly; in a container allow the userfaultfd system "
                    "call in its seccomp profile, or give it /dev/userfaultfd")
        return
    yield Check("userfaultfd SIGBUS", *_has(bits & lib.H3_PROBE_SIGBUS, "a Linux kernel of 4.14 or newer"))
    yield Check("userfaultfd MOVE", *_has(bits & lib.H3_PROBE_MOVE, "Linux 6.8 or newer; blocks are copied until then"))


def _has(present: int, need: str) -> tuple[str, str, str]:
    return ("ok", "present", "") if present else ("warn", "absent", f"needs {need}")


def _delivery() -> Iterator[Check]:
    """Which way faults are delivered here, found by making a small pager."""
    config = ffi.new("h3_pager_config *", {"budget_bytes": MiB, "delivery": lib.H3_DELIVERY_AUTO, "contexts": 1})
    out = ffi.new("h3_pager **")
    status = lib.h3_pager_create(config, out)
    if status != lib.H3_OK:
        reason = ffi.string(lib.h3_strerror(status)).decode()
        yield Check("fault delivery", "fail", f"no pager: {reason}", "see the checks of memory and limits")
        return
    stats = ffi.new("h3_pager_stats *")
    lib.h3_pager_get_stats(out[0], stats)
    lib.h3_pager_destroy(out[0])
    if stats.delivery == lib.H3_DELIVERY_SIGNAL:
        how = "moved" if stats.move_supported else "copied"
        yield Check("fault delivery", "ok",
                    f"signal: the thread that touches a page fills it in its SIGBUS handler; pages are {how}")
    else:
        yield Check("fault delivery", "warn",
                    "dispatch: userfaultfd is refused, so operands are made resident before an operation",
                    "see userfaultfd above for a faster form")


def _mappings() -> Iterator[Check]:
    count = int(_read("/proc/sys/vm/max_map_count", "0"))
    enough = count >= MIN_MAP_COUNT
    yield Check("vm.max_map_count", "ok" if enough else "warn", str(count),
                "" if enough else f"sysctl -w vm.max_map_count={MIN_MAP_COUNT}")
    mode = _read("/proc/sys/vm/overcommit_memory", "?")
    names = {"0": "heuristic", "1": "always", "2": "never"}
    yield Check("vm.overcommit_memory", "warn" if mode == "2" else "ok", f"{mode} ({names.get(mode, 'unknown')})",
                "address space of a whole tensor is reserved and may be refused; sysctl -w vm.overcommit_memory=0"
                if mode == "2" else "")
    huge = _read("/sys/kernel/mm/transparent_hugepage/enabled", "not there")
    chosen = huge[huge.find("[") + 1:huge.find("]")] if "[" in huge else huge
    yield Check("transparent huge pages", "warn" if chosen == "never" else "ok", chosen,
                "streaming of weights is slower; echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
                if chosen == "never" else "")


def _memory() -> Iterator[Check]:
    info = {key: int(rest.split()[0]) * 1024 for key, _, rest in
            (line.partition(":") for line in _read("/proc/meminfo").splitlines()) if rest}
    total, free = info.get("MemTotal", 0), info.get("MemAvailable", 0)
    yield Check("memory", "ok" if free >= MIN_MEMORY else "warn", f"{format_bytes(free)} of {format_bytes(total)} free",
                "" if free >= MIN_MEMORY else "keep --ddr well below what is free")
    limit = cgroup_limit()
    if limit is None:
        yield Check("cgroup memory limit", "ok", "none")
    else:
        yield Check("cgroup memory limit", "ok" if limit >= MIN_MEMORY else "warn", format_bytes(limit),
                    "" if limit >= MIN_MEMORY else "keep --ddr and the model's weights below it")


def cgroup_limit() -> int | None:
    """Returns the tightest memory limit of this process's control groups in bytes; None if there is none."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            folders = [Path("/sys/fs/cgroup" + group), *Path("/sys/fs/cgroup" + group).parents]
            limits += [_read(str(folder / "memory.max")) for folder in folders if "cgroup" in str(folder)]
        elif "memory" in controllers.split(","):
            limits.append(_read(f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"))
    # Version 1 writes "no limit" as a number near 2^63.
    numbers = [int(text) for text in limits if text.isdigit() and int(text) < 2**60]
    return min(numbers, default=None)


def _limits() -> Iterator[Check]:
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    free = space == resource.RLIM_INFINITY
    yield Check("RLIMIT_AS", "ok" if free else "warn", "unlimited" if free else format_bytes(space),
                "" if free else "a tensor reserves its whole size of address space; ulimit -v unlimited")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    enough = files == resource.RLIM_INFINITY or files >= MIN_OPEN_FILES
    yield Check("RLIMIT_NOFILE", "ok" if enough else "warn", str(files),
                "" if enough else f"ulimit -n {MIN_OPEN_FILES}")
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    free = size == resource.RLIM_INFINITY
    yield Check("RLIMIT_FSIZE", "ok" if free else "warn", "unlimited" if free else format_bytes(size),
                "" if free else "a store cannot grow past it; ulimit -f unlimited")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = "unlimited" if locked == resource.RLIM_INFINITY else format_bytes(locked)
    yield Check("RLIMIT_MEMLOCK", "ok", f"{text}; host memory is not locked without a GPU")


def _processor() -> Iterator[Check]:
    bits, _ = _probe()
    names = {"AVX2": lib.H3_PROBE_AVX2, "AVX-512": lib.H3_PROBE_AVX512, "F16C": lib.H3_PROBE_F16C}
    found = [name for name, bit in names.items() if bits & bit]
    cores = len(os.sched_getaffinity(0))
    plain = platform.machine() == "x86_64" and "AVX2" not in found
    yield Check("processor", "warn" if plain else "ok",
                f"{platform.machine()}, {cores} cores usable, {', '.join(found) or 'no vector extension known'}",
                "kernels run in their plain C form, slowly; nothing to do on this processor" if plain else "")


def _versions() -> Iterator[Check]:
    wanted = ("h3store", "torch", "numpy", "zstandard", "tokenizers", "safetensors")
    found = [f"{name} {version}" for name in wanted if (version := _version(name))]
    yield Check("versions", "ok", f"Python {platform.python_version()}, {', '.join(found)}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> Iterator[Check]:
    if (_version("torch") or "").endswith("+cpu"):
        yield Check("CUDA", "ok", "none (this torch is a CPU build); tiers are ddr and nvme")
        return
    import torch  # seconds of import that only this check needs

    if torch.cuda.is_available():
        yield Check("CUDA", "ok", f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    else:
        yield Check("CUDA", "ok", "torch finds no device; tiers are ddr and nvme")


def _disk(path: Path) -> Iterator[Check]:
    folder = path if path.is_dir() else path.resolve().parent
    try:
        path.stat()  # another folder's figures would be taken for its
        written, read, direct = disk_speed(folder)
    except OSError as error:
        where = folder if os.path.exists(path) else path
        yield Check("disk", "fail", f"{where}: {error.strerror}", "name a folder that can be written, with --path")
        return
    slow = read < 200e6
    how = "past the page cache" if direct else "after its pages were dropped"
    yield Check("disk", "warn" if slow else "ok",
                f"{folder}: writes {written / 1e6:.0f} MB/s synced, reads {read / 1e6:.0f} MB/s {how}",
                "restoring a document waits for this disk; keep stores on an NVMe disk" if slow else "")
    stats = os.statvfs(folder)
    room = stats.f_bavail * stats.f_frsize
    yield Check("disk space", "ok" if room > GiB else "warn", f"{format_bytes(room)} free",
                "" if room > GiB else "a store needs room for the KV cache of its documents; free some")


def disk_speed(folder: Path) -> tuple[float, float, bool]:
    """Measures a folder's disk with a file of its own, removed at the end.

    Args:
        folder: must be writable.

    Returns:
        Bytes a second written (fdatasync included), bytes a second read, and whether reading went past the page cache
        (O_DIRECT) or had its pages dropped before.

    Raises:
        OSError: the folder can't be written, or is full.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".h3store-doctor-") as file:
        piece = os.urandom(_PIECE)
        size, seconds = _timed(lambda: os.write(file.fileno(), piece), lambda: os.fdatasync(file.fileno()))
        written = size / seconds
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            fd, direct = os.open(file.name, os.O_RDONLY | os.O_DIRECT), True
        except OSError:  # tmpfs and some overlays refuse it
            fd, direct = os.open(file.name, os.O_RDONLY), False
        try:
            return written, _read_speed(fd), direct
        finally:
            os.close(fd)


def _read_speed(fd: int) -> float:
    with mmap.mmap(-1, _PIECE) as buffer:  # O_DIRECT wants an aligned buffer
        size, seconds = _timed(lambda: os.readv(fd, [buffer]), lambda: None)
    return size / seconds


def _timed(step: Callable[[], int], finish: Callable[[], None]) -> tuple[int, float]:
    size, start = 0, time.perf_counter()
    while size < DISK_PROBE_BYTES and time.perf_counter() - start < DISK_PROBE_S:
        moved = step()
        size += moved
        if moved < _PIECE:
            break
    finish()
    return max(size, 1), max(time.perf_counter() - start, 1e-9)


__all__ = ["Check", "as_dict", "cgroup_limit", "disk_speed", "examine"]
