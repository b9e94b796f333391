"""What a config names of the user's own code: `my_module:name`, of a module on the path, or `rewards.py:name`, of a file."""

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


class ImportedError(ValueError):
    """The user's code cannot be found or fails as it is imported; names the setting, the file and line, and what was expected."""


def imported(spec: str, key: str) -> Any:
    """The object that `spec` names, as the setting `key` gives it.

    The folder that the command was started in is on the path, as for `python -m`.

    Raises:
        ImportedError: see there.
    """
    module, _, name = spec.rpartition(":")
    if not module or not name.isidentifier():
        raise ImportedError(f"{key} is {spec!r}; expected my_module:name, or path/to/file.py:name")
    try:
        loaded = _file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except FileNotFoundError:
        raise ImportedError(f"{key} is {spec!r}: there is no file {Path(module).absolute()}") from None
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise ImportedError(f"{key} is {spec!r}: {where(error)}: {type(error).__name__}: {error}") from error
        raise ImportedError(
            f"{key} is {spec!r}: no module {module!r} on the path; a file is given as {module}.py:{name}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ImportedError(f"{key} is {spec!r}: {where(error)}: {type(error).__name__}: {error}") from error
    if not hasattr(loaded, name):
        public = ", ".join(each for each in vars(loaded) if not each.startswith("_")) or "nothing"
        raise ImportedError(f"{key} is {spec!r}: {loaded.__file__} has no {name!r}; it has {public}")
    return getattr(loaded, name)


def _hash(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file(path: Path) -> Any:
    """The module of a file, made once for all that is named of it, and again when the file has changed."""
    if not path.is_file():
        raise FileNotFoundError(path)
    name = f"jax_grpo_user_{path.stem}_{abs(hash((str(path.resolve()), _hash(path))))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a .py file has a loader"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def where(error: BaseException, file: str | None = None) -> str:
    """File and line at which an exception was raised: the last within `file`, where one of the traceback is."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame.f_code.co_filename, traceback.tb_lineno))
        traceback = traceback.tb_next
    own = [frame for frame in frames if frame[0] == file]
    path, line = (own or frames or [("?", 0)])[-1]
    return f"{path}:{line}"


def source_file(code: Any) -> str | None:
    """The file that a function, a class or a callable object was written in; None: in none, as in a notebook."""
    code = inspect.unwrap(code)
    try:
        return inspect.getsourcefile(code if inspect.isroutine(code) or inspect.isclass(code) else type(code))
    except TypeError:  # a builtin, or of a module that has no file
        return None


def code_hashes(code: Iterable[Any]) -> dict[str, str]:
    """SHA-256 of each of the user's files that the code was written in, by the file's name."""
    files = {Path(file).resolve() for each in code if (file := source_file(each)) is not None}
    return {file.name: _hash(file) for file in sorted(files) if file.is_file() and PACKAGE not in file.parents}
