"""This machine's memory: bytes of the process, bytes still free, how glibc returns freed memory, and ordinary pages for gigabytes.

Pages are counted as Linux counts them. Knows nothing of their contents.
"""

import ctypes
import mmap
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

GB = 1e9  # bytes
_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")  # writing 5 makes the peak's count begin anew
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
_ALLOCATOR = SimpleNamespace(tuned=False)  # by `give_back_early`: not in a process that calls a training as a function
_ROOM = 4  # times the process's peak that must still be free before it keeps what it frees


def counts_pages() -> bool:
    """Whether the system counts resident pages: Linux does."""
    return _RESET.exists()


def resident(field: str = "VmRSS") -> int:
    """Bytes of `VmRSS`, what is resident now, or `VmHWM`, its peak."""
    line = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert line is not None, f"{_STATUS} has no {field}"
    return 1024 * int(line.group(1))


def peak() -> int:
    """Bytes of this process at their most so far, or since `forget_peak`."""
    if counts_pages():
        return resident("VmHWM")
    import resource  # not above: Windows has none, and plays (docs/play.md) though it does not train

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak() -> None:
    """Makes `peak` begin at what is resident now, where the system counts."""
    if counts_pages():
        _RESET.write_text("5")


def peak_memory() -> dict[str, float]:
    """Most memory held so far, in bytes: of this process, and of the device where it keeps count (a CPU does not)."""
    import jax  # not above: a benchmark of PyTorch counts its pages without those of JAX

    out = {"memory/host_peak_bytes": float(peak())}
    statistics = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in statistics:
        out["memory/device_peak_bytes"] = float(statistics["peak_bytes_in_use"])
    return out


def available(limit: int) -> int:
    """Bytes that processes here can still take, within their control group's limit; at most `limit`."""
    if _MEMINFO.exists():
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        limit = min(limit, 1024 * int(lines["MemAvailable"].split()[0]))
    most, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if most.exists() and used.exists() and (group := most.read_text().strip()) != "max":
        limit = min(limit, int(group) - int(used.read_text()))
    return limit


def give_back_early() -> None:
    """Has glibc return freed memory to the system, and its threads allocate from two heaps in all; call it before they start.

    As it comes it keeps up to 64 MB at its heap's end, and has eight heaps a core, of which it gives a page back only when nothing
    on it is used: what compiling threads leave behind keeps more resident. 0.1 GB in a run of 124M parameters.
    """
    if counts_pages():
        _ALLOCATOR.tuned = True
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)  # with one, compiling takes a fifth longer
        libc.mallopt(_M_TRIM_THRESHOLD, 2**20)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**23)  # larger blocks are mapped one by one; 5 % slower if smaller ones are


def keep_freed() -> bool:
    """Has glibc keep what is freed from now on, after `give_back_early` and where memory abounds; whether it does.

    A program on a CPU asks for all its temporaries in one block, and each page of a block that was given back is zeroed and mapped
    anew: a seventh of an iteration of 64 x 16 short completions. It holds more where a block no longer fits into the holes.
    """
    keeps = _ALLOCATOR.tuned and available(sys.maxsize) > _ROOM * peak()
    if keeps:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_MAX, 0)  # no block is mapped, and so unmapped, by itself
    return keeps


def trim() -> None:
    """Returns freed memory to the system; glibc keeps it, which would count as used before and hide what is used next."""
    if counts_pages():
        ctypes.CDLL(None).malloc_trim(0)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Array of zeros in ordinary pages, for gigabytes that are written once and dropped soon.

    It begins at a page, from where XLA's CPU device takes it as it is; the system gets it back at its end. numpy would ask for
    huge pages, and where free memory is in pieces, as after reading large files, the kernel moves memory about to make them:
    reading a checkpoint of 1.5 GB took 4.0 CPU seconds so, and 1.7 without.
    """
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """The array's values in memory of their own (`empty`)."""
    copy = empty(array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
