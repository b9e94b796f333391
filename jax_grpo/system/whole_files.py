"""Files that a killed process or a second one must not spoil: there whole or not at all, known by their hash, one writer at a time.

Those of the cache folder cost only time when they are lost: one that cannot be written, or is damaged, is done without. Knows
nothing of the contents, and imports little: worker processes wait for it.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Replaces a file's text at once (`written_whole`)."""
    with written_whole(path, durable=durable) as working:
        working.write_text(text, encoding="utf-8")


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Puts a JSON file in place whole."""
    write_whole(path, json.dumps(record, indent=1) + "\n")


def require_new(path: Path, option: str) -> None:
    """Refuses, with a FileExistsError, to write over a file that may be dear to somebody; `option` gave its name."""
    if path.exists():
        raise FileExistsError(
            f"{option}: {path} is there already and would be written over; give another name, or move it"
        )


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


def store(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file of the cache whole; without room, or rights, nothing is stored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as working:
            write(working)


class Remembered:
    """A small JSON `value` of a `kind` that the JSON values `key` decide, from the folder `cache`; None where it is not there."""

    def __init__(self, cache: str | None, kind: str, key: Sequence[Any]):
        self.value: Any = None
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._path = None if cache is None else Path(cache).expanduser() / "remembered" / f"{kind}-{name}.json"
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                self.value = json.loads(self._path.read_text(encoding="utf-8"))

    def keep(self, value: Any) -> None:
        """Remembers it, if that can be written."""
        if self._path is not None:
            store(self._path, lambda path: path.write_text(json.dumps(value), encoding="utf-8"))
