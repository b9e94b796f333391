"""The files of one checkpoint: made durable, listed with their hashes, put in place whole, and checked before they are read.

A checkpoint is a folder named by its iteration, with `state/` (Orbax arrays) and `manifest.json` (what the run was, and the size
and SHA-256 of every file). It is written under a name that no reader looks at and renamed once everything is on the disk.
Knows nothing of models or training.
"""

import concurrent.futures
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from jax_grpo.system import memory

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state"
UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"  # prefixes of folders that no reader looks at
READERS = 4  # files read and hashed side by side, so that the disk is busy while bytes are hashed
PIECE = 1 << 20  # bytes read and hashed at a time: they are in the cache when they are hashed


class Fingerprint(TypedDict):
    """A file's size and the SHA-256 of its bytes, in hexadecimal."""

    bytes: int
    sha256: str


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names the file or key, what was found and what to do."""


def folder_name(iteration: int) -> str:
    """Folder of the checkpoint after `iteration` iterations."""
    return f"{iteration:06d}"


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a complete checkpoint's folder (its contents may still be damaged)."""
    return (path / MANIFEST).is_file()


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first; half-written ones never have such a name."""
    found = [path for path in folder.glob("[0-9]*") if path.name.isdigit() and is_checkpoint(path)]
    return sorted(found, key=lambda path: int(path.name))


def clear_leftovers(folder: Path) -> None:
    """Removes what a killed writer left; only for the run that owns the folder."""
    for prefix in (UNFINISHED, DISCARDED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def publish(
    folder: Path, iteration: int, fill: Callable[[Path], dict[str, Fingerprint]], content: dict[str, Any]
) -> Path:
    """Writes one checkpoint whole or not at all, and returns its folder.

    Args:
        folder: of all checkpoints.
        iteration: names it.
        fill: puts the state's files into the folder it is given; returns those that it hashed and forced to the disk, by
            name relative to it.
        content: JSON values of the manifest, beside the list of files.

    Raises:
        OSError: the disk is full or cannot be written; nothing with the checkpoint's name exists then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    working, final = folder / f"{UNFINISHED}{folder_name(iteration)}", folder / folder_name(iteration)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        written = fill(working)
        every = sorted(path.relative_to(working).as_posix() for path in working.rglob("*") if path.is_file())
        written |= {name: _fingerprint(working / name) for name in every if name not in written}
        files = {name: written[name] for name in every}
        content = content | {"format": FORMAT, "iteration": iteration, "files": files}
        write_manifest(working, content)
        for path in (working, *(path for path in working.rglob("*") if path.is_dir())):
            _sync_folder(path)
        if final.exists():
            discard(final)
        working.rename(final)
        _sync_folder(folder)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    return final


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Writes the manifest of a checkpoint's folder, or puts another in its place; it is there whole at every moment.

    Raises:
        OSError: the disk is full or cannot be written; the manifest that was there still is.
    """
    unfinished = path / f"{UNFINISHED}{MANIFEST}"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump({"sha256": _json_hash(content), "content": content}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path / MANIFEST)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path)


def discard(path: Path) -> None:
    """Removes a checkpoint: renamed first, so that none is ever half there under its name."""
    hidden = path.with_name(DISCARDED + path.name)
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's content, its own hash verified.

    Raises:
        CheckpointError: missing, not JSON, changed, or of another format.
    """
    file = path / MANIFEST
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        content, stated = record["content"], record["sha256"]
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} does not exist; {path} is not a complete checkpoint") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged: not a readable manifest ({type(error).__name__}: {error})"
        ) from error
    if _json_hash(content) != stated:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one it states")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {content['format']}; this version reads format {FORMAT}")
    return content


def verify(path: Path) -> dict[str, Any]:
    """The manifest's content after every file of the checkpoint was read and hashed.

    Raises:
        CheckpointError: names a file that is missing, truncated or changed.
    """
    content = read_manifest(path)
    read_files(path, content["files"], ())
    return content


def read_files(path: Path, listed: Mapping[str, Fingerprint], keep: Container[str]) -> dict[str, np.ndarray]:
    """Reads and hashes the listed files of a checkpoint, each byte once; what is returned is what was hashed.

    Args:
        path: the checkpoint's folder.
        listed: from its manifest.
        keep: names of the files whose bytes (uint8) to return.

    Raises:
        CheckpointError: names a file that is missing, truncated or changed.
    """
    for name, expected in listed.items():  # before anything is read: most damage shows in the sizes
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / name} is missing; the checkpoint is damaged") from error
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path / name} has {size} bytes; expected {expected['bytes']}: the checkpoint is damaged"
            )
    largest_first = sorted(listed, key=lambda name: -listed[name]["bytes"])  # so that none is left for last alone
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        contents = pool.map(lambda name: _read_file(path / name, listed[name], name in keep), largest_first)
        return {name: found for name, found in zip(largest_first, contents, strict=True) if name in keep}


def _read_file(file: Path, expected: Fingerprint, keep: bool) -> np.ndarray:
    size, digest, done = expected["bytes"], hashlib.sha256(), 0
    buffer = memory.empty((size if keep else min(size, PIECE),), np.dtype(np.uint8))
    view = buffer.data
    try:
        with file.open("rb", buffering=0) as opened:
            while done < size:
                start = done if keep else 0
                piece = view[start : start + min(PIECE, size - done)]
                count = opened.readinto(piece)
                digest.update(piece[:count])
                if not count:
                    break
                done += count
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if digest.hexdigest() != expected["sha256"]:
        raise CheckpointError(
            f"{file} has other bytes than were written (SHA-256 {digest.hexdigest()[:12]}...; expected "
            f"{expected['sha256'][:12]}...): the checkpoint is damaged"
        )
    return buffer


def _fingerprint(file: Path) -> Fingerprint:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        os.fsync(opened.fileno())
        return {"bytes": opened.tell(), "sha256": digest}


def _json_hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
