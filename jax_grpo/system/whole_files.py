"""Files that a killed process or a second one must not spoil: there whole or not at all, known by their hash, one writer at a time.

Knows nothing of what is in them, and imports little: worker processes wait for it.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished"  # how the name of a file ends that is being written, or that a killed process left


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Another name to write the file under, which takes its place when the block ends and goes when it fails.

    A reader finds what was there before, or all of what is written. `durable`: it is on the disk before it takes its place.
    """
    working = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield working
        if durable:
            to_disk(working)
        os.replace(working, path)
        if durable:
            to_disk(path.parent)
    except Exception:
        working.unlink(missing_ok=True)
        raise


def to_disk(path: Path) -> None:
    """Forces a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock(path: Path) -> int:
    """Descriptor of the file, locked until it is closed. The lock is the kernel's: it dies with its process.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be made, or locked.
    """
    import fcntl  # not above: Windows has none, and plays (docs/play.md) though it does not train

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
