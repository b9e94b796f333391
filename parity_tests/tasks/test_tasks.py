"""Tasks: formats, rewards and stop rules, with the real chess rules and the real engine."""

import os
import random
import shutil
import signal

import chess
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_grpo.chess.games import random_positions
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.chess.positions.values import win_probability
from jax_grpo.chess.settings import EngineConfig
from jax_grpo.chess.tasks.engine import EngineError, EnginePool
from jax_grpo.chess.tasks.environment import edit_distance, environment_stop, next_state
from jax_grpo.chess.tasks.policy import SEEKING, SPACES, policy_stop
from jax_grpo.config import ConfigError
from jax_grpo.config.tasks import Settings, settings_class, task_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.names import SETTINGS
from jax_grpo.tasks import TASKS, make_task, task_class
from jax_grpo.tasks.base import UnknownComponent, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.stop import word_stop

HAS_ENGINE = shutil.which("stockfish") or shutil.which("/usr/games/stockfish")
needs_engine = pytest.mark.skipif(not HAS_ENGINE, reason="Stockfish is not installed (apt install stockfish)")
POSITION = Position(
    "2b3k1/Q4rqn/p2p4/4p3/p6p/2PP3P/BP3PP1/R5K1 b - - 0 34",
    moves=("h7f8", "c8f5", "a4a3", "h7f6", "h7g5"),
    evaluations=(-2.3, -2.82, -3.06, -3.21, -3.16),
)
FULL, ONE = task_class("policy")(task_of()), task_class("policy")(task_of(prompt_style="best_move"))
GOOD = " a4a3 c8f5 h7f6 h7g5 h7f8    E: -3.06 -2.82 -3.21 -3.16 -2.3    B: h7f8"


def _score(task, position, *completions):
    scores = task.score([task.prompt(position, 0)] * len(completions), completions)
    return {name: values.tolist() for name, values in scores.items()}


def test_prompts_are_the_published_formats():
    assert FULL.prompt(POSITION, 0).text == f"P: {POSITION.fen}    M:"
    assert ONE.prompt(POSITION, 0).text == f"P: {POSITION.fen}    B:"
    environment = task_class("environment")(task_of(name="environment", illegal_fraction=0.0))
    history = (*tuple(f"{f}2{f}3" for f in "abcdefgh"), "a7a6", "b7b6")
    text = environment.prompt(Position(POSITION.fen, history), 3).text
    fen, move, moves, end = text.removeprefix("A: ").split("+")
    assert fen == POSITION.fen and end == "" and len(moves.split()) == 10 and moves.split()[-1] == move
    assert moves.split()[0] == "b2b3", "the oldest of eleven moves is dropped"


def test_a_perfect_policy_answer_has_every_component_at_its_best():
    scores = _score(FULL, POSITION, GOOD)
    best = {name: 0.0 if name == "malformed" else 1.0 for name in FULL.component_weights}
    assert {name: values[0] for name, values in scores.items()} == pytest.approx(best)


def test_policy_components_find_each_fault():
    wrong_best = GOOD.replace("B: h7f8", "B: h7f6")
    illegal_best = GOOD.replace("B: h7f8", "B: a1a2")
    four = GOOD.replace(" a4a3", "", 1)
    twice = GOOD.replace("a4a3", "c8f5")
    off = GOOD.replace("-2.82", "9.0")
    scores = _score(FULL, POSITION, wrong_best, illegal_best, four, twice, off, "nonsense")
    assert scores["best_move"] == [0, 0, 1, 1, 1, 0]
    assert scores["legal"] == [1, 0, 1, 1, 1, 0]
    assert scores["structure"] == [1, 1, 0, 1, 1, 0]
    assert scores["top_five"] == pytest.approx([1, 1, 0.8, 0.8, 1, 0])
    assert scores["evaluation"][4] < scores["evaluation"][0] == pytest.approx(1)
    assert scores["malformed"] == [0, 0, 0, 0, 0, 1]
    expected = win_probability(-3.21) / win_probability(-2.3)
    assert scores["quality"][0] == pytest.approx(expected) and scores["quality"][1] == 0


