"""Pictures of an evaluation: rates with their intervals, lengths of self-play games, one game, boards with the model's moves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import chess
import numpy as np
from matplotlib.lines import Line2D

from jax_grpo.chess.boards import ENGINE, MODEL, draw_board, save_boards
from jax_grpo.chess.evaluate.selfplay import SelfPlay
from jax_grpo.chess.evaluate.suites import Data, Results
from jax_grpo.chess.evaluate.tables import PLAIN, PLAYED, PLAYERS, REFERENCES, TITLES, by_section, words_of
from jax_grpo.chess.games import ILLEGAL
from jax_grpo.evaluate import MODES
from jax_grpo.evaluate.statistics import Estimate
from jax_grpo.report.pictures import saved_figure

SERIES = {  # how a mode and a side are drawn, by mode/group
    "greedy/white": {"color": MODEL, "marker": "o", "mfc": "white", "lw": 1.2},
    "greedy/black": {"color": MODEL, "marker": "o", "mfc": MODEL, "lw": 1.2},
    "sampled/white": {"color": ENGINE, "marker": "s", "mfc": "white", "lw": 1.2},
    "sampled/black": {"color": ENGINE, "marker": "s", "mfc": ENGINE, "lw": 1.2},
}


def save_pictures(results: Results, data: Data, name: str, folder: Path) -> list[Path]:
    """Writes those pictures that the suites which ran give something to draw for."""
    moves = [(p, results.moves[p.fen]) for p in data.positions if p.moves and p.fen in results.moves]
    pictures = [  # (name, something to draw, how)
        ("rates.png", results.estimates, lambda path: rates(results.estimates, path)),
        ("strength.png", PLAYED in by_section(results.estimates), lambda path: losses(results.estimates, name, path)),
        ("selfplay.png", results.games, lambda path: lengths(results.games, path)),
        ("game.png", results.games, lambda path: longest_game(results.games, name, path)),
        ("boards.png", moves, lambda path: save_boards(moves, path)),
    ]
    files = {folder / file: draw for file, there, draw in pictures if there}
    for path, draw in files.items():
        draw(path)
    return list(files)


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title.replace("`", ""), fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def rates(estimates: Mapping[str, Estimate], path: Path) -> None:
    """One panel a section: every rate with its 95 % interval, greedy and sampled, White (hollow) and Black (filled) apart."""
    panels = {}
    for section, columns in by_section(estimates).items():
        sided = {name for series in SERIES for name in columns.get(series, {}) if name not in PLAIN}
        if sided:
            panels[section] = {name: words for name, words in words_of(section).items() if name in sided}
    heights = [len(names) + 1.2 for names in panels.values()]
    size = (8, 0.42 * sum(heights) + 0.6)
    with saved_figure(path, len(panels), 1, size, height_ratios=heights) as (figure, axes):
        for axis, (section, names) in zip(axes[:, 0], panels.items(), strict=True):
            for row, name in enumerate(names):
                for place, (series, style) in enumerate(SERIES.items()):
                    rate = estimates.get(f"{section}/{series}/{name}")
                    if rate and rate.value is not None:
                        low, high = rate.low or rate.value, rate.high or rate.value
                        spread = np.maximum(100 * np.array([[rate.value - low], [high - rate.value]]), 0)
                        y = row + 0.18 * (place - 1.5)
                        axis.errorbar([100 * rate.value], [y], xerr=spread, ls="none", ms=4, **style)
            axis.set_yticks(range(len(names)), list(names.values()), fontsize=8)
            axis.set(xlim=(-2, 102), ylim=(len(names) - 0.4, -0.6))
            axis.grid(axis="x", alpha=0.25)
            _finish(axis, TITLES[section])
        axes[-1, 0].set_xlabel("percent, with 95 % intervals", fontsize=8)
        sides = {series: f"{series.partition('/')[0]}, {series.partition('/')[2].capitalize()}" for series in SERIES}
        handles = [Line2D([], [], ms=5, label=sides[series], **style) for series, style in SERIES.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=8)


def losses(estimates: Mapping[str, Estimate], name: str, path: Path) -> None:
    """What the model loses a move, greedy and sampled, by who is to move, with intervals; reference players are lines."""
    groups = {"all": "all", "white": "White to move", "black": "Black to move"}
    edge = len(groups) - 0.55
    with saved_figure(path, 1, 1, (8.5, 4.5)) as (figure, axes):
        axis = axes[0, 0]
        for place, (mode, color) in enumerate({"greedy": MODEL, "sampled": ENGINE}.items()):
            points = [(x, estimates[f"{PLAYED}/{mode}/{group}/loss"]) for x, group in enumerate(groups)]
            measured = [(x, loss.value, loss.low, loss.high) for x, loss in points if loss.value is not None]
            # An estimate without an interval has None, which becomes NaN and has no bar.
            xs, values, *bounds = np.array(measured, np.float64).reshape(-1, 4).T
            spread = 100 * np.abs(np.stack(bounds) - values)
            style = {"fmt": "os"[place], "color": color, "capsize": 3, "label": f"{name}, {mode}"}
            axis.errorbar(xs + 0.16 * (place - 0.5), 100 * values, yerr=spread, **style)
        for player in sorted(REFERENCES):
            line = estimates.get(f"{PLAYED}/{player}/all/loss")
            if line and line.value is not None:
                height = 100 * line.value
                axis.plot([-0.5, edge], [height, height], color="0.5", lw=0.9, ls="--", zorder=0)
                axis.text(edge, height, f" {PLAYERS[player]}: {height:.1f}", va="center", fontsize=8, color="0.35")
        axis.set_xticks(range(len(groups)), list(groups.values()))
        axis.set(xlim=(-0.5, len(groups) + 0.75), ylabel="win probability lost a move, percent")
        axis.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        _finish(axis, f"{TITLES[PLAYED]}: 95 % intervals by game; an illegal move costs what the worst legal one does")


def lengths(games: Mapping[str, Sequence[SelfPlay]], path: Path) -> None:
    """Histograms of legal half-moves, one panel a world, greedy and sampled beside each other."""
    parts = list(dict.fromkeys(key.split("/")[0] for key in games))
    longest = max(game.half_moves for played in games.values() for game in played)
    bins = np.linspace(-0.5, longest + 0.5, min(longest + 2, 26)).tolist()  # a bar a length while there are few
    with saved_figure(path, 1, len(parts), (4.5 * len(parts), 3), sharey=True) as (_, axes):
        for axis, part in zip(axes[0], parts, strict=True):
            values = [[game.half_moves for game in games[f"{part}/{mode}"]] for mode in MODES]
            means = [f"{mode}: mean {np.mean(v):.1f}" for mode, v in zip(MODES, values, strict=True)]
            axis.hist(values, bins=bins, color=[MODEL, ENGINE], label=means)
            axis.set_xlabel("legal half-moves before the game ended", fontsize=8)
            axis.legend(frameon=False, fontsize=8)
            _finish(axis, TITLES[f"selfplay/{part}"])
        axes[0, 0].set_ylabel("games", fontsize=8)


def longest_game(games: Mapping[str, Sequence[SelfPlay]], name: str, path: Path) -> None:
    """Eight moments of the longest sampled game (greedy ones often repeat themselves), White below; the last is its end."""
    sampled = [(key, game) for key, played in games.items() for game in played if key.endswith("/sampled")]
    key, game = max(sampled, key=lambda pair: pair[1].half_moves)
    tries = [move.uci() for move in game.board.move_stack]
    tries.append(game.last_text[:12] if game.ended == ILLEGAL else "")
    moments = np.unique(np.linspace(game.opening, len(tries) - 1, 8).round().astype(int))
    board = game.board.root()
    with saved_figure(path, 2, 4, (10.4, 6)) as (figure, axes):
        for axis in axes.flat:
            axis.axis("off")
        for axis, ply in zip(axes.flat, moments.tolist(), strict=False):
            for move in game.board.move_stack[len(board.move_stack) : ply]:
                board.push(move)
            draw_board(axis, board, tries[ply], "", seen_from=chess.WHITE)
            if not tries[ply]:
                axis.set_title(f"after {ply} half-moves: {board.result() if board.outcome() else 'cut'}", fontsize=8)
        world, mode = key.replace("_", "-").split("/")
        title = f"{name}, self-play ({world}, {mode}): the longest of its games, {game.half_moves} legal half-moves"
        figure.suptitle(title, fontsize=9)
