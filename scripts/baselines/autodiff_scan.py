"""Pipeline parallelism by autodiff of a scan, MaxText's way.

One `lax.scan` over M + P - 1 iterations of a `jax.vmap` over stages, a shift register between them, and
`jax.value_and_grad` of the whole. Following MaxText's `layers/pipeline.py`:

- parameters and activations carry a leading stage axis, sharded over `pipe`; the vmap names it as the SPMD axis;
- inputs and outputs share one buffer [P, M/P, ...], also sharded: each iteration takes a microbatch from its head
  at the first stage and puts one at its tail at the last;
- with remat, an iteration keeps its input and the layers' inputs (`save_only_these_names("iteration_input",
  "decoder_layer_input")`), and the layers' insides are computed again.

Embedding and head are outside the pipeline, where the `pipe` axis divides the microbatches, so no device repeats
another's head. Bubbles are computed, since every stage runs in every iteration.

Other axes than `pipe` are XLA's: `batch_axes` divide the sequences of a microbatch, and weights are gathered and their
gradients reduced where XLA sees fit by the shardings of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import Batch, Decoder

__all__ = ["autodiff_scan"]

PyTree = Any


def autodiff_scan(
    decoder: Decoder, mesh: Mesh, *, remat: str = "none", unroll: bool = False, batch_axes: tuple[str, ...] = ()
) -> Callable:
    """The function `(params, batch, scale) -> (loss, grads)`, to be jitted.

    Args:
        mesh: with an axis `pipe`.
        remat: "none", or "full" to keep each layer's input alone.
        unroll: whether a stage's layers are separate code or a scan.
        batch_axes: mesh axes that divide the sequences of a microbatch.

    In the function's arguments, `params` are `decoder.init`'s with layers [P, J, ...] sharded over `pipe`; `batch`
    leaves are [M, sequences, ...], M a multiple of P; `scale` is a float32 scalar that multiplies the loss.
    """
    ranks = mesh.shape["pipe"]
    full = remat == "full"

    def staged(tree: PyTree, *between: None) -> PyTree:
        """[P, ..., sequences, ...] over `pipe` and the batch axes; `between` has a None for each dimension there."""
        sharding = NamedSharding(mesh, PartitionSpec("pipe", *between, batch_axes or None))
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, sharding), tree)

    def per_rank(function: Callable, in_axes: Any = 0) -> Callable:
        return jax.vmap(function, in_axes=in_axes, spmd_axis_name="pipe")

    def shift(x: jax.Array, by: int) -> jax.Array:
        """Moves [P, ...] to the next stage, or the one before; round the ring."""
        pairs = [(rank, (rank + by) % ranks) for rank in range(ranks)]
        spec = PartitionSpec("pipe", batch_axes or None)
        move = jax.shard_map(lambda a: jax.lax.ppermute(a, "pipe", pairs), mesh=mesh, in_specs=spec, out_specs=spec)
        return move(x)

    def layer(params: PyTree, x: jax.Array, batch: Batch, number: jax.Array) -> jax.Array:
        return decoder.layer(params, x, decoder.prepare(batch), number)[0]

    if full:
        layer = jax.checkpoint(layer, prevent_cse=unroll)

    def stage(params: PyTree, x: jax.Array, batch: Batch) -> jax.Array:
        def body(x: jax.Array, params: PyTree) -> tuple[jax.Array, None]:
            x = checkpoint_name(x, "decoder_layer_input")
            return layer(params, x, batch, jnp.zeros((), jnp.int32)), None

        return jax.lax.scan(body, x, params, unroll=unroll)[0]

    def embed(shared: PyTree, batch: Batch) -> jax.Array:
        return decoder.embed(shared, decoder.prepare(batch))

    def head(shared: PyTree, x: jax.Array, batch: Batch) -> jax.Array:
        return decoder.head(shared, x, decoder.prepare(batch))

    if full:
        head = jax.checkpoint(head, prevent_cse=False)

    def loss(params: PyTree, batch: Batch, scale: jax.Array) -> jax.Array:
        microbatches = batch.tokens.shape[0]
        each = microbatches // ranks
        divided = staged(jax.tree.map(lambda a: a.reshape(ranks, each, *a.shape[1:]), batch), None)
        stream = staged(per_rank(jax.vmap(embed, (None, 0)), (None, 0))(params["shared"], divided), None)
        rank = jnp.arange(ranks, dtype=jnp.int32)
        is_first, is_last = (edge.reshape(ranks, 1, 1, 1) for edge in (rank == 0, rank == ranks - 1))

        def iteration(carry: tuple, layers: PyTree, t: jax.Array) -> tuple:
            x, stream = carry
            slot = t % each
            head_of_stream = jax.lax.dynamic_index_in_dim(stream, slot, 1, keepdims=False)
            x = staged(checkpoint_name(jnp.where(is_first, head_of_stream, x), "iteration_input"))
            mine = staged(jax.tree.map(lambda a: a[jnp.clip(t - rank, 0, microbatches - 1)], batch))
            x = staged(per_rank(stage)(layers, x, mine))
            moved = jnp.where(is_last, x, shift(head_of_stream, -1))
            stream = staged(jax.lax.dynamic_update_index_in_dim(stream, moved, slot, 1), None)
            return shift(x, 1), stream

        if full:
            keep = jax.checkpoint_policies.save_only_these_names("iteration_input", "decoder_layer_input")
            iteration = jax.checkpoint(iteration, policy=keep, prevent_cse=False)

        carry = (jnp.zeros_like(stream[:, 0]), stream)
        ticks = jnp.arange(microbatches + ranks - 1, dtype=jnp.int32)
        (_, stream), _ = jax.lax.scan(lambda carry, t: (iteration(carry, params["layers"], t), None), carry, ticks)
        # Microbatch m leaves the last stage in iteration m + P - 1 and lands in that slot.
        outputs = staged(jnp.roll(stream, -((ranks - 1) % each), axis=1), None)

        def losses(shared: PyTree, outputs: jax.Array, batch: Batch) -> jax.Array:
            return jax.lax.map(lambda xs: head(shared, *xs), (outputs, batch)).sum()

        return scale * per_rank(losses, (None, 0, 0))(params["shared"], outputs, divided).sum()

    return jax.value_and_grad(loss)
