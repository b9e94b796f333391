"""Draws who imports whom into docs/architecture.md, from the imports themselves: `python parity_tests/architecture.py`.

A node is a room or a module of the top level. An arrow that follows from others is left out (transitive reduction).
"""

from collections import defaultdict
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawing: begin -->\n", "<!-- drawing: end -->\n"
COMMANDS = ("__main__", "uci", "match", "data")  # a line each, in front of the rooms


def imports() -> dict[str, set[str]]:
    """The rooms and modules of the top level that each of them imports."""
    graph = grimp.build_graph("jax_grpo", cache_dir=None, exclude_type_checking_imports=True)
    found = defaultdict(set)
    for module in graph.modules - {"jax_grpo"}:
        for imported in graph.find_modules_directly_imported_by(module) - {"jax_grpo"}:
            room, other = module.split(".")[1], imported.split(".")[1]
            if room != other:
                found[room].add(other)
    return {room: others for room, others in found.items() if room not in COMMANDS}


def reduced(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same without the arrows that a longer way stands for; there is no circle."""

    def reached(room: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in found.get(room, ())))

    return {
        room: {other for other in others if not any(other in reached(between) for between in others)}
        for room, others in found.items()
    }


def drawing() -> str:
    """A Mermaid flowchart: rooms as boxes, modules of the top level rounded."""
    arrows = reduced(imports())
    names = sorted(arrows.keys() | set().union(*arrows.values()))
    folder = ROOT / "jax_grpo"
    nodes = [f'    {name}["{name}/"]' if (folder / name).is_dir() else f"    {name}([{name}])" for name in names]
    lines = [f"    {room} --> {other}" for room in sorted(arrows) for other in sorted(arrows[room])]
    return "\n".join(["```mermaid", "flowchart TD", *nodes, *lines, "```", ""])


def page() -> str:
    """The page with its drawing as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + drawing() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
