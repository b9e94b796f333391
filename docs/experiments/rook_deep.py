"""How packaged:rook-deep and packaged:rook-endings were made: soft targets for all legal moves, in PyTorch with Muon.

    python docs/experiments/rook_deep.py --data labelled --out taught --lesson stockfish --rows 356000
    python docs/experiments/rook_deep.py --data labelled --out rook-deep --lesson players --rows 240000 --start taught
    python docs/experiments/rook_deep.py --data labelled --out rook-endings --lesson endings --rows 223000 \\
        --start rook-deep --peak 0.6

The positions are those of [rook_deep_positions.py](rook_deep_positions.py). The objective is that of
`jax_grpo.chess.lessons`: all legal moves of a position at once, each with its probability. In the first lesson that is
Stockfish's, softmax(w(m) / tau), but for a small even part. In the second it is what three players play who move in equal
parts: Stockfish, greedy capture, and random legal moves; nothing says who plays. Moves beyond the engine's six lines have the
even part alone. The third is of endings alone: exact play and random legal moves in equal parts. Three linear probes on the
middle layer (what either side attacks, where it may go) and one for the position's value help it learn, and are thrown
away. Not part of the package: `jax_grpo.sft` trains the same objective with AdamW.
"""

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import chess
import numpy as np
import torch
import torch.nn.functional as F
from rook_deep_positions import KINDS, Row, load
from safetensors.torch import save_file
from torch import nn

from jax_grpo.chess.settings import OWN_SIDE
from jax_grpo.model.tokenizer import Tokenizer

# Shares of the two other players, by kind of position; and the random player's in the third lesson.
EVEN, CAPTURES, EVEN_IN_ENDINGS = (1 / 3, 0.3, 1 / 3), (1 / 3, 0, 0), 0.5
SHARES = {"stockfish": (23 / 24, 1 / 24, 0), "players": (0.45, 0.4, 0.15), "endings": (0, 1, 0)}  # of a batch, by kind
TAUS = (0.03, 0.15, 1.0)  # of Stockfish's softmax, by kind: over win probability, technique, and `_utility`
SQUARES = [f"{file}{rank}" for rank in range(1, 9) for file in "abcdefgh"]
BRANCHES = 12  # origins of a position that are computed, all of them in most
PROBED = slice(65, 69)  # the tokens after the board, which see all of it


class Table(NamedTuple):
    """All rows as arrays: tokens [R, T]; moves [M, 3] (from, to, promotion) and theirs, row i's from off[i] to off[i + 1]."""

    tokens: np.ndarray
    off: np.ndarray
    moves: np.ndarray
    values: np.ndarray  # [M], NaN where a move has no line
    captures: np.ndarray  # [M]: with which probability greedy capture plays it
    attacked: np.ndarray
    castling: np.ndarray
    kind: np.ndarray  # [R]: place in `KINDS`
    best: np.ndarray  # [R]: win probability

    @classmethod
    def of(cls, rows: list[Row], kinds: list[int], tokenizer: Tokenizer) -> "Table":
        tokens = tokenizer.encode_batch([f"P: {each.fen}    B:" for each in rows])
        moves = [(*_squares(move), " qrbn".index(move[4:] or " ")) for each in rows for move in each.moves]
        return cls(
            np.array(tokens, np.int16),
            np.cumsum([0, *(len(each.moves) for each in rows)]),
            np.array(moves, np.int8),
            np.array([each.values.get(move, np.nan) for each in rows for move in each.moves], np.float32),
            np.array(
                [(move in each.captures) / len(each.captures) for each in rows for move in each.moves], np.float32
            ),
            np.array([each.attacked for each in rows], np.uint64),
            np.array([each.fen.split()[2] != "-" for each in rows]),
            np.array(kinds),
            np.array(
                [1 if kind else max(each.values.values()) for each, kind in zip(rows, kinds, strict=True)], np.float32
            ),
        )


def _squares(move: str) -> tuple[int, int]:
    return SQUARES.index(move[:2]), SQUARES.index(move[2:4])


