"""Texts of a model or a file on a terminal: they must not move the cursor, colour the screen or hide."""


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