def test_the_order_of_the_candidates_does_not_matter():
    reordered = " h7f8 h7g5 h7f6 c8f5 a4a3    E: -2.3 -3.16 -3.21 -2.82 -3.06    B: h7f8"
    assert _score(FULL, POSITION, reordered) == _score(FULL, POSITION, GOOD)


def test_black_gets_the_engines_first_move_unless_the_published_labels_are_asked_for():
    published = task_class("policy")(task_of(prompt_style="best_move", best_for_black="last"))
    assert _score(ONE, POSITION, " h7f8", " h7g5")["best_move"] == [1, 0]
    assert _score(published, POSITION, " h7f8", " h7g5")["best_move"] == [0, 1]
    white = read_packaged("heldout")
    white = next(p for p in white if " w " in p.fen)
    assert _score(published, white, white.moves[0])["best_move"] == [1]


def test_one_move_answers():
    scores = _score(ONE, POSITION, " h7f8", "h7g5", " g8h8", " g8g1", " e9e4", "")
    assert scores["legal"] == [1, 1, 1, 0, 0, 0]
    assert scores["malformed"] == [0, 0, 0, 0, 1, 1]
    assert scores["top_five"] == [1, 1, 0, 0, 0, 0]
    assert scores["quality"][0] == 1 and 0 < scores["quality"][1] < 1 and scores["quality"][2] == 0


def test_win_probability_is_symmetric_and_monotonic():
    values = [win_probability(x) for x in (-100, -3, -0.5, 0, 0.5, 3, 100)]
    assert values == sorted(values) and values[3] == 0.5 and values[2] + values[4] == pytest.approx(1)


@pytest.mark.parametrize(
    ("fen", "move", "tail"),
    [
        (chess.STARTING_FEN, "e2e4", "+0.001+0+0"),
        (chess.STARTING_FEN, "e2e5", "+-1.0+0+1"),
        ("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1", "a1a8", "+1.0+1+0"),
        ("7k/8/6K1/8/8/8/8/5Q2 w - - 0 1", "f1f7", "+0.5+1+0"),
        ("8/8/8/8/8/4k3/4p3/4K2B w - - 0 1", "h1f3", "+0.001+0+0"),
        ("8/8/8/8/8/3k4/4p3/3K4 w - - 149 90", "d1e1", "+0.5+1+0"),
        ("8/8/4k3/8/8/4K3/7R/8 w - - 149 90", "h2h3", "+0.5+1+0"),
    ],
)
def test_environment_answers_follow_the_rules(fen, move, tail):
    board = chess.Board(fen)
    answer = next_state(board, chess.Move.from_uci(move))
    assert answer.endswith(tail), answer
    if tail == "+-1.0+0+1":
        assert answer.startswith(fen)


def test_environment_scores():
    task = task_class("environment")(task_of(name="environment"))
    prompts = [task.prompt(p, i) for i, p in enumerate(read_packaged("heldout")[:100])]
    perfect = task.score(prompts, [p.answer for p in prompts])
    for name, values in perfect.items():
        assert (values == (0 if name == "malformed" else 1)).all(), name
    checked = checked_score(task, prompts, [p.answer for p in prompts])
    assert total_reward(checked, task.component_weights) == pytest.approx(2.0)
    assert 0 < sum(p.answer.endswith("+-1.0+0+1") for p in prompts) < 20, "a few moves are illegal"
    fen = prompts[0].answer.split("+")[0]
    scores = task.score([prompts[0]] * 4, [f"{fen}+7+1+1", f"x{fen}+0.001+0+0+", fen, "++++++"])
    assert scores["exact_fen"].tolist() == [1, 0, 0, 0] and scores["malformed"].tolist() == [0, 0, 1, 1]
    assert scores["fen_similarity"][1] == pytest.approx(1 - 1 / (len(fen) + 1))
    assert scores["flags"][0] == 0 and scores["reward_field"][0] == 0


