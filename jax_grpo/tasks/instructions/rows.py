"""Rows of prompts with instructions, in IFEval's JSON lines: read, checked and written. Knows no texts and no rewards.

A row is {"prompt", "instruction_id_list", "kwargs"}, the latter a list of arguments, one mapping an instruction; `key` and other
columns stay as they are.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_grpo.config.files import parsed_json
from jax_grpo.tasks.instructions.arguments import BadInstruction
from jax_grpo.tasks.instructions.catalogue import instructions_of


def read_rows(path: str | Path, *, leave_out: Iterable[str] = ()) -> list[dict[str, Any]]:
    """The file's rows, each checked, but for those with an instruction that is to be left out.

    IFEval's own file is read with `leave_out=NOT_OFFERED`. Raises BadInstruction, which names the file and the line.
    """
    rows, omitted = [], set(leave_out)
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):
        if line.strip():
            row = _row(line, f"{path}: line {number}")
            if not omitted.intersection(row["instruction_id_list"]):
                instructions_of(row["instruction_id_list"], row["kwargs"], f"{path}: line {number}")
                rows.append(row)
    if not rows:
        raise BadInstruction(
            f"{path}: has no row to ask; expected JSON lines with prompt, instruction_id_list and kwargs"
        )
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parsed_json(line)
    except ValueError as error:  # an undecodable byte is one too
        raise BadInstruction(f"{where}: is not JSON: {error}") from None
    kinds = (
        ("prompt", str, "a text"),
        ("instruction_id_list", list, "a list of ids"),
        ("kwargs", list, "a list of mappings"),
    )
    if not isinstance(row, dict):
        raise BadInstruction(
            f"{where}: is {row!r:.80}; expected a mapping with {', '.join(name for name, *_ in kinds)}"
        )
    for name, kind, expected in kinds:
        if not isinstance(row.get(name), kind):
            problem = f"is {row[name]!r:.80}" if name in row else "is missing"
            raise BadInstruction(f"{where}: {name} {problem}; expected {expected}")
    return row


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows as `read_rows` reads them."""
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
