"""The tensors of a checkpoint as files: an Orbax leaf handler that hashes what it writes while it writes it.

The layout is Orbax's (zarr 2, one uncompressed chunk a tensor), with its metadata, so that Orbax alone reads it too. Reading hashes
the bytes it returns. Knows nothing of runs, nor which checkpoint is the right one.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jax_grpo.checkpoint_files import STATE, Fingerprint, read_files

WRITERS = 2  # files written side by side, so that one is hashed while another waits for the disk
TENSOR_METADATA = (
    2048  # bytes a tensor takes in Orbax's `_METADATA` and in the manifest, at most; names are some dozen bytes
)
FIXED_METADATA = 1 << 17  # bytes of all other files: the manifest's config is some 10 kB


class HashedTensors(ocp.type_handlers.NumpyHandler):
    """Writes each array in one piece, forced to the disk, in place of Orbax's concurrent TensorStore writes.

    Those report a full disk from threads that outlive the event loop they report to: a page of tracebacks on stderr beside the
    error. They also copy every array first, and their files would have to be read back to be hashed.

    Attributes:
        fingerprints: of the written files, by path.
    """

    def __init__(self):
        super().__init__()
        self.fingerprints: dict[Path, Fingerprint] = {}

    async def serialize(
        self,
        values: Sequence[np.ndarray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> list:
        """Returns once everything is on the disk, so that nothing is left to wait for.

        Raises:
            OSError: as the file system gave it; no write is under way any more.
        """
        del args
        folders = [Path(os.fspath(info.path)) for info in infos]
        with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
            for written in pool.map(_write_tensor, folders, values):
                self.fingerprints |= written
        return []


def _write_tensor(folder: Path, value: np.ndarray) -> dict[Path, Fingerprint]:
    folder.mkdir(parents=True)
    # The bytes that TensorStore's zarr driver writes for the same array, so that either may have written a checkpoint.
    kind = (
        value.dtype.str if value.dtype.isbuiltin == 1 else value.dtype.name
    )  # bfloat16 has no code of its own in numpy
    layout = {"chunks": value.shape, "compressor": None, "dimension_separator": ".", "dtype": kind, "fill_value": None}
    layout |= {"filters": None, "order": "C", "shape": value.shape, "zarr_format": 2}
    contents = {".zarray": json.dumps(layout, separators=(",", ":")).encode(), _chunk(value.ndim): _bytes(value)}
    return {folder / name: _write_file(folder / name, content) for name, content in contents.items()}


def _bytes(value: np.ndarray) -> memoryview:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8).data


def _write_file(path: Path, content: bytes | memoryview) -> Fingerprint:
    # In single calls, which give up the interpreter's lock: the training thread is not kept waiting for it.
    with path.open("wb", buffering=0) as file:
        rest = memoryview(content)
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_arrays(folder: Path, arrays: dict[str, np.ndarray]) -> dict[str, Fingerprint]:
    """Saves the named arrays as the Orbax checkpoint `folder/state`; returns the files forced to the disk by relative name.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    tensors = HashedTensors()
    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, tensors),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # none is saved; Orbax warns where it is not registered
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as writer:
        writer.save((folder / STATE).absolute(), args=ocp.args.PyTreeSave(arrays))
    # Orbax wrote under a temporary name beside the final one.
    return {
        Path(STATE, *path.parts[len(folder.absolute().parts) + 1 :]).as_posix(): found
        for path, found in tensors.fingerprints.items()
    }


def bytes_on_disk(arrays: Mapping[str, Any], block: int) -> int:
    """What a checkpoint of these arrays (`nbytes` each) takes at most on a file system of `block` bytes an allocation unit."""
    values = sum(-(-array.nbytes // block) * block for array in arrays.values())
    return values + len(arrays) * (2 * block + TENSOR_METADATA) + FIXED_METADATA  # the folder and `.zarray`


def read_arrays(path: Path, content: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The arrays whose names begin with `prefix`, by name, in host memory; the bytes returned are those that were hashed.

    Their files are read once, and so are the files that describe the tree where all arrays are asked for. Orbax would read them
    a second time after the hashes were found right.

    Args:
        path: the checkpoint's folder.
        content: of its manifest.
        prefix: of the wanted names; others stay on the disk.

    Raises:
        CheckpointError: names a file that is missing, truncated or changed.
    """
    wanted = {name: entry for name, entry in content["arrays"].items() if name.startswith(prefix)}
    values = {name: f"{STATE}/{name}/{_chunk(len(shape))}" for name, (shape, _) in wanted.items()}
    listed = {name: found for name, found in content["files"].items() if name.startswith(f"{STATE}/{prefix}")}
    found = read_files(path, listed, set(values.values()))
    return {name: found[file].view(wanted[name][1]).reshape(wanted[name][0]) for name, file in values.items()}


def _chunk(dimensions: int) -> str:
    """File name of an array's only zarr chunk."""
    return ".".join("0" * dimensions) or "0"
