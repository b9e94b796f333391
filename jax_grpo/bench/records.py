"""What every benchmark's command has: a record of its settings, machine and results as JSON.

Knows nothing of what is measured.
"""

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_grpo.bench.machine import line_of, machine
from jax_grpo.system.whole_files import write_record


def command_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """A parser that calls itself by its module, and shows the first line of what it is `about`."""
    return argparse.ArgumentParser(prog=f"python -m {module}", description=(about or "").partition("\n")[0])


def selected(option: str, text: str | None, known: Collection[str]) -> list[str]:
    """The names that an option lists, or all where it is not given. Raises SystemExit: one is unknown; says which there are."""
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} {unknown[0]!r}: expected some of {', '.join(known)}")
    return names


def new_record(module: str, argv: Sequence[str] | None, **facts: Any) -> dict[str, Any]:
    """The command as it was typed (`argv`: None in a shell), the facts, and the machine; command and machine are printed."""
    command = " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)])
    record = {"command": command, **facts, "machine": machine()}
    print(f"# {command}\n# {line_of(record['machine'])}", flush=True)
    return record


def save(file: str | Path | None, record: Mapping[str, Any]) -> None:
    """Writes the raw data, where a file is given; after each result, so that a run that is stopped leaves what it has."""
    if file:
        write_record(Path(file), record)  # whole: the machine may be taken away at any moment


def saved(file: str | Path | None) -> dict[str, Any]:
    """What an earlier run saved; empty where there is none, or it was ended while it wrote."""
    try:
        return json.loads(Path(file).read_text()) if file else {}
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def same_settings(earlier: Mapping[str, Any], record: Mapping[str, Any], *names: str) -> bool:
    """Whether an earlier record, which may be empty, has these settings as this one, and the same processor."""
    same = all(earlier.get(name) == record[name] for name in names)
    return same and earlier["machine"].get("processor") == record["machine"]["processor"]