@given(st.text("abcd", max_size=12), st.text("abcd", max_size=12))
def test_edit_distance_is_the_textbook_recursion(a, b):
    table = np.zeros((len(a) + 1, len(b) + 1), int)
    table[:, 0], table[0, :] = np.arange(len(a) + 1), np.arange(len(b) + 1)
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a[i - 1] != b[j - 1]))
    assert edit_distance(a, b) == table[-1, -1]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.text(max_size=40), st.text(" abcdefgh12345678EMB:+-.qrbn", max_size=60)), min_size=1, max_size=4
    )
)
def test_any_text_is_scored_without_a_crash_and_independently_of_its_neighbours(texts):
    environment = task_class("environment")(task_of(name="environment"))
    for task in (FULL, ONE, environment, task_class("length")(task_of(name="length"))):
        prompt = task.prompt(POSITION, 1)
        together = task.score([prompt] * len(texts), texts)
        checked = checked_score(task, [prompt] * len(texts), texts)
        assert np.isfinite(total_reward(checked, task.component_weights)).all()
        for i, text in enumerate(texts):
            alone = task.score([prompt], [text])
            assert all(alone[name][0] == together[name][i] for name in alone)


def test_unknown_reward_components_are_refused_with_the_nearest_name():
    with pytest.raises(UnknownComponent, match=r"task.rewards.legl: .* Did you mean legal\?"):
        task_class("policy")(task_of(prompt_style="best_move", rewards={"legl": 1.0}))


@pytest.mark.parametrize(
    ("rule", "start", "text", "kept"),
    [
        (policy_stop(), SPACES, " e2e4 e7e5", " e2e4"),
        (policy_stop(), SPACES, " e7e8q e7e5", " e7e8q"),
        (policy_stop(), SPACES, " a1a8 e7e5", " a1a8"),
        (policy_stop(), SPACES, " a1a8", " a1a8"),
        (policy_stop(), SPACES, " hello", " h"),
        (policy_stop(), SEEKING, " e2e4    E: 1    B: e7e8n more", " e2e4    E: 1    B: e7e8n"),
        (policy_stop(), SEEKING, "BB: a2a4!", "BB: a2a4"),
        (environment_stop(), 0, "fen w - - 0 1+0.001+0+0+A: more", "fen w - - 0 1+0.001+0+0"),
        (environment_stop(), 0, "no fields", "no fields"),
        (word_stop(), 0, "abc def", "abc"),
        (word_stop(), 0, " abc", ""),
    ],
)
def test_text_ends_at_its_stop(rule, start, text, kept):
    assert rule.truncate(text, start)[0] == kept


@pytest.mark.parametrize("name", ["gpt2", "chess"])
def test_token_automaton_stops_where_the_byte_automaton_does(name):
    tokenizer = Tokenizer.load(name)
    pieces, rng = tokenizer.token_bytes(), random.Random(0)
    for rule, start, texts in (
        (policy_stop(), SEEKING, [f"{GOOD} rest", " x B B: b1c3x", " E: B: a7a8 "]),
        (
            environment_stop(),
            0,
            [f"{b.fen()}+0.001+0+0+x" for b, _ in zip(random_positions(rng), range(200), strict=False)],
        ),
    ):
        table = rule.token_table(tokenizer)
        for text in texts:
            state, read = start, b""
            for token in tokenizer.encode(text):
                state, read = table[state, token], read + pieces[token]
                if state == rule.accept:
                    break
            byte_state = start
            for byte in read:
                byte_state = rule.transitions_SB[byte_state, byte]
            assert (state == rule.accept) and (byte_state == rule.accept), text


