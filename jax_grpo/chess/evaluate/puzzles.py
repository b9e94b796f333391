"""Puzzles: mates in one, lines that must be played to their end, and the rating that a player has at them.

Mates are read from our own JSONL or BIG-bench's `checkmate_in_one` task.json, lines from Lichess's CSV or our own JSONL. A line is
judged as Lichess does: each of the solver's moves must be the line's, but for one that mates, which solves it at once. Every row is
played on a board as it is read: one that cannot be solved would cap the score in silence. Knows nothing of models.
"""

import contextlib
import csv
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import chess

from jax_grpo.chess.evaluate import by_side
from jax_grpo.chess.positions import pgn
from jax_grpo.chess.positions.files import text_lines
from jax_grpo.chess.positions.position import Position, legal_uci, mating_moves
from jax_grpo.chess.positions.sources import PACKAGED
from jax_grpo.config.files import parsed_json
from jax_grpo.evaluate import EvaluationError
from jax_grpo.evaluate.statistics import Estimate

PACKAGED_MATES, PACKAGED_PUZZLES = PACKAGED / "mate_in_one.jsonl", PACKAGED / "mate_in_two.jsonl"
NEEDED = ("PuzzleId", "FEN", "Moves", "Rating")
COLUMNS = (*NEEDED, "RatingDeviation", "Popularity", "NbPlays", "Themes", "GameUrl", "OpeningTags")
BANDS = (1000, 1400, 1800, 2200)  # ratings where a band of the estimates ends and the next begins
RATING_SCALE = 400 / math.log(10)  # Elo's: a player 400 above a puzzle is expected to solve 10 of 11
HALF_CHI_SQUARE = 1.920729410347063  # half of chi square's 95 % quantile, one degree of freedom
FURTHEST = 4000.0  # from the easiest and the hardest puzzle, where the fit stops looking
Row = TypeVar("Row")


class Mate(NamedTuple):
    """A position and the move (UCI) that the suite lists as mating; a BIG-bench position may have others."""

    position: Position
    move: str


def read_mates(path: Path = PACKAGED_MATES) -> list[Mate]:
    """The suite of a file: `.jsonl` lines `{"fen": ..., "mate": "<uci>"}` with one mate each, or BIG-bench's task.json.

    Raises:
        EvaluationError: names the file, the line or example, its text and what was expected.
    """
    if not path.is_file():
        raise EvaluationError(f"--mates {path}: no such file; expected .jsonl lines or BIG-bench's task.json")
    ours, suite = path.suffix.lower() == ".jsonl", []
    for where, (board, uci) in _own_mates(path) if ours else _bigbench(path):
        if uci not in legal_uci(board):
            raise EvaluationError(
                f"{where}: {uci!r} is not a legal move in {board.fen()!r}; expected UCI such as 'h5f7'"
            )
        if uci not in (mates := mating_moves(board)):
            raise EvaluationError(f"{where}: {uci} does not give checkmate in {board.fen()!r}")
        if len(mates) > 1 and ours:
            raise EvaluationError(f"{where}: {uci} is not the one mate in {board.fen()!r}; found {', '.join(mates)}")
        suite.append(Mate(Position.of_board(board), uci))
    if not suite:
        raise EvaluationError(f"--mates {path}: no positions in it")
    return suite


def mate_rows(suite: Sequence[Mate], moves: Sequence[str]) -> list[dict[str, Any]]:
    """Booleans `legal`, `mate` (the move gives checkmate, listed or not) and `listed` (it is the suite's own move)."""
    rows = []
    for (position, listed), uci in zip(suite, moves, strict=True):
        board = chess.Board(position.fen)
        rows.append({"legal": uci in legal_uci(board), "mate": uci in mating_moves(board), "listed": uci == listed})
    return rows


def _json_rows(path: Path, expected: str, read: Callable[[Any], Row]) -> Iterator[tuple[str, Row]]:
    """The place of each line that is not blank, and what `read` makes of its JSON; an EvaluationError says what was expected."""
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            where = f"{path}:{number}"
            with _expecting(expected, f"{where}: {line.strip()[:80]!r}"):
                row = read(parsed_json(line))
            yield where, row


