"""Reads the files a run appends to: one JSON object with its `iteration` a line."""

import json
from pathlib import Path


class RecordsError(ValueError):
    """A file of records is not one; names the file, the line, what is there and what was expected."""


def read_records(path: str | Path, *, missing_ok: bool = False) -> list[dict]:
    """Objects of a JSON-lines file, in order, without a last line that a kill cut short; a RecordsError where it is none."""
    if missing_ok and not Path(path).exists():
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read ({error})") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # no line end after it
                continue
            raise RecordsError(f"{path}:{number}: {line[:60]!r} is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise RecordsError(f"{path}:{number}: {line[:60]!r}; expected an object")
        if type(record.get("iteration")) is not int:
            raise RecordsError(f"{path}:{number}: iteration is {record.get('iteration')!r}; expected a whole number")
        records.append(record)
    return records
