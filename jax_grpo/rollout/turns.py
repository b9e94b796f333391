"""A later turn of an episode as one compiled program: read what the task answered, then decode the next completion.

A turn computes its own tokens alone: keys and values of the prompt and of every earlier turn are cached. Those of earlier turns
lie in one array of fixed size, written in place (the program's argument is donated), so that one program serves all later turns;
a program a turn would read less and be compiled once more for each. Knows nothing of tasks or texts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_grpo.config.tasks import Windows
from jax_grpo.mesh import ONE_DEVICE, Layout, Part
from jax_grpo.mesh.tensor import by_heads
from jax_grpo.model.attention import KV, EarlierTurns
from jax_grpo.rollout.decoding import DecodeInputs, DecodingLoop, DecodingSettings
from jax_grpo.rollout.generate import EpisodeCache, Rollout, decoding_model, row_keys, uniforms


def past_columns(windows: Windows) -> int:
    """Columns of `EarlierTurns` in an episode of these windows; 0 where there is one turn.

    A turn leaves as many as its two windows have: C - 1 of its completion as it was decoded, and 1 + O of the completion's last
    token and the observation, which the next turn reads together.
    """
    return windows.begin(windows.turns - 1)


def make_next_turn(
    graphdef, settings: DecodingSettings, *, group_size: int, windows: Windows, layout: Layout = ONE_DEVICE
) -> Callable[..., tuple[Rollout, EpisodeCache]]:
    """The compiled turns after the first; settings as in `rollout.generate.make_generate`, which makes the first cache.

    Returns:
        Jitted `next_turn(params, cache, newest, mask_PT, ids_PGO, mask_PGO, goes_on_PG, start_state_P, prompt_P, seed, step, cap_P,
        turn) -> (Rollout, EpisodeCache)`. `newest` is the rollout of the turn before, `ids_PGO` what answers it, padded on the
        left; rows whose episode is over (`goes_on_PG` False) generate nothing. `turn` counts from 0. Donates `cache`.
    """

    def next_turn(
        params,
        cache: EpisodeCache,
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
    ) -> tuple[Rollout, EpisodeCache]:
        model = decoding_model(graphdef, params, layout)
        place = windows.begin(turn - 1)
        # Token j of a completion is in the cache where there is a token j + 1.
        earlier = _written(cache.earlier, cache.newest, newest.completion_mask_PGC[..., 1:], place)
        last_PG = jnp.maximum(jnp.sum(newest.completion_mask_PGC, axis=-1) - 1, 0)
        last_PG1 = jnp.take_along_axis(newest.completion_ids_PGC, last_PG[..., None], axis=-1)
        ids_PGE = jnp.concatenate([last_PG1, ids_PGO], axis=-1)
        mask_PGE = jnp.concatenate([jnp.ones_like(last_PG1), mask_PGO], axis=-1) * goes_on_PG[..., None]
        before_PG = jnp.sum(mask_PT, axis=-1)[:, None] + jnp.sum(earlier.mask_PGS, axis=-1)
        position_PGE = jnp.maximum(before_PG[..., None] + jnp.cumsum(mask_PGE, axis=-1) - 1, 0)
        hidden_PGEH, read = model.extend(ids_PGE, mask_PGE, position_PGE, cache.prompts, mask_PT, earlier)
        earlier = _written(earlier, read, mask_PGE, place + windows.completion - 1)
        keys_PG, dtype = row_keys(seed, step, prompt_P, group_size), newest.sampling_logp_PGC.dtype
        prompts = DecodeInputs(
            caches=cache.prompts,
            mask_PT=mask_PT,
            length_PG=before_PG + jnp.sum(mask_PGE, axis=-1),
            uniform_PGC=uniforms(keys_PG, windows.completion, dtype, windows.begin(turn)),
            cap_P=cap_P,
            earlier=earlier,
        )
        # An episode that is over begins where a completion ends.
        stop_state_PG = jnp.where(goes_on_PG, start_state_P[:, None], settings.accept_state)
        seen_PGV = None if cache.seen_PGV is None else _also_seen(cache.seen_PGV, ids_PGO, mask_PGO)
        done, own = DecodingLoop(model, settings).run(
            prompts, hidden_PGEH[:, :, -1], stop_state_PG, ~goes_on_PG, seen_PGV, keep_cache=True
        )
        assert own is not None, "keep_cache"
        rollout = Rollout(done.ids_PGC, done.mask_PGC, done.logp_PGC, done.stopped_PG)
        return rollout, by_heads(EpisodeCache(cache.prompts, earlier, own, done.seen_PGV))

    of_prompts, whole = Part.PROMPTS, Part.WHOLE
    given = (Part.PARAMETERS, *[of_prompts] * 8, whole, whole, of_prompts, whole)
    return jax.jit(layout.per_device(next_turn, given, of_prompts), donate_argnums=1)


def _written(earlier: EarlierTurns, caches: list[KV], mask_PGX: jax.Array, place: jax.typing.ArrayLike) -> EarlierTurns:
    """With these columns, and which of them count, from column `place` on."""
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place)
    columns = [
        jax.tree.map(functools.partial(write, axis=3), *pair) for pair in zip(earlier.caches, caches, strict=True)
    ]
    return EarlierTurns(columns, write(earlier.mask_PGS, mask_PGX.astype(bool), axis=2))


def _also_seen(seen_PGV: jax.Array, ids_PGO: jax.Array, mask_PGO: jax.Array) -> jax.Array:
    rows = seen_PGV.shape[:2]
    p, g = (jnp.arange(size) for size in rows)
    return seen_PGV.at[p[:, None, None], g[None, :, None], ids_PGO].max(mask_PGO.astype(bool))
