"""The UCI engine: the protocol, sampling options, and a legal move whatever the model writes."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import chess
import chess.engine
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import PATIENCE_S
from flax import nnx

import jax_grpo
from jax_grpo.chess.evaluate.puzzles import read_mates
from jax_grpo.chess.play.player import MOVE_TOKENS, MOVES, Player
from jax_grpo.chess.play.uci import FALLBACK, Engine
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.tasks.policy import parse_answer
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import save_hf
from jax_grpo.policy.named import load_policy
from jax_grpo.rollout.sampling import Sampling
from torch_ref.compare import difference

COMMAND = [sys.executable, "-m", "jax_grpo.uci", "--weights", "packaged:rook-small"]
SAMPLED = Sampling(1.0)
POSITIONS = read_packaged("heldout")
MANY = "R6R/3Q4/1Q4Q1/4Q3/2Q4Q/Q4Q2/pp1Q4/kBNN1KB1 w - - 0 1"  # 218 legal moves, the most there are


@pytest.fixture(scope="module")
def player():
    return Player("packaged:rook-small")


@pytest.fixture(scope="module", params=["chess", pytest.param("gpt2", marks=pytest.mark.slow)])
def wild(tmp_path_factory, request):
    """Random weights: a model that never writes a move."""
    folder, tokenizer = tmp_path_factory.mktemp("wild"), Tokenizer.load(request.param)
    architecture = Architecture(
        tokenizer.vocab_size, num_layers=1, num_heads=2, hidden_size=16, max_position_embeddings=256
    )
    params = nnx.split(Decoder(architecture, rngs=nnx.Rngs(0)), nnx.Param)[1]
    save_hf(folder, architecture, params, tokenizer)
    return Player(str(folder))


def _session(player, text):
    """Answers to the lines, which end with the end of input."""
    out = []
    Engine(lambda: player, out.append).run(text.splitlines())
    return out


def _best(lines):
    return [line.split()[1] for line in lines if line.startswith("bestmove")]


# The player ------------------------------------------------------------------------------------------------------------


def test_move_logps_are_the_plain_models(player):
    """One sequence at a time, without padding or a shared prompt."""
    policy = load_policy(ModelConfig(weights="packaged:rook-small", tokenizer="chess"), 0, 104)
    model = nnx.merge(policy.graphdef, policy.params)
    position = POSITIONS[0]
    moves = list(chess.Board(position.fen).legal_moves)[::4]
    prompt, expected = policy.tokenizer.encode(f"P: {position.fen}    B:"), []
    actual = player.move_logps(chess.Board(position.fen), moves)
    for move in moves:
        completion = policy.tokenizer.encode(f" {move.uci()}")
        ids = jnp.asarray([prompt + completion])
        hidden = model(ids, jnp.ones_like(ids))[0, len(prompt) - 1 : -1]
        logp = jax.nn.log_softmax(hidden @ model.head_VH[: policy.tokenizer.vocab_size].T)
        expected.append(float(sum(logp[i, token] for i, token in enumerate(completion))))
    worst = difference("move_logps", actual, expected)
    print(f"largest difference {worst:.1e} nats over {len(moves)} moves")
    assert worst < 2e-5 and len(moves) >= 5


def test_more_moves_than_a_pass_holds_are_all_scored(player):
    board = chess.Board(MANY)
    moves = list(board.legal_moves)
    assert len(moves) == 218 > 3 * MOVES
    whole = player.move_logps(board, moves)
    order = random.Random(0).sample(range(218), 218)
    shuffled = player.move_logps(board, [moves[i] for i in order])
    np.testing.assert_allclose(shuffled, whole[order], atol=2e-5)
    assert np.isfinite(whole).all() and len(set(whole.round(3))) > 100


@pytest.mark.slow
def test_a_legal_move_is_played_as_written_and_an_illegal_one_replaced_by_the_likeliest(player):
    fallbacks = 0
    for position in POSITIONS[:40]:
        board = chess.Board(position.fen)
        legal = list(board.legal_moves)
        choice = player.choose(board)
        assert choice.move in legal
        if choice.logp is not None:
            fallbacks += 1
            logps = player.move_logps(board, legal)
            assert choice.written not in {move.uci() for move in legal}
            assert choice.move == legal[int(np.argmax(logps))] and choice.logp == pytest.approx(float(logps.max()))
        else:
            assert choice.written == choice.move.uci()
    print(f"{fallbacks} fallbacks of 40")
    assert 5 <= fallbacks <= 35, "both kinds are seen"


@pytest.mark.slow
def test_a_model_that_never_writes_a_move_still_plays_legal_ones(wild):
    rng = random.Random(0)
    fens = [rng.choice(POSITIONS).fen, read_mates()[0].position.fen, MANY]
    for board in map(chess.Board, fens):
        choice = wild.choose(board, seed=3)
        assert choice.logp is not None and choice.move in board.legal_moves


@pytest.mark.slow
def test_sampling_depends_on_seed_game_and_half_move_alone(player):
    boards = [chess.Board(position.fen) for position in POSITIONS[:12]]

    def written(**options):
        return [player.choose(board, SAMPLED, **options).written for board in boards]

    first = written(seed=1)
    assert first == written(seed=1)
    assert first != written(seed=2) and first != written(seed=1, game=1)
    assert written(seed=1) != [player.choose(board).written for board in boards], "greedy differs"
    one = Sampling(5.0, top_k=1)
    assert [player.choose(b, one).written for b in boards] == [player.choose(b).written for b in boards], (
        "top-k 1 is greedy"
    )


@pytest.mark.slow
def test_every_half_move_of_a_game_draws_anew(player, monkeypatch):
    """Else one unlucky number would be drawn at each move of a game."""
    player.choose(chess.Board(), SAMPLED)
    program, sampled = player._programs[SAMPLED], []

    def recorded(*arguments):
        sampled.append(tuple(int(x) for x in (*arguments[4], *arguments[5:7])))  # game, seed, half-move
        return program.generate(*arguments)

    monkeypatch.setitem(player._programs, SAMPLED, program._replace(generate=recorded))
    board = chess.Board()
    for _ in range(3):
        board.push(player.choose(board, SAMPLED, seed=7, game=2).move)
    assert sampled == [(2, 7, 0), (2, 7, 1), (2, 7, 2)]


@pytest.mark.slow
def test_top_k_of_one_is_greedy(player):
    boards = [chess.Board(position.fen) for position in POSITIONS[:12]]
    one = Sampling(5.0, top_k=1)
    assert [player.choose(board, one).written for board in boards] == [player.choose(board).written for board in boards]


def test_no_move_has_more_tokens_than_a_pass_holds():
    squares = chess.SQUARE_NAMES
    moves = [
        f" {a}{b}{p}" for a in squares for b in squares for p in ("", "q", "n") if a != b and (not p or b[1] in "18")
    ]
    for name in ("chess", "gpt2"):
        longest = max(map(len, Tokenizer.load(name).encode_batch(moves)))
        print(f"{name}: at most {longest} tokens")
        assert longest <= MOVE_TOKENS, name


@pytest.mark.slow
def test_the_full_prompt_answers_with_the_move_after_its_last_field():
    player = Player("packaged:rook-small", style="full")
    written = [player.choose(chess.Board(position.fen)).written for position in POSITIONS[:6]]
    print(written)
    assert sum(bool(re.fullmatch("[a-h][1-8][a-h][1-8][qrbn]?", text)) for text in written) >= 4


# The protocol ----------------------------------------------------------------------------------------------------------


def test_a_session_answers_as_the_protocol_says(player):
    out = _session(
        player, "uci\nisready\nposition startpos moves e2e4\ngo movetime 10 nodes 5 depth 2 wtime 1 btime 1\nquit\ngo"
    )
    assert out[0] == f"id name jax_grpo {jax_grpo.__version__}"
    assert out.index("uciok") < out.index("readyok")
    assert [line for line in out if line.startswith("option")] == [
        "option name Temperature type string default 0",
        "option name TopK type spin default 0 min 0 max 1000",
        "option name TopP type string default 1",
        "option name Seed type spin default 0 min 0 max 2147483647",
        "option name MultiPV type spin default 1 min 1 max 218",
    ]
    (move,) = _best(out)
    board = chess.Board()
    board.push_uci("e2e4")
    assert chess.Move.from_uci(move) in board.legal_moves
    assert out[-1].startswith("info string 1 moves, of which "), "nothing is answered after quit"


def test_unknown_words_empty_lines_and_noise_are_ignored(player):
    noise = (
        "\n   \nhello\njoho debug on\nregister later\n\x00\ufffd\nposition startpos\nxyzzy go depth 1\nponderhit\nstop"
    )
    assert len(_best(_session(player, noise))) == 1


def test_infinite_search_answers_at_stop_and_not_before(player):
    out = []
    seen = {}

    def lines():
        yield "position startpos"
        yield "go infinite"
        seen["before stop"] = _best(out)
        yield "stop"
        seen["after stop"] = _best(out)
        yield "stop"
        yield "go ponder"
        seen["pondering"] = _best(out)
        yield "ponderhit"

    Engine(lambda: player, out.append).run(lines())
    assert seen["before stop"] == [] and len(seen["after stop"]) == 1 == len(seen["pondering"]) and len(_best(out)) == 2


@pytest.mark.parametrize(
    "position",
    [
        "fen 7k/5Q2/6K1/8/8/8/8/8 b - - 1 1",
        "fen R5k1/5ppp/8/8/8/8/8/6K1 b - - 1 1",
        "startpos moves f2f3 e7e5 g2g4 d8h4",
        "fen 8/8/4k3/8/8/8/8/4K3 w - - 0 1",
    ],
    ids=["stalemate", "mate", "mate by moves", "bare kings"],
)
def test_a_finished_game_has_no_move(player, position):
    assert _best(_session(player, f"position {position}\ngo")) == ["(none)"]


@pytest.mark.parametrize(
    "position",
    [
        "fen 8/8/8/8/8/8/8/8 w - - 0 1",
        "fen nonsense",
        "startpos moves e2e5",
        "startpos moves e2",
        "",
        "moves e2e4",
        "fen",
    ],
)
def test_a_position_that_cannot_be_set_up_is_said_and_not_played_from(player, position):
    out = _session(player, f"position {position}\ngo\nposition startpos\ngo")
    assert out[0].startswith("info string position not understood: ")
    first, second = _best(out)
    assert first == "(none)" and second != "(none)", "and the next position is fine"


def test_searchmoves_limit_the_choice(player):
    out = _session(player, "position startpos\ngo depth 1 searchmoves a2a3 h2h4\ngo searchmoves b1a3 infinite\nstop")
    first, second = _best(out)
    assert first in ("a2a3", "h2h4") and second == "b1a3"


CASTLING, PROMOTING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1", "4k3/P7/8/8/8/8/4P3/4K3 w - - 0 1"


def test_searchmoves_and_moves_are_understood_as_chess_programs_write_them(player):
    for fen, written, played in ((CASTLING, "e1h1", "e1g1"), (CASTLING, "e1a1", "e1c1"), (PROMOTING, "a7a8N", "a7a8n")):
        out = _session(player, f"position fen {fen}\ngo searchmoves {written} movetime 100")
        assert _best(out) == [played]
        after = _session(player, f"position fen {fen} moves {written}\ngo")
        assert not after[0].startswith("info string position not understood") and _best(after) != ["(none)"]
    out = _session(player, "position startpos\ngo searchmoves e2e5 h2h4 depth 1")
    assert out[0].startswith("info string searchmoves: illegal uci: 'e2e5'") and _best(out) == ["h2h4"]
    out = _session(player, "position startpos\ngo searchmoves e2e5")
    assert out[0].startswith("info string searchmoves: illegal uci: 'e2e5'") and len(_best(out)) == 1


def test_a_null_move_that_leaves_the_king_in_check_is_no_position(player):
    out = _session(player, "position startpos moves e2e4 d7d6 f1b5 0000\ngo")
    assert out[0].startswith("info string position not understood: not a legal position") and _best(out) == ["(none)"]


def test_several_lines_are_the_move_played_and_the_likeliest_others(player):
    board = chess.Board()
    legal = list(board.legal_moves)
    logps = dict(zip(legal, player.move_logps(board, legal), strict=True))
    out = _session(player, "setoption name MultiPV value 5\nposition startpos\ngo")
    lines = [line.split() for line in out if line.startswith("info depth")]
    moves = [chess.Move.from_uci(words[-1]) for words in lines]
    assert [words[words.index("multipv") + 1] for words in lines] == list("12345") and "score" not in " ".join(out)
    assert [moves[0].uci()] == _best(out)
    assert moves[1:] == sorted((move for move in legal if move != moves[0]), key=lambda move: -logps[move])[:4]
    shares = json.loads(next(line for line in out if "probabilities" in line).partition("probabilities ")[2])
    assert list(shares) == [move.uci() for move in moves]
    np.testing.assert_allclose(list(shares.values()), [np.exp(logps[move]) for move in moves], rtol=1e-2)
    few = _session(player, "setoption name MultiPV value 5\nposition startpos\ngo searchmoves e2e4 d2d4")
    assert sum(line.startswith("info depth") for line in few) == 2, "no more lines than moves to choose from"


def test_a_score_is_what_the_model_writes_of_the_move_and_no_other(player, monkeypatch):
    answer = parse_answer("full", " e2e4 d2d4    E: 0.35 -1.2    B: d2d4", chess.STARTING_FEN)
    monkeypatch.setattr(player, "_write", lambda board, sampling, **_: answer)
    out = _session(player, "setoption name MultiPV value 20\nposition startpos\ngo")
    actual = {line.split()[-1]: line.partition(" score cp ")[2].split()[:1] for line in out if "info depth" in line}
    assert (actual.pop("d2d4"), actual.pop("e2e4")) == (["-120"], ["35"])
    assert len(actual) == 18 and not any(actual.values())


def test_programs_are_compiled_before_the_clock_runs(player, monkeypatch):
    compiled = []
    monkeypatch.setattr(player, "compile", compiled.append)
    _session(
        player, "setoption name Temperature value 1\nisready\nsetoption name TopK value 3\nsetoption name TopK value 3"
    )
    assert compiled == [SAMPLED, Sampling(1.0, top_k=3)], "at isready, and when an option changes after it"


@pytest.mark.slow
def test_options_change_the_sampling_and_bad_values_are_refused(player):
    moves = "".join(f"position fen {position.fen}\ngo\n" for position in POSITIONS[:6])
    cold = _best(_session(player, moves))
    hot = _best(_session(player, f"setoption name temperature value 1\nsetoption name SEED value 5\n{moves}"))
    again = _best(_session(player, f"setoption name Temperature value 1.0\nsetoption name Seed value 5\n{moves}"))
    assert hot == again != cold
    for words, reported in {
        "name Temperature value hot": "option Temperature stays 0.0: 'hot'",
        "name Temperature value nan": "option Temperature stays 0.0: 'nan': expected 0 to 100",
        "name Temperature value -1": "option Temperature stays 0.0: '-1': expected 0 to 100",
        "name TopP value 0": "option TopP stays 1.0: '0'",
        "name TopK": "option TopK stays 0: ''",
        "name Hash value 16": "no option 'Hash'; there are Temperature, TopK, TopP, Seed, MultiPV",
    }.items():
        assert _session(player, f"setoption {words}")[0].startswith(f"info string {reported}"), words


def test_fallbacks_are_counted_and_told(wild):
    out = _session(wild, "position startpos\ngo\nposition startpos moves e2e4\ngo")
    reported = [json.loads(line.partition(FALLBACK)[2]) for line in out if line.startswith(f"info string {FALLBACK}")]
    assert [(fallback["fallbacks"], fallback["moves"]) for fallback in reported] == [(1, 1), (2, 2)]
    assert [fallback["played"] for fallback in reported] == _best(out) and all(
        fallback["logp"] < 0 for fallback in reported
    )
    assert not {fallback["written"] for fallback in reported} & set(_best(out))
    assert out[-1] == "info string 2 moves, of which 2 fallbacks"


# The process -----------------------------------------------------------------------------------------------------------


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(jax_grpo.__file__).parent.parent), "JAX_PLATFORMS": "cpu"}


@pytest.mark.slow
def test_chess_engine_plays_with_the_process(tmp_path):
    log = tmp_path / "stderr"

    def compiled():
        return re.findall(r"Finished XLA compilation of (\S+)", log.read_text())

    environment = ENVIRONMENT | {"JAX_LOG_COMPILES": "1"}
    with (
        log.open("w") as stderr,
        chess.engine.SimpleEngine.popen_uci(COMMAND, timeout=PATIENCE_S, env=environment, stderr=stderr) as engine,
    ):
        engine.configure({"Temperature": "1", "Seed": 3})
        engine.ping()
        ready = compiled()
        board, game = chess.Board(), object()
        for _ in range(8):
            played = engine.play(board, chess.engine.Limit(time=0.01), game=game, info=chess.engine.INFO_ALL)
            assert played.move in board.legal_moves and re.match("policy|fallback", played.info.get("string", ""))
            board.push(played.move)
    assert ready and compiled() == ready, "nothing is compiled after isready"


@pytest.mark.slow
def test_a_system_without_posix_modules_can_play():
    """Windows (docs/play.md) has neither locks nor counts of a process's resources as POSIX has them; it does not train."""
    without = "import sys; sys.modules['fcntl'] = sys.modules['resource'] = None; "
    subprocess.run([sys.executable, "-c", without + "import jax_grpo.chess.play.uci"], env=ENVIRONMENT, check=True)


