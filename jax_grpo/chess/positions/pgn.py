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
    number: int
    tags: dict[str, str] = dataclasses.field(default_factory=dict)  # by lower-case name
    words: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # (line, word) of the main line
    depth: int = 0  # of variations that are open
    over: bool = False  # its result has been read

    def fails(self, line: int, problem: str) -> RowError:
        return RowError(f"game {self.number}: {problem} (line {line})")

    def add(self, line: int, word: str) -> None:
        """Adds a word of the movetext."""
        if word == "(":
            self.depth += 1
        elif word == ")":
            self.depth -= 1
            if self.depth < 0:
                raise self.fails(line, "brackets of variations do not match")
        elif self.depth == 0:
            if word in _RESULTS:
                self.over = True
            else:
                self.words.append((line, word))


def read_games(lines: Iterable[str]) -> Iterator[tuple[chess.Board, list[chess.Move]]]:
    """(first position, moves of the main line) of every game.

    Raises:
        RowError: it cannot be known which moves belong to which tags; a word or move that cannot be read; a null move; a comment
            or variation without an end; a variant; no legal position. Names the game.
    """
    reader, line = _Reader(), 0
    for line, text in enumerate(lines, 1):
        if finished := reader.take(line, text.replace("\ufeff", "")):
            yield from map(_main_line, finished)
    yield _main_line(reader.end(line))


class _Reader:
    """Deals the words of lines to games."""

    def __init__(self):
        self._game = _Game(1)
        self._finished: list[_Game] = []  # in this line
        self._gap = False  # a blank line since the last word or tag
        self._comment = 0  # the line in which the comment that is open began

    def take(self, line: int, text: str) -> list[_Game]:
        """Reads a line; the games that it ends."""
        self._finished = []
        if not self._comment and (text.startswith("%") or not text.strip()):
            self._gap |= not text.strip()
            return []
        at, after_word = 0, False
        while at < len(text):
            if self._comment:
                at = self._in_comment(text, at)
            elif text[at] == "[" and not after_word:
                at = self._tag(line, text, at)
            else:
                token = _TOKEN.match(text, at)
                assert token is not None, "the last alternative is any character"
                at = token.end()
                if token[0] == "{":
                    self._comment = line
                elif not token[0].isspace() and token[0][0] not in ";$":
                    after_word = True
                    self._word(line, token[0])
        return self._finished

    def end(self, line: int) -> _Game:
        """The last game."""
        if self._comment:
            raise self._game.fails(self._comment, "no } closes the comment")
        game = self._game
        self._next(line)
        return game

    def _next(self, line: int) -> None:
        """The game is over, another begins in this line."""
        if self._game.depth:
            raise self._game.fails(line, "brackets of variations do not match")
        self._finished.append(self._game)
        self._game = _Game(self._game.number + 1)

    def _in_comment(self, text: str, at: int) -> int:
        if _TAG.fullmatch(text.strip()):
            raise self._game.fails(self._comment, "no } closes the comment before the next game's tags")
        if (end := text.find("}", at)) < 0:
            return len(text)
        self._comment = 0
        return end + 1

    def _tag(self, line: int, text: str, at: int) -> int:
        """Takes the tag at `at`; where it ends. One that cannot be read and decides nothing has no name."""
        name, value, end = "", "", len(text)
        if tag := _TAG.match(text, at):
            name, value, end = tag[1].lower(), re.sub(r"\\(.)", r"\1", tag[2]), tag.end()
        elif (tag := _LOOSE_TAG.fullmatch(text, at)) and not _SETUP_ANYWHERE.search(tag[2]):
            name, value = tag[1].lower(), tag[2]
        elif _SETUP_ANYWHERE.search(text, at):
            raise self._game.fails(line, f'{text[at:].strip()!r}; expected a tag such as [SetUp "1"]')
        game = self._game
        if game.words or game.over or (name in game.tags and (self._gap or name == "event")):
            self._next(line)
        elif name in _SETUP and game.tags.get(name, value) != value:
            raise game.fails(line, f"two tags {name.upper()}, {game.tags[name]!r} and {value!r}")
        self._game.tags[name], self._gap = value, False
        return end

    def _word(self, line: int, word: str) -> None:
        """Takes a word of the movetext."""
        game, number = self._game, _NUMBER.match(word)
        first = number is not None and number[1] == "1" and number[2] in ("", ".")  # move, and White's
        if game.over or (self._gap and first and game.words and not game.depth):
            if "fen" in game.tags and not game.words:
                raise game.fails(line, f"FEN {game.tags['fen']!r} but no moves, and moves without tags follow")
            self._next(line)
        self._gap = False
        self._game.add(line, word)


def _main_line(game: _Game) -> tuple[chess.Board, list[chess.Move]]:
    board = _first_position(game)
    first, moves = board.copy(), []
    offset = None if "fen" in game.tags else 0  # of the move numbers from the board's: after a FEN some count from 1
    for line, word in game.words:
        if word in _NULL:
            raise game.fails(line, f"the null move {word!r}; expected moves of chess")
        if number := _NUMBER.match(word):
            offset = int(number[1]) - board.fullmove_number if offset is None else offset
            expected = f"{board.fullmove_number + offset}{'.' if board.turn else '...'}"
            black = len(number[2]) > 2 or "…" in number[2]
            if int(number[1]) != board.fullmove_number + offset or (black and board.turn):
                raise game.fails(line, f"move number {number[0]!r}; expected {expected!r}")
        text = word[number.end() if number else 0 :].lstrip(".…")
        if not text or _ASIDE.fullmatch(text):
            continue
        if (san := _SAN.fullmatch(text)) is None:
            raise game.fails(line, f"{text[:40]!r} is no move; expected English notation, such as 'Nf3'")
        try:
            moves.append(board.push_san(san[1]))
        except ValueError as error:
            raise game.fails(line, str(error)) from error
    return first, moves


def _first_position(game: _Game) -> chess.Board:
    fen, setup, variant = map(game.tags.get, _SETUP)
    headers = chess.pgn.Headers({} if variant is None else {"Variant": variant})
    line = f"game {game.number}: "
    try:
        kind = headers.variant()
        board = kind() if fen is None else kind(fen)
    except ValueError as error:  # an unknown variant, or no FEN
        raise RowError(f"{line}{error}") from error
    if board.uci_variant != "chess" or headers.is_chess960() or board.has_chess960_castling_rights():
        raise RowError(f"{line}variant {variant!r}; expected standard chess")
    if not board.is_valid():
        raise RowError(f"{line}FEN {board.fen()!r} is not a legal position")
    if setup == "1" and fen is None:
        raise RowError(f"{line}SetUp '1' without a tag FEN; expected the first position")
    if setup == "0" and board != chess.Board():
        raise RowError(f"{line}SetUp '0' beside FEN {fen!r}; expected '1', or no FEN")
    return board
