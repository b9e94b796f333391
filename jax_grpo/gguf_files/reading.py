"""A GGUF file opened: its metadata by key, and its tensors, each read when its values are asked for.

Knows the container and its number formats; what the keys and tensors mean is `families`' and `tokenizer`'s affair.
"""

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_grpo.gguf_files.names import GGUFError

MAGIC = b"GGUF"
# Kinds of the whole container that hold another thing than a model, or a part of one, by key, with the only value that is read.
WHOLE = {"general.type": "model", "split.count": 1}


class GGUFFile(NamedTuple):
    """`fields` are the metadata's values by key; `tensors` the `gguf` package's, by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, Any]

    def refusal(self, what: str) -> GGUFError:
        """The error that says so of this file."""
        return GGUFError(f"{self.path}: {what}")


def read(path: Path) -> GGUFFile:
    """The file's metadata; tensors stay on the disk.

    Raises:
        GGUFError: the `gguf` package is missing, the file is none of this format, truncated, or a part of a model.
    """
    try:
        from gguf import GGUFEndian, GGUFReader
    except ModuleNotFoundError as error:
        raise GGUFError(f"{path} needs the `gguf` package: pip install 'jax_grpo[gguf]'") from error
    with path.open("rb") as file:
        if (begins := file.read(len(MAGIC))) != MAGIC:
            raise GGUFError(f"{path} is not a GGUF file: it begins with {begins!r}; expected {MAGIC!r}")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the package raises whatever its views of missing or unknown bytes do
        reason = " ".join(str(error).split())
        raise GGUFError(
            f"{path} cannot be read ({type(error).__name__}: {reason}); it may be truncated, or hold a type that the "
            "installed `gguf` package does not know"
        ) from error
    made = GGUFFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.endianess != GGUFEndian.LITTLE:
        raise made.refusal("its numbers are big-endian; only little-endian files are read")
    for key, needed in WHOLE.items():
        if (value := fields.get(key, needed)) != needed:
            raise made.refusal(f"{key} is {value!r}; expected {needed!r}")
    return made


def shape_of(tensor: Any) -> tuple[int, ...]:
    """As numpy counts it, the slowest axis first."""
    return tuple(int(size) for size in reversed(tensor.shape))


def dtype_of(tensor: Any) -> np.dtype:
    """What `values_of` gives: float16 and bfloat16 as they are stored, everything else float32."""
    return np.dtype({"F16": np.float16, "BF16": ml_dtypes.bfloat16}.get(tensor.tensor_type.name, np.float32))


def values_of(file: GGUFFile, tensor: Any) -> np.ndarray:
    """The tensor's values, dequantised.

    Raises:
        GGUFError: the `gguf` package cannot dequantise its type.
    """
    from gguf import dequantize

    dtype = dtype_of(tensor)
    if dtype != np.float32:
        return tensor.data.view(dtype).reshape(shape_of(tensor))
    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(shape_of(tensor))
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise file.refusal(f"tensor {tensor.name!r} is of type {kind}, which `gguf` does not dequantise") from error
