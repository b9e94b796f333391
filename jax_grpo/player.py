"""A model that plays: position to move, sampled from the policy; where that is no legal move, the legal one it finds likeliest.

Two compiled programs, both of fixed shapes: generation of one completion, and the log-probabilities of legal moves.
Knows nothing of the UCI protocol, clocks or opponents.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import chess
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_grpo.model import GPT2
from jax_grpo.named_weights import load_named
from jax_grpo.rollout import PromptTokens, decode_completions, encode_prompts, make_generate
from jax_grpo.sampling import Sampling
from jax_grpo.tasks.policy import parse_full
from jax_grpo.tasks.stop import SEEKING, SPACES, policy_stop

PROMPT_TOKENS = 96  # every prompt is padded to it; the few longer ones to the next multiple of 32
MOVES = 64  # legal moves scored together; a position with more takes several passes
MOVE_TOKENS = 8  # longest move
GREEDY = Sampling(temperature=0.0)


class Style(NamedTuple):
    """A way of asking for a move.

    Attributes:
        field: what follows the position in the prompt.
        start_state: of the stop rule.
        max_new_tokens: the cap.
        move: the move's text in a completion.
    """

    field: str
    start_state: int
    max_new_tokens: int
    move: Callable[[str], str]


STYLES = {
    "best_move": Style("B:", SPACES, MOVE_TOKENS, str.strip),
    "full": Style("M:", SEEKING, 144, lambda text: parse_full(text).best),
}


class Choice(NamedTuple):
    """A legal move; `written` is what the model wrote; `logp`, in nats, is that of a fallback move, else None."""

    move: chess.Move
    written: str
    logp: float | None

    @property
    def is_fallback(self) -> bool:
        return self.logp is not None


class Player:
    """Loaded weights; a program is compiled at the first use of its sampling settings.

    Args:
        weights: see `named_weights`.
        tokenizer: `chess`, `gpt2` or a folder; None: the weights' own.
        style: a key of `STYLES`.

    Raises:
        ConfigError, WeightsError, TokenizerError, CheckpointError: the weights cannot be used.
    """

    def __init__(self, weights: str, tokenizer: str | None = None, style: str = "best_move"):
        self._style = STYLES[style]
        context = PROMPT_TOKENS + self._style.max_new_tokens
        self._policy = load_named(weights, tokenizer=tokenizer, context=context)
        self._stop_rule = policy_stop()
        self._stop_table_SV = self._stop_rule.token_table(self._policy.tokenizer)
        self._generate: dict[Sampling, Callable] = {}
        self._score = _make_score(self._policy.graphdef, self._policy.tokenizer.vocab_size)

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
        """A legal move; a function of its arguments.

        Args:
            board: the game is not over.
            sampling: temperature 0 is greedy.
            seed: with `game` and the number of half-moves played, of the draw.
            game: number of the game.
            among: the legal moves allowed; None: all.
        """
        legal = list(board.legal_moves) if among is None else list(among)
        assert legal, "the game is over"
        written = self._write(board, sampling, seed=seed, game=game)
        for move in legal:
            if move.uci() == written:
                return Choice(move, written, None)
        logps = self.move_logps(board, legal)
        best = int(np.argmax(logps))
        return Choice(legal[best], written, float(logps[best]))

    def move_logps(self, board: chess.Board, moves: Sequence[chess.Move]) -> np.ndarray:
        """Log-probability in nats, float32 [moves], of writing each move after `P: <FEN>    B:`, at temperature 1."""
        prompt = self._encode(board, STYLES["best_move"].field)
        encoded = self._policy.tokenizer.encode_batch([f" {move.uci()}" for move in moves])
        found = []
        for start in range(0, len(encoded), MOVES):
            ids_PGC = np.full((1, MOVES, MOVE_TOKENS), self._policy.tokenizer.pad_id, np.int32)
            mask_PGC = np.zeros_like(ids_PGC)
            part = encoded[start : start + MOVES]
            for g, ids in enumerate(part):
                ids_PGC[0, g, : len(ids)] = ids
                mask_PGC[0, g, : len(ids)] = 1
            found.append(np.asarray(self._score(self._policy.params, *prompt, ids_PGC, mask_PGC))[0, : len(part)])
        return np.concatenate(found)

    def _write(self, board: chess.Board, sampling: Sampling, *, seed: int, game: int) -> str:
        """The move the model writes, legal or not; may be empty."""
        if sampling not in self._generate:
            self._generate[sampling] = make_generate(
                self._policy.graphdef,
                vocab_size=self._policy.tokenizer.vocab_size,
                pad_id=self._policy.tokenizer.pad_id,
                group_size=1,
                max_new_tokens=self._style.max_new_tokens,
                sampling=sampling,
                stop_table_SV=self._stop_table_SV,
                accept_state=self._stop_rule.accept,
            )
        state, numbers = np.array([self._style.start_state], np.int32), np.array([game], np.int32)
        prompt = self._encode(board, self._style.field)
        rollout = self._generate[sampling](
            self._policy.params, *prompt, state, numbers, np.int32(seed), np.int32(board.ply())
        )
        (text,) = decode_completions(rollout, self._policy.tokenizer)
        return self._style.move(self._stop_rule.truncate(text, self._style.start_state)[0])

    def _encode(self, board: chess.Board, field: str) -> PromptTokens:
        """The prompt, padded to one of few widths: programs are compiled by width."""
        room = self._policy.architecture.max_position_embeddings - self._style.max_new_tokens
        ids_PT, mask_PT = encode_prompts([f"P: {board.fen()}    {field}"], self._policy.tokenizer, room)
        length = ids_PT.shape[1]
        missing = (0, 0), (max(PROMPT_TOKENS, -(-length // 32) * 32) - length, 0)
        return PromptTokens(np.pad(ids_PT, missing), np.pad(mask_PT, missing))


def _make_score(graphdef, vocab_size: int):
    """Compiled log-probability [P, G] of whole completions, each the sum over its tokens."""

    @jax.jit
    def score(params, ids_PT, mask_PT, completion_ids_PGC, completion_mask_PGC):
        model: GPT2 = nnx.merge(graphdef, params)
        hidden_PGCH = model.grouped(ids_PT, mask_PT, completion_ids_PGC, completion_mask_PGC)
        embedding_VH = model.wte.embedding[...][:vocab_size].astype(hidden_PGCH.dtype)
        logits_PGCV = jnp.einsum("pgch,vh->pgcv", hidden_PGCH, embedding_VH, preferred_element_type=jnp.float32)
        logp_PGCV = jax.nn.log_softmax(logits_PGCV, axis=-1)
        logp_PGC = jnp.take_along_axis(logp_PGCV, completion_ids_PGC[..., None], axis=-1)[..., 0]
        return jnp.sum(logp_PGC * completion_mask_PGC, axis=-1)

    return score
