"""A model that plays: position to move, sampled from the policy; where that is no legal move, the legal one it finds likeliest.

Two compiled programs, both of fixed shapes: generation of one completion, and the log-probabilities of legal moves.
Knows nothing of the UCI protocol, clocks or opponents.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import chess
import numpy as np

from jax_grpo.chess.evaluate.policy import make_score, padded_moves, policy_task
from jax_grpo.chess.positions.position import Position
from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.chess.style import find_style
from jax_grpo.chess.tasks.policy import Answer, in_style, move_prompt, parse_answer
from jax_grpo.policy.named import load_named
from jax_grpo.rollout.generate import PromptTokens, encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import TextProgram, text_program

PROMPT_TOKENS = 96  # every prompt is padded to it; the few longer ones to the next multiple of 32
MOVES = 64  # legal moves scored together; a position with more takes several passes
MOVE_TOKENS = 8  # longest move
CAPS = {"best_move": MOVE_TOKENS, OWN_SIDE: MOVE_TOKENS, "full": 144}  # tokens of a completion, by style
GREEDY = Sampling(temperature=0.0)


class Choice(NamedTuple):
    """A legal move; `written` is what the model wrote; `logp`, in nats, is that of a fallback move, else None.

    `pawns` is what the model says moves are worth to its side, by UCI: only the `full` prompt asks for it.
    """

    move: chess.Move
    written: str
    logp: float | None
    pawns: Mapping[str, float]


class Player:
    """The weights of a name, with a tokenizer that is not their own where one is given (see `policy.named.load_named`).

    `style` is that of its prompts, a key of `CAPS`; None: as the weights were taught (`chess.style.find_style`).
    A program is compiled at the first use of its sampling settings.
    Raises ConfigError, WeightsError, TokenizerError, CheckpointError: the weights cannot be used.
    """

    def __init__(self, weights: str, tokenizer: str | None = None, style: str | None = None):
        self._style = style or find_style(weights)
        self.cap = CAPS[self._style]  # tokens of an answer at most
        self.task = policy_task(self._style)
        self.policy = load_named(weights, tokenizer=tokenizer, context=PROMPT_TOKENS + self.cap)
        self.policy.tokenizer.require_writable(self.task.answers, self.task.name)
        self._programs: dict[Sampling, TextProgram] = {}
        self._score = make_score(self.policy.graphdef, self.policy.tokenizer.vocab_size)

    def compile(self, sampling: Sampling = GREEDY) -> None:
        """Makes both programs, so that a move after it is quick."""
        board = chess.Board()
        self._write(board, sampling, seed=0, game=0)
        self.move_logps(board, list(board.legal_moves))

    def choose(
        self,
        board: chess.Board,
        sampling: Sampling = GREEDY,
        *,
        seed: int = 0,
        game: int = 0,
        among: Sequence[chess.Move] | None = None,
    ) -> Choice:
        """A move of those allowed (`among`; None: all legal ones), of which there is one; a function of its arguments.

        The draw is decided by the seed, the game's number and the number of half-moves played.
        """
        legal = list(board.legal_moves) if among is None else list(among)
        assert legal, "the game is over"
        answer = self._write(board, sampling, seed=seed, game=game)
        for move in legal:
            if move.uci() == answer.best:
                return Choice(move, answer.best, None, answer.pawns())
        logps = self.move_logps(board, legal)
        best = int(np.argmax(logps))
        return Choice(legal[best], answer.best, float(logps[best]), answer.pawns())

    def move_logps(self, board: chess.Board, moves: Sequence[chess.Move]) -> np.ndarray:
        """Log-probability in nats, float32 [moves], of writing each move after the prompt for one move, at temperature 1."""
        style, fen = OWN_SIDE if self._style == OWN_SIDE else "best_move", board.fen()
        tokens = self._encode(move_prompt(style, fen).text)
        encoded = self.policy.tokenizer.encode_batch([f" {in_style(style, move.uci(), fen)}" for move in moves])
        logps = []
        for start in range(0, len(encoded), MOVES):
            batch = encoded[start : start + MOVES]
            ids_GC, mask_GC = padded_moves(batch, self.policy.tokenizer.pad_id, MOVES, MOVE_TOKENS)
            logp_PG = self._score(self.policy.params, *tokens, ids_GC[None], mask_GC[None])
            logps.append(np.asarray(logp_PG)[0, : len(batch)])
        return np.concatenate(logps)

    def _write(self, board: chess.Board, sampling: Sampling, *, seed: int, game: int) -> Answer:
        """What the model writes; its move may be illegal, or empty."""
        if sampling not in self._programs:
            how = self.policy.tokenizer, self.task.stop_rule, self.cap, sampling
            self._programs[sampling] = text_program(self.policy.graphdef, *how)
        prompt = self.task.prompt(Position(board.fen()), 0)
        given = self.policy.params, [prompt], self._encode(prompt.text), [game], seed, board.ply()
        (text,), _ = self._programs[sampling].complete(*given, batch=1)
        return parse_answer(self._style, text, board.fen())

    def _encode(self, text: str) -> PromptTokens:
        """The prompt, padded to one of few widths: programs are compiled by width."""
        room = self.policy.architecture.max_position_embeddings - self.cap
        return encode_prompts([text], self.policy.tokenizer, room, multiple=32, least=PROMPT_TOKENS)
