"""Tables in Markdown. Knows nothing of what stands in them."""

from collections.abc import Iterable, Sequence


def line(*cells: object) -> str:
    """A line of a table.

    >>> line("update", 1)
    '| update | 1 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[str], rows: Iterable[Iterable[object]] = ()) -> list[str]:
    """A table's lines."""
    return [line(*head), f"|{'---|' * len(head)}", *(line(*row) for row in rows)]
