"""Memory of this process that is really there, as Linux counts it: now, and at its most since the count began anew."""

import ctypes
import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")  # writing 5 makes the peak's count begin anew


def counted() -> bool:
    """Whether the system counts so: Linux does."""
    return _RESET.exists()


def resident(field: str) -> int:
    """Bytes of `VmRSS` or `VmHWM` (its peak)."""
    found = re.search(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    assert found is not None, f"{_STATUS} has no {field}"
    return 1024 * int(found.group(1))


def trim() -> None:
    """Returns freed memory to the system; glibc keeps it, which would count as used before and hide what is used next."""
    ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Makes `VmHWM` begin at what is resident now."""
    _RESET.write_text("5")
