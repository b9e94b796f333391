"""The folder of a run: made, writable, and used by one process at a time; and `run.json`, what it was made with.

The lock is the kernel's (`flock`), so it dies with its process: a lock file that a killed run left behind is stale and taken over.
Knows nothing of what is trained.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

LOCK = "run.lock"
RECORD = "run.json"
PACKAGES = ("jax_grpo", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "chess", "tokenizers")


class RunFolderError(ValueError):
    """The run folder cannot be used; the message names it, why, and what to do."""


class RunFolder:
    """Makes the folder and holds its lock; a context manager.

    Raises:
        RunFolderError: it cannot be made or written, or another process is using it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __enter__(self) -> Path:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunFolderError(
                f"run_dir is {str(self.path)!r}, which cannot be written ({error.strerror}); give a folder that can"
            ) from error
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._handle, 1000).decode(errors="replace").strip()
            os.close(self._handle)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise RunFolderError(
                    f"run_dir is {str(self.path)!r}, which cannot be locked ({error.strerror})"
                ) from error
            raise RunFolderError(
                f"run_dir is {str(self.path)!r}, which another run is using ({holder or 'it has just started'}); stop that "
                f"one, or choose another run_dir"
            ) from error
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode())
        return self.path

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._handle)  # releases the lock; the file stays: removing it would race with a run that opens it


def write_whole(path: Path, text: str) -> None:
    """Replaces a file's text at once: a reader or a killed writer sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def record_start(run_dir: Path, resolved_config: str, command: str | None, iteration: int, micro_batches: int) -> None:
    """Writes `run.json`: versions, hardware, commit, command and micro-batches of this start, after those of earlier ones."""
    file = run_dir / RECORD
    earlier = read_record(run_dir)["starts"] if iteration > 0 else []
    start = {
        "time": _now(),
        "from_iteration": iteration,
        "command": command,
        "micro_batches": micro_batches,
        "config_sha256": hashlib.sha256(resolved_config.encode()).hexdigest(),
        "git": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS") if name in os.environ},
    }
    write_whole(file, json.dumps({"starts": [*earlier, start], "finished": None}, indent=1) + "\n")


def record_finish(run_dir: Path) -> None:
    """Notes in `run.json` that the run reached its last iteration and its weights are written."""
    write_whole(run_dir / RECORD, json.dumps(read_record(run_dir) | {"finished": _now()}, indent=1) + "\n")


def read_record(run_dir: Path) -> dict[str, Any]:
    """`run.json`; a record without starts where there is none or it is unreadable: it informs, nothing depends on it."""
    try:
        record = json.loads((run_dir / RECORD).read_text(encoding="utf-8"))
        return record if isinstance(record["starts"], list) else {"starts": [], "finished": None}
    except (OSError, ValueError, KeyError, TypeError):
        return {"starts": [], "finished": None}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any] | None:
    """Commit of the source's repository and whether it has uncommitted changes; None outside one."""
    where = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*where, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10)
        status = subprocess.run(
            [*where, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(status.stdout.strip())}


def hardware() -> dict[str, Any]:
    """Platform, devices, processor, cores this process may use, and memory in bytes."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
