"""What a process that writes nothing has in the place of a log, a console or a health check: it takes every call."""

import contextlib
from typing import Any


class Silent(contextlib.AbstractContextManager["Silent"]):
    """Does nothing and returns None, whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: object, **options: object) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None
