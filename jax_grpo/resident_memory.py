"""Memory of this process that is really there, as Linux counts it: now, and at its most since the count began anew."""

import ctypes
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_RESET = Path("/proc/self/clear_refs")  # writing 5 makes the peak's count begin anew


def counted() -> bool:
    """Whether the system counts so: Linux does."""
    return _RESET.exists()


def resident(field: str) -> int:
    """Bytes of `VmRSS` or `VmHWM` (its peak)."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None, f"{_STATUS} has no {field}"
    return 1024 * int(found.group(1))


def give_back_early() -> None:
    """Has glibc return freed memory to the system, and its threads allocate from two heaps in all; call it before they start.

    As it comes it keeps up to 64 MB at its heap's end, and has eight heaps a core, of which it gives a page back only when nothing
    on it is used: what compiling threads leave behind keeps more resident. 0.1 GB in a run of 124M parameters.
    """
    if counted():
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 2)  # with one, compiling takes a fifth longer
        libc.mallopt(_M_TRIM_THRESHOLD, 2**20)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**23)  # larger blocks are mapped one by one; 5 % slower if smaller ones are


def trim() -> None:
    """Returns freed memory to the system; glibc keeps it, which would count as used before and hide what is used next."""
    if counted():
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Makes `VmHWM` begin at what is resident now, where there is one."""
    if counted():
        _RESET.write_text("5")
