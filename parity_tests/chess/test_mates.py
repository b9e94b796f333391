"""The packaged mate-in-one suite: every row is what it claims to be, and the command that made it still makes it."""

import hashlib
import json
import shutil
from collections import Counter

import chess
import chess.engine
import pytest
from conftest import PATIENCE_S

from jax_grpo.chess.data.selfplay import mate_suite
from jax_grpo.chess.evaluate.puzzles import PACKAGED_MATES, read_mates
from jax_grpo.chess.positions.position import mating_moves
from jax_grpo.chess.positions.sources import read_packaged

ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")


def _rows():
    return [json.loads(line) for line in PACKAGED_MATES.read_text().splitlines()]


def test_every_packaged_position_has_exactly_one_mating_move():
    for row in _rows():
        board = chess.Board(row["fen"])
        assert board.is_valid() and board.fen() == row["fen"], row
        mates = []
        for move in board.legal_moves:  # plainly, without the shortcut through checks
            after = board.copy(stack=False)
            after.push(move)
            if after.is_checkmate():
                mates.append(move.uci())
        assert mates == [row["mate"]] == mating_moves(board), row


@pytest.mark.slow
def test_the_suite_is_large_even_between_colours_distinct_and_apart_from_training():
    rows = _rows()
    boards = [chess.Board(row["fen"]) for row in rows]
    keys = {board.epd() for board in boards}
    pieces = Counter(
        b.piece_type_at(chess.Move.from_uci(r["mate"]).from_square) for b, r in zip(boards, rows, strict=True)
    )
    print(len(rows), Counter(board.turn for board in boards), {chess.piece_name(k): n for k, n in pieces.items() if k})
    assert len(rows) == len(keys) == 600 and sum(board.turn for board in boards) == 300
    for split in ("train", "heldout"):
        assert not keys & {chess.Board(position.fen).epd() for position in read_packaged(split)}, split
    assert all(pieces[kind] >= 10 for kind in (chess.PAWN, chess.KNIGHT, chess.BISHOP, chess.ROOK, chess.QUEEN))


def test_the_record_is_of_the_file_that_is_packaged():
    record = json.loads(PACKAGED_MATES.with_suffix(".provenance.json").read_text())
    assert record["sha256"] == hashlib.sha256(PACKAGED_MATES.read_bytes()).hexdigest()
    assert record["positions"] == 600 == len(read_mates())


@pytest.mark.skipif(not ENGINE, reason="Stockfish is not installed (apt install stockfish)")
@pytest.mark.slow
def test_the_suite_is_a_function_of_its_seed():
    def first(count, processes, seed=1, apart=()):
        return list(mate_suite(str(ENGINE), count=count, seed=seed, nodes=200, processes=processes, apart=set(apart)))

    made = first(4, 2)
    without = first(4, 1, apart=[chess.Board(made[0]["fen"]).epd()])
    assert made[0] not in without and made[1] in without, "one to stay apart from is left out; processes do not matter"
    record = json.loads(PACKAGED_MATES.with_suffix(".provenance.json").read_text())
    with chess.engine.SimpleEngine.popen_uci(str(ENGINE), timeout=PATIENCE_S) as engine:
        if engine.id["name"] == record["engine"]:
            assert [row for row in _rows()[:20] if row in made] == made, "the packaged suite begins with these games"
