"""The same problem in PyTorch: `torch.compile` of the plain head, and Liger's fused linear GRPO loss. Needs torch, Liger a GPU."""

import statistics
import time
from typing import Any

from jax_grpo.bench.lm_head_variants import SEQUENCE, Shape


def _plain(torch: Any, shape: Shape, rows: dict[str, Any]):
    def loss(hidden_TH, embedding_VH):
        logits_TV = hidden_TH @ embedding_VH[: shape.vocab_size].T
        logp_TV = torch.log_softmax(logits_TV.float(), dim=-1)
        logp_T = logp_TV.gather(1, rows["targets"][:, None])[:, 0]
        ratio_T = torch.exp(logp_T - rows["old_logp"])
        advantages_T = rows["advantages"].repeat_interleave(SEQUENCE)
        surrogate_T = torch.minimum(ratio_T * advantages_T, ratio_T.clamp(0.8, 1.2) * advantages_T)
        return -(surrogate_T * rows["mask"]).sum() / shape.tokens

    return torch.compile(loss)


def _liger(torch: Any, shape: Shape, rows: dict[str, Any]):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss  # pyright: ignore[reportMissingImports]

    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")
    by_sequence = {name: rows[name].view(-1, SEQUENCE) for name in ("targets", "old_logp", "mask")}

    def loss(hidden_TH, embedding_VH):
        value, _ = head(
            _input=hidden_TH.view(-1, SEQUENCE, shape.width),
            lin_weight=embedding_VH[: shape.vocab_size],
            selected_token_ids=by_sequence["targets"],
            attention_mask=by_sequence["mask"],
            advantages=rows["advantages"],
            old_per_token_logps=by_sequence["old_logp"],
        )
        return value

    return loss


MAKE = {"torch-compile": _plain, "liger": _liger}


def peer_record(
    name: str, shape: Shape, param_dtype: str, steps: int, masked_shares: tuple[float, ...]
) -> dict[str, Any]:
    """Medians in milliseconds and peak bytes, as `lm_head.measured_record`.

    Raises:
        ValueError: the tokens are no whole sequences.
        ImportError: the peer is not installed.
    """
    import torch

    if shape.tokens % SEQUENCE:
        raise ValueError(f"{shape.tokens} tokens are no multiple of the peers' sequences of {SEQUENCE}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronise = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int):
        return torch.randn(*size, generator=generator, device=device)

    record: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    for masked in masked_shares:
        hidden_TH = normal(shape.tokens, shape.width).bfloat16().requires_grad_()
        embedding_VH = (
            (normal(shape.rows, shape.width) * 2 / shape.width**0.5).to(getattr(torch, param_dtype)).requires_grad_()
        )
        targets_T = torch.randint(shape.vocab_size, (shape.tokens,), generator=generator, device=device)
        with torch.no_grad():
            logp_T = torch.cat(
                [
                    torch.log_softmax((h @ embedding_VH[: shape.vocab_size].to(h.dtype).T).float(), -1).gather(
                        1, y[:, None]
                    )[:, 0]
                    for h, y in zip(hidden_TH.split(1024), targets_T.split(1024), strict=True)
                ]
            )
        rows = {
            "targets": targets_T,
            "advantages": normal(shape.tokens // SEQUENCE),
            "old_logp": logp_T + 0.3 * normal(shape.tokens),
            "mask": (torch.rand(shape.tokens, generator=generator, device=device) >= masked).float(),
        }
        loss = MAKE[name](torch, shape, rows)

        def step(loss=loss, hidden_TH=hidden_TH, embedding_VH=embedding_VH):
            grads = torch.autograd.grad(loss(hidden_TH, embedding_VH.to(hidden_TH.dtype)), (hidden_TH, embedding_VH))
            synchronise()
            return grads

        for _ in range(3):
            norms = [float(g.float().norm()) for g in step()]
        assert all(0 < norm < float("inf") for norm in norms), f"{name}: gradient norms {norms}"
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        milliseconds = []
        for _ in range(steps):
            started = time.perf_counter()
            step()
            milliseconds.append(1e3 * (time.perf_counter() - started))
        record[f"masked {masked:.0%}"] = {
            "median_ms": statistics.median(milliseconds),
            "min_ms": min(milliseconds),
            "max_ms": max(milliseconds),
            "gradient_norms": norms,
        }
    record["peak_bytes_in_use"] = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return record
