"""A later turn of an episode as one compiled program: read what the task answered, then decode the next completion.

The prompt's keys and values and those of every earlier turn are kept, so that a turn computes its own tokens alone. They are kept
in one array of fixed size, written in place (the program's argument is donated), so that one program serves all later turns; a
program a turn would read less and be compiled once more for each. Knows nothing of tasks or texts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_grpo.config.tasks import Windows
from jax_grpo.mesh import ONE_DEVICE, Layout, Part, by_heads
from jax_grpo.model.attention import KV, Past
from jax_grpo.rollout.decoding import Decoder, DecodingSettings, Progress, Prompts
from jax_grpo.rollout.generate import Kept, Rollout, decoding_model, row_keys, uniforms


def past_columns(windows: Windows) -> int:
    """Columns of `Past` in an episode of these windows.

    A turn leaves as many as its two windows have: C - 1 of its completion as it was decoded, and 1 + O of the completion's last
    token and the observation, which the next turn reads together.
    """
    return windows.begin(windows.turns - 1)


def make_next_turn(
    graphdef, settings: DecodingSettings, *, group_size: int, windows: Windows, layout: Layout = ONE_DEVICE
) -> Callable[..., tuple[Rollout, Kept]]:
    """The compiled turns after the first; settings as in `rollout.generate.make_generate`, which makes the first `Kept`.

    Returns:
        Jitted `next_turn(params, kept, newest, mask_PT, ids_PGO, mask_PGO, goes_on_PG, start_state_P, prompt_P, seed, step, cap_P,
        turn) -> (Rollout, Kept)`. `newest` is the rollout of the turn before, `ids_PGO` what it is answered, padded on the left;
        rows whose episode is over (`goes_on_PG` False) generate nothing. `turn` counts from 0. Donates `kept`.
    """

    def next_turn(
        params,
        kept: Kept,
        newest: Rollout,
        mask_PT,
        ids_PGO,
        mask_PGO,
        goes_on_PG,
        start_state_P,
        prompt_P,
        seed,
        step,
        cap_P,
        turn,
    ) -> tuple[Rollout, Kept]:
        model = decoding_model(graphdef, params, layout)
        place = windows.begin(turn - 1)
        # Token j of a completion is in the cache where there is a token j + 1.
        past = _written(kept.past, kept.newest, newest.completion_mask_PGC[..., 1:], place)
        last_PG = jnp.maximum(jnp.sum(newest.completion_mask_PGC, axis=-1) - 1, 0)
        last_PG1 = jnp.take_along_axis(newest.completion_ids_PGC, last_PG[..., None], axis=-1)
        ids_PGE = jnp.concatenate([last_PG1, ids_PGO], axis=-1)
        mask_PGE = jnp.concatenate([jnp.ones_like(last_PG1), mask_PGO], axis=-1) * goes_on_PG[..., None]
        before_PG = jnp.sum(mask_PT, axis=-1)[:, None] + jnp.sum(past.mask_PGS, axis=-1)
        position_PGE = jnp.maximum(before_PG[..., None] + jnp.cumsum(mask_PGE, axis=-1) - 1, 0)
        hidden_PGEH, read = model.extend(ids_PGE, mask_PGE, position_PGE, kept.prompts, mask_PT, past)
        past = _written(past, read, mask_PGE, place + windows.completion - 1)

        shape = newest.completion_ids_PGC.shape
        dtype = newest.sampling_logp_PGC.dtype
        prompts = Prompts(
            caches=kept.prompts,
            mask_PT=mask_PT,
            length_PG=before_PG + jnp.sum(mask_PGE, axis=-1),
            uniform_PGC=uniforms(row_keys(seed, step, prompt_P, group_size), shape[-1], dtype, windows.begin(turn)),
            cap_P=cap_P,
            past=past,
        )
        progress = Progress(
            ids_PGC=jnp.full(shape, settings.pad_id, jnp.int32),
            mask_PGC=jnp.zeros(shape, jnp.int32),
            logp_PGC=jnp.zeros(shape, dtype),
            # An episode that is over begins where a completion ends.
            state_PG=jnp.where(goes_on_PG, start_state_P[:, None], settings.accept_state).astype(jnp.int32),
            stopped_PG=~goes_on_PG,
            seen_PGV=None if kept.seen_PGV is None else _also_seen(kept.seen_PGV, ids_PGO, mask_PGO),
        )
        done, caches = Decoder(model, settings, keeps=True).run(prompts, progress, hidden_PGEH[:, :, -1])
        assert caches is not None, "a decoder that keeps"
        rollout = Rollout(done.ids_PGC, done.mask_PGC, done.logp_PGC, done.stopped_PG)
        return rollout, by_heads(Kept(kept.prompts, past, caches, done.seen_PGV))

    of_prompts, whole = Part.PROMPTS, Part.WHOLE
    given = (Part.PARAMETERS, *[of_prompts] * 8, whole, whole, of_prompts, whole)
    return jax.jit(layout.by_prompts(next_turn, given, of_prompts), donate_argnums=1)


def _written(past: Past, caches: list[KV], mask_PGX: jax.Array, place: jax.typing.ArrayLike) -> Past:
    """The past with these columns, and which of them count, from column `place` on."""
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place)
    columns = [jax.tree.map(functools.partial(write, axis=3), *pair) for pair in zip(past.caches, caches, strict=True)]
    return Past(columns, write(past.mask_PGS, mask_PGX.astype(bool), axis=2))


def _also_seen(seen_PGV: jax.Array, ids_PGO: jax.Array, mask_PGO: jax.Array) -> jax.Array:
    rows = seen_PGV.shape[:2]
    p, g = (jnp.arange(size) for size in rows)
    return seen_PGV.at[p[:, None, None], g[None, :, None], ids_PGO].max(mask_PGO.astype(bool))
