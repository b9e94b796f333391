"""A small value that is costly to find and a function of what it is remembered by; kept in the cache folder as JSON.

A folder that cannot be written, or a damaged file, costs finding the value again, nothing else.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_grpo.system.whole_files import written_whole


class Remembered:
    """One value.

    Args:
        cache: folder (`compilation_cache`); None: nothing is remembered.
        kind: what is remembered; its file's name begins with it.
        what: JSON values that decide it, all of them.

    Attributes:
        value: JSON; None: not known.
    """

    def __init__(self, cache: str | None, kind: str, what: Sequence[Any]):
        self.value: Any = None
        self._path = None
        if cache is not None:
            name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
            self._path = Path(cache).expanduser() / "remembered" / f"{kind}-{name}.json"
            with contextlib.suppress(OSError, ValueError):
                self.value = json.loads(self._path.read_text(encoding="utf-8"))

    def keep(self, value: Any) -> None:
        """Remembers it, if that can be written."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(self._path) as working:
                    working.write_text(json.dumps(value), encoding="utf-8")