@pytest.mark.slow
def test_nothing_but_uci_reaches_stdout_whatever_a_library_prints():
    noise = "print('noise'); os.system('echo noise'); write('uciok'); os.write(1, b'noise')"
    script = f"import os; from jax_grpo.chess.play.uci import _claim_stdout; write = _claim_stdout(); {noise}"
    done = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout == "uciok\n" and done.stderr.count("noise") == 3


def test_jax_is_imported_at_isready_and_not_before():
    script = (
        "import sys; from jax_grpo.chess.play.uci import main; main([]); print('jax' in sys.modules, file=sys.stderr)"
    )
    for lines, imported in (("uci\n", "False"), ("uci\nisready\n", "True")):
        done = subprocess.run(
            [sys.executable, "-c", script], env=ENVIRONMENT, input=lines, capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == imported, done.stderr


def test_the_end_of_input_ends_the_process_and_bad_weights_are_one_line():
    done = subprocess.run(
        COMMAND, env=ENVIRONMENT, input="uci\n", capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "info string 0 moves, of which 0 fallbacks" and not done.stderr
    command = [*COMMAND[:3], "--weights", "packaged:rook-smal"]
    bad = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert bad.returncode == 1 and bad.stdout == "" and bad.stderr.count("\n") == 1
    assert "Did you mean packaged:rook-small?" in bad.stderr