class Batches:
    """Draws batches; half of the positions without castling rights are mirrored from left to right."""

    def __init__(self, table: Table, tokenizer: Tokenizer, lesson: str, seed: int):
        self.table, self.lesson, self.rng = table, lesson, np.random.default_rng(seed)
        self.flip = np.arange(tokenizer.vocab_size)  # of the token of an en passant square
        for square in SQUARES:
            other = f" {chr(ord('a') + ord('h') - ord(square[0]))}{square[1]}"
            self.flip[tokenizer.encode(f" {square}")[0]] = tokenizer.encode(other)[0]

    def draw(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        t, rng, n = self.table, self.rng, len(rows)
        counts = t.off[rows + 1] - t.off[rows]
        flat, of_row = (
            np.concatenate([np.arange(t.off[i], t.off[i + 1]) for i in rows]),
            np.repeat(np.arange(n), counts),
        )
        tokens, moves = t.tokens[rows].astype(np.int64), t.moves[flat].astype(np.int64)
        attacked = ((t.attacked[rows][:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.float32)
        flipped = ~t.castling[rows] & (rng.random(n) < 0.5)
        turned_round = tokens[flipped]
        turned_round[:, 1:65] = turned_round[:, 1:65].reshape(-1, 8, 8)[:, :, ::-1].reshape(-1, 64)
        turned_round[:, 67] = self.flip[turned_round[:, 67]]
        tokens[flipped] = turned_round
        moves[flipped[of_row], :2] ^= 7
        attacked[flipped] = attacked[flipped].reshape(-1, 2, 8, 8)[..., ::-1].reshape(-1, 2, 64)
        p = self.played(rows, flat, of_row)
        joint = np.zeros((n, 64, 64), np.float32)
        np.add.at(joint, (of_row, moves[:, 0], moves[:, 1]), p)
        origin = joint.sum(-1)
        # Two moves whose third token is taught; promotions more often than they are played. Their origins are branches 0 and 1.
        key = np.log(p) + rng.gumbel(size=len(p)) + np.where(moves[:, 2] > 0, 2.0, 0)
        starts = np.r_[0, np.cumsum(counts)[:-1]]
        first = np.lexsort((-key, of_row))[starts]
        key = np.where(moves[:, 0] == moves[first, 0][of_row], -1e9, key)
        second = np.lexsort((-key, of_row))[starts]
        every, one = np.arange(n), moves[first, 0] == moves[second, 0]
        score = np.where(origin > 0, origin * np.exp(0.5 * rng.gumbel(size=origin.shape)), -1)
        score[every, moves[second, 0]] = np.where(one, score[every, moves[second, 0]], 1e9)
        score[every, moves[first, 0]] = 2e9
        branches = np.argsort(-score, axis=1)[:, :BRANCHES]
        third = np.zeros((n, 2, 5), np.float32)
        for slot, taught in enumerate((first, second)):
            same = (moves[:, :2] == moves[taught, :2][of_row]).all(-1)
            np.add.at(third[:, slot], (of_row[same], moves[same, 2]), p[same])
        made = {
            "tokens": tokens,
            "branches": branches,
            "origin": origin,
            "destination": np.take_along_axis(joint, branches[:, :, None], 1),
            "drawn": np.stack([moves[first, 1], moves[second, 1]], 1),
            "third": third / third.sum(-1, keepdims=True),
            "promotion": moves[first, 2],
            "one": one,
            "probes": np.concatenate([attacked, (joint.sum(1) > 0)[:, None]], 1).astype(np.float32),
            "best": t.best[rows],
        }
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in made.items()}

    def played(self, rows: np.ndarray, flat: np.ndarray, of_row: np.ndarray) -> np.ndarray:
        """Probability of each move, those of a position summing to 1."""
        t, n = self.table, len(rows)
        kind, values, known = t.kind[rows][of_row], t.values[flat], ~np.isnan(t.values[flat])
        if self.lesson == "stockfish":
            values = np.where(kind == 1, values > 0, values)  # nothing says which win is shorter
            even, captures = np.full(len(flat), 0.08), np.zeros(len(flat))
            taus = np.full(len(flat), TAUS[0])
        else:
            even, captures = np.choose(kind, EVEN), np.choose(kind, CAPTURES)
            even = np.full(len(flat), EVEN_IN_ENDINGS) if self.lesson == "endings" else even
            taus = np.choose(kind, TAUS)
        values = np.where(known, values, -1e4)
        top = np.full(n, -1e4)
        np.maximum.at(top, of_row, values)
        weights = np.where(known, np.exp(np.maximum(-60.0, (values - top[of_row]) / taus)), 0)
        stockfish = weights / np.bincount(of_row, weights, n)[of_row]
        random = 1 / np.bincount(of_row, minlength=n)[of_row]
        return (1 - even - captures) * stockfish + even * random + captures * t.captures[flat]


class Block(nn.Module):
    """GPT-2's, pre-norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.f_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        b, t, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, width)
        x = x + self.o_proj(mixed)
        return x + self.f_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Model(nn.Module):
    """GPT-2 of 8 layers, width 128, 4 heads, and the probes after the fifth layer."""

    def __init__(self, vocabulary: int, layers: int = 8, width: int = 128, heads: int = 4):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.probe_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.probes, self.value = nn.ModuleList(nn.Linear(width, 64) for _ in range(3)), nn.Linear(width, 1)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if "_proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, positions, mask):
        x = self.wte(ids) + self.wpe(positions)
        middle = x
        for number, block in enumerate(self.h):
            x = block(x, mask)
            middle = x[:, PROBED] if number == len(self.h) * 5 // 8 - 1 else middle
        return self.ln_f(x), self.probe_norm(middle)


class Loss:
    """Cross-entropy of the tree of moves: a prompt, twelve origins, two destinations and one promotion in one masked sequence."""

    def __init__(self, tokenizer: Tokenizer):
        pairs = [tokenizer.encode(f" {square}{square}") for square in SQUARES]
        self.origins, self.destinations = (torch.tensor(column) for column in zip(*pairs, strict=True))
        self.third = torch.tensor([tokenizer.eos_id, *(tokenizer.encode(piece)[0] for piece in "qrbn")])
        prompt = self.prompt = len(tokenizer.encode(f"P: {chess.STARTING_FEN}    B:"))
        length, second = prompt + BRANCHES + 3, prompt + BRANCHES
        mask = torch.eye(length, dtype=torch.bool)
        mask[:prompt, :prompt] = torch.ones(prompt, prompt).tril().bool()
        mask[prompt:, :prompt] = True
        for child, parents in {second: [0], second + 1: [1], second + 2: [0, BRANCHES]}.items():
            mask[child, [prompt + parent for parent in parents]] = True
        self.mask = mask
        depth = torch.tensor([*[0] * BRANCHES, 1, 1, 2])
        self.positions = torch.cat([torch.arange(prompt), prompt + depth])

    def __call__(self, model: Model, b: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(nats a position, of the probes)."""
        promoted = self.third[torch.where(b["promotion"] > 0, b["promotion"], 1)]
        parts = [b["tokens"], self.origins[b["branches"]], self.destinations[b["drawn"]], promoted[:, None]]
        hidden, middle = model(torch.cat(parts, 1), self.positions, self.mask)
        logp = (hidden[:, self.prompt - 1 :] @ model.wte.weight.T).log_softmax(-1)
        ends, last = 1 + BRANCHES, 3 + BRANCHES
        loss = -(b["origin"] * logp[:, 0, self.origins]).sum(-1)
        loss -= (b["destination"] * logp[:, 1:ends][:, :, self.destinations]).sum((-1, -2))
        third = -(b["third"] * logp[:, ends:last][:, :, self.third]).sum(-1)
        loss += 0.3 * (third[:, 0] + third[:, 1] * ~b["one"]) / (2 - b["one"].float())
        loss -= 0.3 * logp[:, last, self.third[0]] * (b["promotion"] > 0)
        probed = F.binary_cross_entropy_with_logits
        side = sum(probed(probe(middle[:, i]), b["probes"][:, i]) for i, probe in enumerate(model.probes))
        return loss.mean(), side + 0.3 * probed(model.value(middle[:, 3])[:, 0], b["best"])


class Muon:
    """Muon (Jordan et al. 2024) for the blocks' matrices: momentum made orthogonal by five steps of Newton and Schulz."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in parameters:
            self.groups.setdefault(tuple(p.shape), []).append(p)
        self.momentum = {shape: torch.zeros(len(those), *shape) for shape, those in self.groups.items()}

    def step(self, rate: float) -> None:
        for shape, those in self.groups.items():
            gradient = torch.stack([p.grad for p in those if p.grad is not None])
            momentum = self.momentum[shape].lerp_(gradient, 0.05)
            x = gradient.lerp(momentum, 0.95)
            x = x / (x.norm(dim=(-1, -2), keepdim=True) + 1e-7)
            x = x.mT if (tall := shape[0] > shape[1]) else x
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            for p, change in zip(those, x.mT if tall else x, strict=True):
                p.data.mul_(1 - 0.02 * rate).add_(change, alpha=-rate * max(1, shape[0] / shape[1]) ** 0.5)


def train(
    data: Path, out: Path, lesson: str, start: Path | None, rows: int, batch: int, decay: float, peak: float
) -> None:
    """Trains on so many positions and writes the model's folder; the learning rate falls to 0 over the last share `decay`."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.load("chess")
    shares = SHARES[lesson]
    files = [file for file in sorted(data.glob("*.pkl")) if shares[KINDS.index(file.stem.split("_")[0])]]
    each = [load(file) for file in files]
    kinds = [KINDS.index(file.stem.split("_")[0]) for file, those in zip(files, each, strict=True) for _ in those]
    table = Table.of([one for those in each for one in those], kinds, tokenizer)
    parts = [np.flatnonzero(table.kind == kind) for kind in range(len(KINDS))]
    sizes = [round(share * batch) for share in shares[1:]]
    sizes = [batch - sum(sizes), *sizes]
    print({name: len(part) for name, part in zip(KINDS, parts, strict=True)}, flush=True)
    batches, model, loss_of = Batches(table, tokenizer, lesson, 0), Model(tokenizer.vocab_size), Loss(tokenizer)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("h.")]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and name.startswith("h."))]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    if start:
        saved = torch.load(start / "state.pt")
        model.load_state_dict(saved["model"])
        adam.load_state_dict(saved["adam"])
        muon.momentum = saved["muon"]
    for step in range(rows // batch):
        left = 1 - step * batch / rows
        rate = peak * min(1, (step + 1) / 200) * min(1, left / decay)
        chosen = [batches.rng.choice(part, n, replace=False) for part, n in zip(parts, sizes, strict=True)]
        loss, probed = loss_of(model, batches.draw(np.concatenate(chosen)))
        (loss + probed).backward()
        nn.utils.clip_grad_norm_(others, 1.0)
        muon.step(0.02 * rate)
        adam.param_groups[0]["lr"] = 2e-3 * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"{(step + 1) * batch} positions, {loss.item():.3f} nats", flush=True)
    saved = {"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.momentum}
    torch.save(saved, out / "state.pt")  # for a second lesson; not part of the model
    tensors = {
        f"transformer.{_gpt2_name(name)}": (p.T if name.startswith("h.") and p.dim() == 2 else p).contiguous()
        for name, p in model.state_dict().items()
        if not name.startswith(("prob", "value"))
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    sizes = {"vocab_size": tokenizer.vocab_size, "n_layer": len(model.h), "n_head": model.h[0].heads}
    sizes |= {"n_embd": model.wte.embedding_dim, "n_positions": 256, "n_ctx": 256, "layer_norm_epsilon": 1e-5}
    fixed = {"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True}
    output = {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True, "prompt_style": OWN_SIDE}
    (out / "config.json").write_text(json.dumps(fixed | sizes | output, indent=2) + "\n")
    tokenizer.save(out)


def _gpt2_name(name: str) -> str:
    names = {"c_attn": "attn.c_attn", "o_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "f_proj": "mlp.c_proj"}
    return ".".join(names.get(part, part) for part in name.split("."))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the positions")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lesson", choices=sorted(SHARES), required=True)
    parser.add_argument("--start", type=Path, help="folder of the lesson before")
    parser.add_argument("--peak", type=float, default=1.0, help="of the learning rate")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--decay", type=float, default=0.6)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train(**vars(args))


if __name__ == "__main__":
    main()
