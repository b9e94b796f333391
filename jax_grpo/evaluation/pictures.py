"""Pictures of an evaluation: rates with their intervals, lengths of self-play games, one game, boards with the model's moves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import chess
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from jax_grpo.report_boards import ENGINE, MODEL, draw_board
from jax_grpo.evaluation.intervals import Estimate
from jax_grpo.evaluation.selfplay import Game
from jax_grpo.evaluation.suites import MODES, Data, Results
from jax_grpo.evaluation.tables import PERCENT, SUITES, TITLES, sections
from jax_grpo.pictures import boards
from jax_grpo.tasks.base import Prompt

SERIES = {  # (mode, group): colour, marker, fill
    ("greedy", "white"): (MODEL, "o", "white"),
    ("greedy", "black"): (MODEL, "o", MODEL),
    ("sampled", "white"): (ENGINE, "s", "white"),
    ("sampled", "black"): (ENGINE, "s", ENGINE),
}
DPI = 100


def save_pictures(results: Results, data: Data, name: str, folder: Path) -> list[Path]:
    """Writes those pictures that the suites which ran give something to draw for."""
    made = []
    if sections(results.estimates):
        made.append(folder / "rates.png")
        rates(results.estimates, made[-1])
    if results.games:
        made += [folder / "selfplay.png", folder / "game.png"]
        lengths(results.games, made[-2])
        longest_game(results.games, name, made[-1])
    labelled = [position for position in data.positions if position.moves and position.fen in results.moves][:8]
    if labelled:
        made.append(folder / "boards.png")
        prompts = [Prompt("", 0, position) for position in labelled]
        boards(prompts, [[results.moves[position.fen]] for position in labelled], made[-1])
    return made


def rates(estimates: Mapping[str, Estimate], path: Path) -> None:
    """One panel a section: every rate with its 95 % interval, greedy and sampled, White (hollow) and Black (filled) apart."""
    panels = [(s, _percent_names(estimates, s)) for s in sections(estimates)]
    panels = [(section, names) for section, names in panels if names]
    heights = [len(names) + 1.2 for _, names in panels]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(8, 0.42 * sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (section, names) in zip(axes[:, 0], panels, strict=True):
        for row, (name, _) in enumerate(names):
            for place, ((mode, group), (color, marker, fill)) in enumerate(SERIES.items()):
                found = estimates.get(f"{section}/{mode}/{group}/{name}")
                if found and found.value is not None:
                    low, high = found.low or found.value, found.high or found.value
                    spread = 100 * np.array([[found.value - low], [high - found.value]])
                    y = row + 0.18 * (place - 1.5)
                    style = {"fmt": marker, "color": color, "mfc": fill, "ms": 4, "lw": 1.2}
                    axis.errorbar([100 * found.value], [y], xerr=np.maximum(spread, 0), **style)
        axis.set_yticks(range(len(names)), [words for _, words in names], fontsize=8)
        axis.set(xlim=(-2, 102), ylim=(len(names) - 0.4, -0.6))
        axis.set_title(TITLES[section].replace("`", ""), fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    axes[-1, 0].set_xlabel("percent, with 95 % intervals", fontsize=8)
    handles = [
        Line2D([], [], color=color, marker=marker, mfc=fill, ms=5, lw=1.2, label=f"{mode}, {group.capitalize()}")
        for (mode, group), (color, marker, fill) in SERIES.items()
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _percent_names(estimates: Mapping[str, Estimate], section: str) -> list[tuple[str, str]]:
    there = {name for path in estimates if path.startswith(section + "/") for name in [path.rsplit("/", 1)[1]]}
    sided = {n for n in there if any(f"{section}/{mode}/{group}/{n}" in estimates for mode, group in SERIES)}
    return [(n, words) for n, words, unit in SUITES[section.partition("/")[0]] if n in sided and unit == PERCENT]


def lengths(games: Mapping[str, Sequence[Game]], path: Path) -> None:
    """Histograms of legal half-moves, one panel a world, greedy and sampled beside each other."""
    parts = list(dict.fromkeys(key.split("/")[0] for key in games))
    longest = max(game.legal for played in games.values() for game in played)
    bins = np.linspace(-0.5, longest + 0.5, min(longest + 2, 26))  # a bar a length while there are few
    figure, axes = plt.subplots(
        1, len(parts), figsize=(4.5 * len(parts), 3), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, part in zip(axes[0], parts, strict=True):
        values = [[game.legal for game in games[f"{part}/{mode}"]] for mode in MODES]
        means = [f"{mode}: mean {np.mean(v):.1f}" for mode, v in zip(MODES, values, strict=True)]
        axis.hist(values, bins=bins.tolist(), color=[MODEL, ENGINE], label=means)
        axis.set_title(TITLES[f"selfplay/{part}"], fontsize=9, loc="left")
        axis.set_xlabel("legal half-moves before the game ended", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("games", fontsize=8)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def longest_game(games: Mapping[str, Sequence[Game]], name: str, path: Path) -> None:
    """Eight moments of the longest sampled game (greedy ones often repeat themselves), White below; the last is its end."""
    sampled = [(key, game) for key, played in games.items() for game in played if key.endswith("/sampled")]
    key, game = max(sampled, key=lambda pair: pair[1].legal)
    tries = [move.uci() for move in game.board.move_stack]
    tries += [game.last_text.strip()[:12]] if game.ended == "illegal_move" else [""]
    moments = np.unique(np.linspace(game.opening, len(tries) - 1, 8).round().astype(int))
    figure, axes = plt.subplots(2, 4, figsize=(10.4, 6), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    board, last = game.board.root(), 0
    for axis, ply in zip(axes.flat, moments.tolist(), strict=False):
        for move in game.board.move_stack[last:ply]:
            board.push(move)
        last = ply
        draw_board(axis, board, tries[ply], "", seen_from=chess.WHITE)
        if not tries[ply]:
            axis.set_title(f"after {ply} half-moves: {board.result() if board.outcome() else 'cut'}", fontsize=8)
    world, mode = key.split("/")
    figure.suptitle(
        f"{name}, self-play ({world.replace('_', '-')}, {mode}): the longest of its games, {game.legal} legal half-moves",
        fontsize=9,
    )
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
