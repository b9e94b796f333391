"""Games of a few moves from held-out positions, against yardsticks: how the model stands then, beside random legal play.

Rules, opponents and what a position is worth by its material are those of `tasks.game`. Each move is asked for by its position's
prompt alone, as in play: nothing of the episode is before it. Knows nothing of generation.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

import chess
import numpy as np

from jax_grpo.config.tasks import TaskConfig
from jax_grpo.evaluate.statistics import Estimate, cluster_bootstrap_mean
from jax_grpo.positions.position import Position
from jax_grpo.positions.random_play import random_move
from jax_grpo.rollout.texts import Complete, Tick
from jax_grpo.tasks.base import Prompt
from jax_grpo.tasks.episodes import Turn, checked_reset, checked_steps
from jax_grpo.tasks.game import Game, GameTask
from jax_grpo.tasks.policy import in_style, move_prompt

MOVES = 3  # of the model's, in each game
OPPONENTS = ("random", "capture")


def random_legal(seed: int, style: str = "best_move") -> Complete:
    """Answers prompts of a style by any legal move."""

    def choose(prompts: Sequence[Prompt], *, numbers: Sequence[int], step: int) -> list[str]:
        draws = [random.Random(f"legal/{seed}/{number}/{step}") for number in numbers]
        boards = [chess.Board(prompt.position.fen) for prompt in prompts if prompt.position is not None]
        return [
            in_style(style, random_move(board, rng).uci(), board.fen())
            for board, rng in zip(boards, draws, strict=True)
        ]

    return choose


def play(
    positions: Sequence[Position], opponent: str, choose: Complete, seed: int, tick: Tick, style: str = "best_move"
) -> dict[str, np.ndarray]:
    """A game from each position, side by side, with as many ticks as moves; `GameTask`'s components, float32 [positions]."""
    settings = {"name": "game", "prompt_style": style, "opponent": opponent, "episode": {"turns": MOVES}}
    task = GameTask(TaskConfig.model_validate(settings))
    prompts = [dataclasses.replace(task.prompt(p, 0), draw=(seed, number)) for number, p in enumerate(positions)]
    episodes = checked_reset(task, prompts)
    for step in range(MOVES):
        live = {number: episode for number, episode in enumerate(episodes) if not episode.done}
        if live:
            fens = [game.board.fen() for e in live.values() if isinstance(game := e.environment, Game)]
            asked = [move_prompt(style, fen, Position(fen)) for fen in fens]
            texts = choose(asked, numbers=list(live), step=step)
            answers = checked_steps(task, prompts, live, texts)
            for episode, text, (observation, done) in zip(live.values(), texts, answers, strict=True):
                episode.turns.append(Turn(text, observation))
                episode.done = bool(done)
        tick(step + 1)
    return task.score(prompts, episodes)


def estimates(
    positions: Sequence[Position],
    components: Mapping[str, np.ndarray],
    groups: Mapping[str, Sequence[bool]],
    seed: int,
) -> dict[str, Estimate]:
    """`group/name` means, with intervals by the game that a position was played in; one without is its own."""
    games = [position.fen if position.game is None else position.game for position in positions]
    out = {}
    for group, members in {"all": [True] * len(positions), **groups}.items():
        for name, values in components.items():
            kept = [(float(x), game) for x, game, member in zip(values, games, members, strict=True) if member]
            inside, clusters = zip(*kept, strict=True) if kept else ((), ())
            out[f"{group}/{name}"] = cluster_bootstrap_mean(inside, clusters, seed)
    return out