@needs_engine
def test_an_analysis_is_a_function_of_position_and_limit(tmp_path):
    fens = [p.fen for p in read_packaged("heldout")[:12]]
    with EnginePool(EngineConfig(nodes=500)) as pool:
        first, again = pool.analyse(fens), pool.analyse(fens[::-1])[::-1]
    with EnginePool(EngineConfig(nodes=500, processes=1, cache=str(tmp_path / "cache.sqlite"))) as other:
        assert other.analyse(fens) == first == again
    with EnginePool(EngineConfig(nodes=500, processes=1, cache=str(tmp_path / "cache.sqlite"))) as cached:
        engine = cached._idle.get()
        os.kill(engine.transport.get_pid(), signal.SIGKILL)
        cached._idle.put(engine)
        assert cached.analyse(fens) == first
        assert cached._idle.get() is engine, "read from the cache: a search would have replaced the dead engine"
        cached._idle.put(engine)
    for fen, analysis in zip(fens, first, strict=True):
        legal = {m.uci() for m in chess.Board(fen).legal_moves}
        assert set(analysis.moves) <= legal and len(analysis.moves) == min(5, len(legal))


@needs_engine
@pytest.mark.default_cases("killed")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_that_dies_or_hangs_is_replaced_and_the_position_scored(how):
    fen = chess.STARTING_FEN
    with EnginePool(EngineConfig(nodes=300, processes=1)) as pool:
        expected = pool.analyse([fen])

    with EnginePool(EngineConfig(nodes=300, processes=1)) as pool:
        # Only a hang is noticed by the clock. An idle machine searches for milliseconds; a busy one has three attempts.
        pool._config = EngineConfig(nodes=300, processes=1, timeout_s=5.0)
        engine = pool._idle.get()
        pid = engine.transport.get_pid()
        pool._idle.put(engine)
        os.kill(pid, how)
        assert pool.analyse([fen]) == expected
        answered = pool._idle.get()
        pool._idle.put(answered)  # which the pool ends: an engine without an owner would keep this process from ending
        assert answered is not engine, "another process answered"
        os.kill(pid, signal.SIGKILL) if how == signal.SIGSTOP and _alive(pid) else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@needs_engine
def test_unlabelled_positions_are_labelled_by_the_engine():
    task = task_class("policy")(task_of(prompt_style="best_move", engine=EngineConfig(nodes=500)))
    try:
        mate = Position("6k1/5ppp/8/8/8/8/8/R5K1 w - - 0 1")
        scores = _score(task, mate, " a1a8", " g1h1")
        assert scores["best_move"] == [1, 0] and scores["quality"][0] == 1
        losing = Position(mate.fen, moves=("a1a8",), evaluations=(99.99,))
        # A rook for three pawns is some four pawns, for the one who moved: 0.8 of what the mate is worth; 0.2 for the other side.
        assert 0.6 < _score(task, losing, " g1h1")["quality"][0] < 1, "a legal move without a label is analysed"
    finally:
        task.close()


def test_a_missing_engine_is_named_with_how_to_install_one():
    with pytest.raises(EngineError, match=r"task.engine.path is '/no/such': no such executable; install Stockfish"):
        EnginePool(EngineConfig(path="/no/such"))
    with pytest.raises(EngineError, match=r"'/bin/cat' is not a working UCI engine"):
        EnginePool(EngineConfig(path="/bin/cat", timeout_s=1.0))


def test_length_reward_counts_up_to_the_cap():
    task = task_class("length")(task_of(name="length", length_cap=10))
    assert _score(task, POSITION, "", "abcde", "x" * 99)["length"] == [0, 0.5, 1]


def test_a_task_is_known_to_the_config_and_to_the_registry_alike():
    """What a new task takes beside its file: a line of `TASKS`, and one of `SETTINGS` where it has settings of its own."""
    assert {*SETTINGS} <= {*TASKS}
    for name in TASKS:
        assert task_class(name).Settings is settings_class(name), name
        assert (settings_class(name) is not Settings) == (name in SETTINGS), name
        needed = {"datasets": {"chain_sum": {}}} if name == "reasoning_gym" else {}
        mixed = {"length": {}, "other": {"task": name, "source": "a.jsonl"} | needed}
        config = task_of(name="mixed", mixture=mixed)
        assert isinstance(config.mixture["other"], settings_class(name))
        if issubclass(task_class(name), EpisodicTask):
            with pytest.raises(ConfigError, match=r"^task.mixture.other: \w+ answers completions \(EpisodicTask\)"):
                make_task(config)
