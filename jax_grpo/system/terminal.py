"""Tables on a terminal, and texts of a model or a file: they must not move the cursor, colour the screen or hide."""

from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """The text on one line, each character that does not print itself as Python escapes it; a line's end is `⏎`.

    >>> printable("1 + 1\\n= \\x1b[31m2\\u202e")
    '1 + 1⏎= \\\\x1b[31m2\\\\u202e'
    """
    return "".join(
        c if c.isprintable() else "⏎" if c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def printable_lines(text: str) -> str:
    """The same of a text of several lines, whose ends and tabs stay."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)


def print_tables(
    tables: Iterable[tuple[str, Sequence[str], Iterable[Sequence[str]]]], width: int | None = None
) -> None:
    """Tables of a title, a head and rows, within the console's width (in characters) or the one given.

    The first column is text, the others are numbers.
    """
    import rich.box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=width)
    for title, head, rows in tables:
        table = Table(*head[:1], title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for name in head[1:]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*map(Text, row))  # brackets are intervals, no markup
        console.print(table)