@contextlib.contextmanager
def _expecting(expected: str, where: str) -> Iterator[None]:
    """Turns what is wrong with a row inside into one clear error."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EvaluationError(f"{where} ({type(error).__name__}: {error}); expected {expected}") from error


def _own_mates(path: Path) -> Iterator[tuple[str, tuple[chess.Board, str]]]:
    return _json_rows(path, "an object with 'fen' and 'mate'", lambda row: (chess.Board(row["fen"]), str(row["mate"])))


def _bigbench(path: Path) -> Iterator[tuple[str, tuple[chess.Board, str]]]:
    """`input`: the game so far in SAN; `target_scores`: score by move in SAN, the highest is the mate."""
    with _expecting("an object with 'examples'", f"{path}: not BIG-bench's task.json"):
        examples = parsed_json(path.read_text(encoding="utf-8"))["examples"]
    for number, example in enumerate(examples):
        where = f"{path}: example {number}"
        with _expecting("'input' (moves in SAN) and 'target_scores'", where):
            ((board, played),) = pgn.read_games(io.StringIO(example["input"]))
            scores = example["target_scores"]
            target = max(scores, key=lambda move: scores[move])
        for move in played:
            board.push(move)
        with _expecting(f"a move in {board.fen()!r}", f"{where}: target {target!r}"):
            uci = board.parse_san(target).uci()
        yield where, (board, uci)


class Puzzle(NamedTuple):
    """The solver's first position, the line from there on (his moves at even places), and the puzzle's rating, if it has one."""

    fen: str
    line: tuple[str, ...]
    rating: int | None = None


def read_puzzles(path: Path = PACKAGED_PUZZLES, count: int | None = None) -> list[Puzzle]:
    """The first `count` puzzles of a file; `.csv`: Lichess's, whose first move is the opponent's; `.jsonl`: `{"fen", "line"}`.

    Raises:
        EvaluationError: names the file, the line, its text and what was expected.
    """
    if not path.is_file() or path.suffix.lower() not in (".csv", ".jsonl"):
        raise EvaluationError(
            f"--data {path}: no such .csv or .jsonl file; expected Lichess's puzzles, or lines of 'fen', 'line'"
        )
    puzzles = list(itertools.islice((_csv if path.suffix.lower() == ".csv" else _puzzles_jsonl)(path), count))
    if not puzzles:
        raise EvaluationError(f"--data {path}: no puzzles in it")
    return puzzles


def _csv(path: Path) -> Iterator[Puzzle]:
    rows = csv.reader(text_lines(path))
    head = next(rows, [])
    if missing := [name for name in NEEDED if name not in head]:
        header = ",".join(head)[:80]
        raise EvaluationError(
            f"{path}:1: {header!r} has no column {missing[0]}; expected Lichess's header {','.join(COLUMNS)}"
        )
    for cells in rows:
        where = f"{path}:{rows.line_num}"
        if not cells:
            continue
        if len(cells) != len(head):
            raise EvaluationError(
                f"{where}: {len(cells)} fields in {','.join(cells)[:80]!r}; expected the header's {len(head)}"
            )
        row = dict(zip(head, cells, strict=True))
        moves = row["Moves"].split()
        if len(moves) < 2 or len(moves) % 2:
            expected = "the opponent's move, then the solver's, and so on to the solver's last: an even number"
            raise EvaluationError(f"{where}: Moves {row['Moves'][:80]!r} has {len(moves)}; expected {expected}")
        if not row["Rating"].isdigit():
            raise EvaluationError(f"{where}: Rating {row['Rating']!r}; expected a whole number")
        yield _checked(row["FEN"], moves, where, int(row["Rating"]), begins=1)


def _puzzles_jsonl(path: Path) -> Iterator[Puzzle]:
    expected = "an object with 'fen' and 'line', a list of moves"
    for where, (fen, line) in _json_rows(path, expected, lambda row: (str(row["fen"]), list(map(str, row["line"])))):
        if len(line) % 2 == 0:
            raise EvaluationError(
                f"{where}: 'line' has {len(line)} moves; expected the solver's first and last: an odd number"
            )
        yield _checked(fen, line, where)


def _checked(fen: str, moves: Sequence[str], where: str, rating: int | None = None, begins: int = 0) -> Puzzle:
    """The puzzle that begins after the first `begins` of the moves, all of which are played from the position."""
    try:
        board = chess.Board(fen)
    except ValueError as error:
        raise EvaluationError(f"{where}: FEN {fen[:90]!r} ({error}); expected a position in FEN") from error
    if not board.is_valid():
        raise EvaluationError(f"{where}: FEN {fen[:90]!r} is no position of a game ({board.status()!r}); expected one")
    boards = [board.fen()]
    for uci in moves:
        if uci not in legal_uci(board):
            raise EvaluationError(
                f"{where}: {uci!r} is not legal in {boards[-1]!r}; expected moves in UCI, such as 'e7e8q'"
            )
        board.push_uci(uci)
        boards.append(board.fen())
    return Puzzle(boards[begins], tuple(moves[begins:]), rating)


Answer = Callable[[Sequence[Position], Sequence[int], int], Sequence[Sequence[str]]]
"""(positions, the numbers of their puzzles, step) -> for each position as many moves as there are attempts."""


def attempts(
    puzzles: Sequence[Puzzle], answer: Answer, count: int, tick: Callable[[int], object]
) -> list[dict[str, int]]:
    """Plays `count` attempts at every puzzle, side by side; of each how many were `solved`, right at `first`, `legal` there.

    Attempts that go on have all played the line so far, so that they stand in one position: their next moves are samples of it.
    """
    outcomes = [{"solved": 0, "first": 0, "legal": 0} for _ in puzzles]
    boards = [chess.Board(puzzle.fen) for puzzle in puzzles]
    live = {number: list(range(count)) for number in range(len(puzzles))}  # attempts that go on, by puzzle
    step = 0
    while numbers := [number for number, those in live.items() if those]:
        moves = answer([Position.of_board(boards[number]) for number in numbers], numbers, step)
        for number, given in zip(numbers, moves, strict=True):
            board, line, outcome = boards[number], puzzles[number].line, outcomes[number]
            legal, mates = legal_uci(board), mating_moves(board)
            right = [attempt for attempt in live[number] if given[attempt] == line[2 * step] or given[attempt] in mates]
            done = [attempt for attempt in right if given[attempt] in mates or 2 * step + 1 == len(line)]
            outcome["solved"] += len(done)
            if step == 0:
                outcome |= {"first": len(right), "legal": sum(given[attempt] in legal for attempt in live[number])}
            live[number] = [attempt for attempt in right if attempt not in done]
            for uci in line[2 * step : 2 * step + 2] if live[number] else ():
                board.push_uci(uci)
        step += 1
        tick(step)
    return outcomes


def puzzle_rows(outcomes: Sequence[dict[str, int]], count: int) -> list[dict[str, Any]]:
    """Booleans `solved`, `first`, `legal` of one attempt.

    Of several, shares `first` and `legal`, `pass_1`, the share that solved the puzzle, and `pass_<count>`, whether one of them did.
    """
    if count == 1:
        return [{name: bool(times) for name, times in outcome.items()} for outcome in outcomes]
    rows = []
    for outcome in outcomes:
        shares = {name: times / count for name, times in outcome.items()}
        rows.append({"pass_1": (solved := shares.pop("solved")), f"pass_{count}": solved > 0, **shares})
    return rows


def groups(puzzles: Sequence[Puzzle]) -> dict[str, list[bool]]:
    """Which puzzles are in each group: the side to solve, and the bands of rating that have one."""
    out = by_side(puzzles)
    edges = (0, *BANDS, 10_000)
    for low, high in itertools.pairwise(edges):
        inside = [puzzle.rating is not None and low <= puzzle.rating < high for puzzle in puzzles]
        if any(inside):
            name = f"below_{high}" if low == 0 else f"from_{low}" if high == edges[-1] else f"{low}_to_{high - 1}"
            out[name] = inside
    return out


def fitted_rating(ratings: Sequence[float], shares: Sequence[float]) -> Estimate:
    """The rating R at which half of the puzzles are solved, with its 95 % likelihood interval.

    Elo's model (1978): a puzzle of rating r is solved with probability p = 1 / (1 + 10^((r - R) / 400)). R maximises
    l(R) = sum of y log p + (1 - y) log(1 - p), y the share of attempts that solved a puzzle; the interval is where l is within
    1.92 of its greatest. Several attempts at a puzzle count as one observation, which makes it wide rather than narrow. Where none
    is solved, or all are, there is no greatest: the value and one end are None, the other end is the bound.
    """
    assert len(ratings) == len(shares) > 0
    low, high = min(ratings) - FURTHEST, max(ratings) + FURTHEST

    def likelihood(rating: float) -> float:
        x = [(rating - r) / RATING_SCALE for r in ratings]
        # log p = -log(1 + exp(-x)), log(1 - p) = log p - x; no overflow on either side
        log_p = [-math.log1p(math.exp(-abs(each))) + min(each, 0.0) for each in x]
        return math.fsum(p - (1 - y) * each for p, each, y in zip(log_p, x, shares, strict=True))

    def excess(rating: float) -> float:
        expected = (0.5 * (1 + math.tanh((rating - r) / (2 * RATING_SCALE))) for r in ratings)
        return math.fsum(expected) - math.fsum(shares)

    solved = math.fsum(shares)
    none, every = solved == 0, solved == len(shares)
    best = None if none or every else _root(excess, low, high)
    top = 0.0 if best is None else likelihood(best)  # of a perfect prediction, which is where R has no end
    short = lambda rating: likelihood(rating) - top + HALF_CHI_SQUARE  # noqa: E731
    lower = None if none else _root(short, low, high if best is None else best)
    upper = None if every else _root(lambda rating: -short(rating), low if best is None else best, high)
    return Estimate(best, lower, upper, len(shares), "likelihood")


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a rising function is 0, to a millionth, by bisection."""
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
