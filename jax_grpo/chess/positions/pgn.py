"""Main lines of PGN, read strictly: each game's own tags and moves, or one error that names the game and the line.

python-chess's reader ends a game at a blank line and skips words that it does not know: tags part from their moves, and a German
`Sf3` is read as the pawn's `f3`. Here tags, results and move numbers say where a game begins, and every word must be one of PGN's.
Comments and variations are passed over. The format: https://www.saremba.de/chessgml/standards/pgn/pgn-complete.htm
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator

import chess
import chess.pgn

from jax_grpo.chess.positions.rookworld import RowError

_TAG = re.compile(r'\[\s*(\w[\w+#=:-]*)\s*"((?:[^"\\]|\\.)*)"\s*\]')
_LOOSE_TAG = re.compile(r'\[\s*(\w[\w+#=:-]*)\s*"(.*)"\s*\]\s*')  # alone in its line, with quotation marks inside
_SETUP = ("fen", "setup", "variant")  # the tags that decide where a game begins
_SETUP_ANYWHERE = re.compile(rf"\[\W*(?:{'|'.join(_SETUP)})", re.IGNORECASE)
_TOKEN = re.compile(r"\s+|;.*|\$\d+|[^\s{};()$]+|.", re.DOTALL)
_NUMBER = re.compile(r"(\d{1,5})([.…]+|$)")
_SAN = re.compile(
    r"P?([NBKRQ]?[a-h]?[1-8]?[-x]?[a-h][1-8](?:=?[nbrqNBRQ])?|[O0]-[O0](?:-[O0])?)(?:\+\+|[+#])?(?:e\.?p\.?)?[!?]*"
)
_ASIDE = re.compile(r"[.…]+|[!?]+|[+#]+|e\.?p\.?|[-+=]/?[-+=]|[=±∓⩲⩱∞]")  # what stands between moves and says none
_RESULTS = ("1-0", "0-1", "1/2-1/2", "1/2", "½-½", "*")
_NULL = ("--", "Z0", "0000", "@@@@")


@dataclasses.dataclass
class _Game:
    tags: dict[str, str] = dataclasses.field(default_factory=dict)  # by lower-case name
    words: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # (line, word) of the main line
    depth: int = 0  # of variations that are open
    over: bool = False  # its result has been read

    def add(self, line: int, word: str) -> None:
        """Adds a word of the movetext."""
        if word in ("(", ")"):
            self.depth += 1 if word == "(" else -1
            if self.depth < 0:
                raise RowError(f"brackets of variations do not match (line {line})")
        elif self.depth == 0 and word in _RESULTS:
            self.over = True
        elif self.depth == 0:
            self.words.append((line, word))


def read_games(lines: Iterable[str]) -> Iterator[tuple[chess.Board, list[chess.Move]]]:
    """(first position, moves of the main line) of every game.

    Raises:
        RowError: it cannot be known which moves belong to which tags; a word or move that cannot be read; a null move; a comment
            or variation without an end; a variant; no legal position. Names the game.
    """
    game, number, line, gap = _Game(), 1, 0, False  # a blank line since the last word or tag
    try:
        for line, name, text in _words_and_tags(lines):
            if name is None and text:
                move = _NUMBER.match(text)
                first = move is not None and move[1] == "1" and move[2] in ("", ".")  # move, and White's
                ends = game.over or (gap and first and game.words and not game.depth)
                if ends and "fen" in game.tags and not game.words:
                    fen = game.tags["fen"]
                    raise RowError(f"FEN {fen!r} but no moves, and moves without tags follow (line {line})")
            elif name is not None:
                ends = game.words or game.over or (name in game.tags and (gap or name == "event"))
                if not ends and name in _SETUP and game.tags.get(name, text) != text:
                    raise RowError(f"two tags {name.upper()}, {game.tags[name]!r} and {text!r} (line {line})")
            else:
                gap = True
                continue
            if ends:
                yield _main_line(game, line)
                game, number = _Game(), number + 1
            gap = False
            if name is None:
                game.add(line, text)
            else:
                game.tags[name] = text
        yield _main_line(game, line)
    except RowError as error:
        raise RowError(f"game {number}: {error}") from error


def _words_and_tags(lines: Iterable[str]) -> Iterator[tuple[int, str | None, str]]:
    """(line, name, value) of a tag, (line, None, word) of movetext, and (line, None, "") of a blank line."""
    comment = 0  # the line in which the comment that is open began
    for line, marked in enumerate(lines, 1):
        text = marked.replace("\ufeff", "")
        if not comment and (text.startswith("%") or not text.strip()):
            if not text.strip():
                yield line, None, ""
            continue
        at, after_word = 0, False
        while at < len(text):
            if comment:
                if _TAG.fullmatch(text.strip()):
                    raise RowError(f"no }} closes the comment before the next game's tags (line {comment})")
                end = text.find("}", at)
                comment, at = (comment, len(text)) if end < 0 else (0, end + 1)
            elif text[at] == "[" and not after_word:
                name, value, at = _tag(line, text, at)
                yield line, name, value
            else:
                token = _TOKEN.match(text, at)
                assert token is not None, "the last alternative is any character"
                at = token.end()
                if token[0] == "{":
                    comment = line
                elif not token[0].isspace() and token[0][0] not in ";$":
                    after_word = True
                    yield line, None, token[0]
    if comment:
        raise RowError(f"no }} closes the comment (line {comment})")


def _tag(line: int, text: str, at: int) -> tuple[str, str, int]:
    """Name and value of the tag at `at`, and where it ends. One that cannot be read and decides nothing has no name."""
    if tag := _TAG.match(text, at):
        return tag[1].lower(), re.sub(r"\\(.)", r"\1", tag[2]), tag.end()
    if (tag := _LOOSE_TAG.fullmatch(text, at)) and not _SETUP_ANYWHERE.search(tag[2]):
        return tag[1].lower(), tag[2], len(text)
    if _SETUP_ANYWHERE.search(text, at):
        raise RowError(f"""{text[at:].strip()!r}; expected a tag such as [SetUp "1"] (line {line})""")
    return "", "", len(text)


def _main_line(game: _Game, end: int) -> tuple[chess.Board, list[chess.Move]]:
    """First position and moves of a game, which ends before or in the line `end`."""
    if game.depth:
        raise RowError(f"brackets of variations do not match (line {end})")
    board = _first_position(*map(game.tags.get, _SETUP))
    first, moves = board.copy(), []
    offset = None if "fen" in game.tags else 0  # of the move numbers from the board's: after a FEN some count from 1
    for line, word in game.words:
        if word in _NULL:
            raise RowError(f"the null move {word!r}; expected moves of chess (line {line})")
        if number := _NUMBER.match(word):
            offset = int(number[1]) - board.fullmove_number if offset is None else offset
            expected = f"{board.fullmove_number + offset}{'.' if board.turn else '...'}"
            black = len(number[2]) > 2 or "…" in number[2]
            if int(number[1]) != board.fullmove_number + offset or (black and board.turn):
                raise RowError(f"move number {number[0]!r}; expected {expected!r} (line {line})")
        text = word[number.end() if number else 0 :].lstrip(".…")
        if not text or _ASIDE.fullmatch(text):
            continue
        if (san := _SAN.fullmatch(text)) is None:
            raise RowError(f"{text[:40]!r} is no move; expected English notation, such as 'Nf3' (line {line})")
        try:
            moves.append(board.push_san(san[1]))
        except ValueError as error:
            raise RowError(f"{error} (line {line})") from error
    return first, moves


def _first_position(fen: str | None, setup: str | None, variant: str | None) -> chess.Board:
    headers = chess.pgn.Headers({} if variant is None else {"Variant": variant})
    try:
        kind = headers.variant()
        board = kind() if fen is None else kind(fen)
    except ValueError as error:  # an unknown variant, or no FEN
        raise RowError(str(error)) from error
    if board.uci_variant != "chess" or headers.is_chess960() or board.has_chess960_castling_rights():
        raise RowError(f"variant {variant!r}; expected standard chess")
    if not board.is_valid():
        raise RowError(f"FEN {board.fen()!r} is not a legal position")
    if setup == "1" and fen is None:
        raise RowError("SetUp '1' without a tag FEN; expected the first position")
    if setup == "0" and board != chess.Board():
        raise RowError(f"SetUp '0' beside FEN {fen!r}; expected '1', or no FEN")
    return board
