"""The decoder of the Llama, Qwen2/2.5 and Qwen3 families: weights, forward pass, cache.

There is one forward computation for prefill, decoding and training. It takes G
continuations of each of N prompts and lets every position attend to the keys and
values of its prompt (the context, computed earlier and shared by the G) and, causally,
to its own sequence. Prefill is G = 1 without a context; training runs all completion
positions against their prompts; decoding runs one position against its prompt and its
own cached past. Sequences are padded on the right, so a position never sees padding of
its own sequence, and a prompt is masked by its length alone.

Linen declares each weight once (shape, logical axes, initialiser); everyone else
sees `ModelConfig` and a plain dict of parameters. All layers' weights are stacked
on a leading axis and scanned over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int

from dash_jax.rope import Rope, Rotation, rotate, rotation
from dash_jax.sharding import constrain, spec
from dash_jax.types import Key

_PROJECTION = "projection"  # what the rematerialisation policy "dots" saves
_MASKED = -1e30  # finite, so that 0 × masked is 0 in entropies and gradients


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a decoder. Hashable: a static argument of jitted functions."""

    vocab_size: int  # rows of the embedding
    known_ids: int  # ids that the tokenizer has; later rows are never sampled nor scored
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    tied: bool = True  # the head is the transposed embedding
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm on the heads of queries and keys (Qwen3)
    norm_epsilon: float = 1e-6
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    max_positions: int = 1024
    dtype: str = "float32"  # of what is multiplied with matrices; sums and everything else are float32
    remat: Literal["none", "dots", "full"] = "full"

    @property
    def queries_per_key(self) -> int:
        return self.heads // self.kv_heads


class KeyValues(NamedTuple):
    """Keys and values of a context; keys are stored transposed, as attention reads them.

    A shared context has no G axis: k [N, K, A, P], v [N, K, P, A].
    An own context has one: k [N, G, K, A, C], v [N, G, K, C, A].
    All layers together have a leading axis L.
    """

    k: Float[Array, "*batch K A T"]
    v: Float[Array, "*batch K T A"]


class Context(NamedTuple):
    """The prompts' keys and values of all layers; position j of prompt n is visible where j < lengths[n]."""

    layers: KeyValues  # leading axis L, no G axis
    lengths: Int[Array, " N"]


def init(config: ModelConfig, key: Key) -> dict[str, Any]:
    """Random float32 weights."""
    tokens = jnp.zeros((1, 1, 1), jnp.int32)
    return nn.unbox(Decoder(config).init(key, tokens, tokens)["params"])


@functools.cache  # it traces the whole decoder, 0.1 s
def weight_axes(config: ModelConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Abstract weights (shape and dtype) and, as a tree alike, the tuple of logical axes of each."""
    tokens = jax.ShapeDtypeStruct((1, 1, 1), jnp.int32)
    boxed = jax.eval_shape(Decoder(config).init, jax.random.key(0), tokens, tokens)["params"]
    axes = jax.tree.map(
        lambda box: box.names if isinstance(box, nn.Partitioned) else (None,) * box.ndim,
        boxed,
        is_leaf=lambda node: isinstance(node, nn.Partitioned),
    )
    return nn.unbox(boxed), axes


def matrix_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: those of the layers' matrices and of the head."""
    D, heads = config.hidden_size, config.kv_heads * (2 * config.queries_per_key + 2)
    layer = D * heads * config.head_size + 3 * D * config.mlp_size
    return config.layers * layer + config.vocab_size * D


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether the weight at this path of the parameters is a matrix, not a norm or a bias."""
    return not path[-1].key.endswith(("norm", "bias"))


def weight_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Where each weight lies in training."""
    weights, axes = weight_axes(config)
    return jax.tree.map(lambda leaf, names: NamedSharding(mesh, spec(mesh, leaf.shape, names)), weights, axes)


def forward(
    params: dict[str, Any],
    config: ModelConfig,
    tokens: Int[Array, "N G T"],
    positions: Int[Array, "N G T"],
    context: Context | None = None,
    segments: Int[Array, "N G T"] | None = None,
) -> tuple[Float[Array, "N G T D"], KeyValues]:
    """Hidden states after the final norm, and this block's keys and values of all layers (with a G axis).

    With `segments` a row holds several sequences one behind the other, each of which sees itself alone.
    """
    of_layers, length = (None, None) if context is None else context
    result: Any = Decoder(config).apply({"params": params}, tokens, positions, segments, of_layers, length)
    return result


def decode_step(
    params: dict[str, Any],
    config: ModelConfig,
    token: Int[Array, "N G"],
    position: Int[Array, "N G"],
    prompts: Sequence[KeyValues],
    prompt_lengths: Int[Array, " N"],
    past: Sequence[KeyValues],
    slot: Int[Array, ""],
    first: Int[Array, "N G"],
    rotations: Rotation,
) -> tuple[Float[Array, "N G D"], list[KeyValues]]:
    """Feeds one token of every sample: hidden states for the next one, and `past` with slot `slot` written.

    Of `past` a sample sees slots `first` to `slot`.
    `params["layers"]` is a list of per-layer weights (see `unstack`), and so are the caches:
    with one array a layer XLA writes the slot in place. `rotations` are of all positions, [positions, A/2],
    made before the loop over tokens: inside it XLA computes sines again in every layer for every head.
    """
    x = _embed(params["embedding"], token[:, :, None], config)
    rotation = tuple(part[position][:, :, None] for part in rotations)
    at = jnp.arange(past[0].k.shape[-1])[None, None, None, :]
    visible = (at <= slot) & (at >= first[:, :, None, None])
    block, written = Block(config), []
    for weights, prompt, own in zip(params["layers"], prompts, past, strict=True):
        result: Any = block.apply(
            {"params": weights}, x, rotation, visible, prompt, prompt_lengths, own, slot
        )
        x, own = result
        written.append(own)
    return _rms_norm(x, params["final_norm"], config.norm_epsilon)[:, :, 0], written


def unstack(tree: Any, layers: int) -> list[Any]:
    """Splits the leading layer axis of every leaf."""
    return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in range(layers)]


@jax.named_scope("logits")
def logits(
    params: dict[str, Any], config: ModelConfig, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Float32 logits; ids that the tokenizer does not have get a huge negative one."""
    head = params["embedding"] if config.tied else params["head"]
    scores = _project(hidden, head, 1, config.dtype, config.tied)
    if config.known_ids == config.vocab_size:
        return scores
    known = jnp.arange(config.vocab_size) < config.known_ids
    return jnp.where(jnp.broadcast_to(known, scores.shape), scores, _MASKED)


class Decoder(nn.Module):
    """Embedding, scanned blocks, final norm."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "N G T"],
        positions: Int[Array, "N G T"],
        segments: Int[Array, "N G T"] | None = None,
        context: KeyValues | None = None,
        context_length: Int[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "N G T D"], KeyValues]:
        c = self.config
        embedding = _weight(self, "embedding", (c.vocab_size, c.hidden_size), ("vocab", "embed"))
        final_norm = _weight(self, "final_norm", (c.hidden_size,), (None,), nn.initializers.ones)
        if not c.tied:
            _weight(self, "head", (c.hidden_size, c.vocab_size), ("embed", "vocab"))
        layers = nn.scan(
            _remat(c.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(nn.broadcast, nn.broadcast, 0, nn.broadcast),
            length=c.layers,
            metadata_params={nn.PARTITION_NAME: None},
        )(c, name="layers")
        x = _embed(embedding, tokens, c)
        x, own = layers(
            x, rotation(c.rope, c.head_size, positions), _causal(tokens, segments), context, context_length
        )
        return _rms_norm(x, final_norm, c.norm_epsilon), own


class Block(nn.Module):
    """One layer: attention and gated MLP, each behind a norm and added to the residual stream.

    Positions attend to the first `context_length` keys of the prompt and to those `visible` of their own:
    of this block of T positions or, if `past` is given, of `past` with the block written at `slot`.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "N G T D"],
        rotation: Rotation,
        visible: Bool[Array, "#N #G T S"],
        context: KeyValues | None,
        context_length: Int[Array, " N"] | None,
        past: KeyValues | None = None,
        slot: Int[Array, ""] | None = None,
    ) -> tuple[Float[Array, "N G T D"], KeyValues]:
        c = self.config
        D, K, R, A, F = c.hidden_size, c.kv_heads, c.queries_per_key, c.head_size, c.mlp_size
        norm = functools.partial(_weight, self, axes=(None,), initializer=nn.initializers.ones)

        h = _rms_norm(x, norm("attention_norm", (D,)), c.norm_epsilon)
        # What belongs to one key/value head lies together: one product, split over `tensor` as a whole.
        qkv = self._linear("qkv", h, (D,), (K, R + 2, A), ("embed",), ("kv_heads", None, None), c.qkv_bias)
        q, k, v = qkv[..., :R, :], qkv[..., R, :], qkv[..., R + 1, :]
        if c.qk_norm:
            q = _rms_norm(q, norm("q_norm", (A,)), c.norm_epsilon)
            k = _rms_norm(k, norm("k_norm", (A,)), c.norm_epsilon)
        q, k, v = (x.astype(c.dtype) for x in (rotate(q, rotation) * A**-0.5, rotate(k, rotation), v))
        own = KeyValues(k.transpose(0, 1, 3, 4, 2), v.transpose(0, 1, 3, 2, 4))
        if past is not None and slot is not None:
            own = KeyValues(
                jax.lax.dynamic_update_slice_in_dim(past.k, own.k, slot, axis=-1),
                jax.lax.dynamic_update_slice_in_dim(past.v, own.v, slot, axis=-2),
            )
        h = _attend(q, own, visible, context, context_length)
        x = x + self._linear("out", h, (K, R, A), (D,), ("kv_heads", None, None), ("embed",), c.out_bias)

        h = _rms_norm(x, norm("mlp_norm", (D,)), c.norm_epsilon)
        gate_up = self._linear("gate_up", h, (D,), (2, F), ("embed",), (None, "mlp"), c.mlp_bias)
        h = _gated(gate_up)
        x = x + self._linear("down", h, (F,), (D,), ("mlp",), ("embed",), c.mlp_bias)
        return constrain(x, "batch", None, None, None), own

    def _linear(
        self,
        name: str,
        x: Float[Array, "..."],
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        input_axes: tuple[str | None, ...],
        output_axes: tuple[str | None, ...],
        bias: bool,
    ) -> Float[Array, "..."]:
        weight = _weight(self, name, inputs + outputs, input_axes + output_axes)
        with jax.named_scope(name):
            y = _project(x, weight, len(inputs), self.config.dtype)
        if bias:
            b = _weight(self, f"{name}_bias", outputs, output_axes, nn.initializers.zeros)
            y = y + jnp.broadcast_to(b.astype(y.dtype), y.shape)
        return checkpoint_name(y, _PROJECTION)


def _weight(
    module: nn.Module,
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    initializer: Callable[..., Any] = nn.initializers.normal(0.02),  # noqa: B008 - a pure function
) -> Float[Array, "..."]:
    weight: Any = module.param(name, nn.with_partitioning(initializer, axes), shape, jnp.float32)
    return weight


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _project(
    x: Float[Array, "..."], weight: Float[Array, "..."], inputs: int, dtype: str, flipped: bool = False
) -> Float[Array, "..."]:
    """Contracts the last `inputs` axes of x with the first (if `flipped`, the last) of `weight`, in `dtype`.

    The other axes of x are rows. Sums are float32, those of the gradients too, which JAX's own would round.
    """
    weight = weight.astype(dtype)
    if flipped:
        weight = jnp.moveaxis(weight, range(-inputs, 0), range(inputs))
    return _dot(x.astype(dtype), weight, inputs)


def _dot(a: jax.Array, b: jax.Array, axes: Any) -> jax.Array:
    return jnp.tensordot(a, b, axes=axes, preferred_element_type=jnp.float32)


def _project_forward(
    x: jax.Array, weight: jax.Array, inputs: int, dtype: str, flipped: bool
) -> tuple[jax.Array, Any]:
    return _project(x, weight, inputs, dtype, flipped), (x.astype(dtype), weight)


def _project_backward(
    inputs: int, dtype: str, flipped: bool, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    gradient, rows = gradient.astype(dtype), tuple(range(x.ndim - inputs))
    outputs = weight.ndim - inputs
    back = weight.astype(dtype)
    if not flipped:
        back = jnp.moveaxis(back, range(inputs), range(outputs, weight.ndim))
    of_x = _dot(gradient, back, outputs)
    if flipped:
        return of_x, _dot(gradient, x, (rows, rows))
    if x.size <= gradient.size:
        return of_x, _dot(x, gradient, (rows, rows))
    # A product over rows makes XLA:CPU write out its left side transposed; better the narrower of the two.
    # The barrier keeps it from making one product of this, for which it has no bfloat16 kernel.
    of_weight = jax.lax.optimization_barrier(_dot(gradient, x, (rows, rows)))
    return of_x, jnp.moveaxis(of_weight, range(outputs), range(inputs, weight.ndim))


_project.defvjp(_project_forward, _project_backward)


@jax.custom_vjp
def _gated(gate_up: Float[Array, "... 2 F"]) -> Float[Array, "... F"]:
    """silu(gate) × up. Its own gradient writes both halves at once, where JAX's pads each and adds."""
    return nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]


def _gated_backward(gate_up: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
    share = nn.sigmoid(gate)
    of_gate = gradient * up * share * (1 + gate * (1 - share))
    return (jnp.stack([of_gate, gradient * gate * share], axis=-2),)


_gated.defvjp(lambda gate_up: (_gated(gate_up), gate_up), _gated_backward)


def _remat(policy: str) -> type[nn.Module]:
    if policy == "none":
        return Block
    saved = jax.checkpoint_policies.save_only_these_names(_PROJECTION) if policy == "dots" else None
    return nn.remat(Block, policy=saved, prevent_cse=False)  # under a scan CSE cannot undo it


def _embed(
    embedding: Float[Array, "V D"], tokens: Int[Array, "N G T"], config: ModelConfig
) -> Float[Array, "N G T D"]:
    table = constrain(embedding, "vocab", None)  # gathered over fsdp, as the other weights are when used
    return constrain(table[tokens].astype(config.dtype).astype(jnp.float32), "batch", None, None, None)


def _rms_norm(x: Float[Array, "..."], weight: Float[Array, " D"], epsilon: float) -> Float[Array, "..."]:
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)


def _causal(tokens: Int[Array, "N G T"], segments: Int[Array, "N G T"] | None) -> Bool[Array, "#N #G T T"]:
    """Which positions of its row a position sees: itself and those before, of its own segment."""
    at = jnp.arange(tokens.shape[2])
    causal = (at[None, :] <= at[:, None])[None, None]
    return causal if segments is None else causal & (segments[..., None, :] == segments[..., :, None])


@jax.named_scope("attention")
def _attend(
    q: Float[Array, "N G T K R A"],
    own: KeyValues,
    visible: Bool[Array, "#N #G T S"],
    context: KeyValues | None,
    context_length: Int[Array, " N"] | None,
) -> Float[Array, "N G T K R A"]:
    """Softmax attention in float32 over the prompt's keys and the own ones.

    The two are never copied together: each part gives exp(score - m) with the common maximum m,
    and the weighted values are added before the one division. The prompt's keys have no
    G axis: one product reads them for all G samples.
    """
    N, G, T, K, R, A = q.shape
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(N, G, K, T * R, A)
    visible = jnp.repeat(visible[:, :, None], R, axis=3)
    scores = jnp.where(visible, _product(q, own.k), _MASKED)
    if context is None or context_length is None:
        peak = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - peak)
        total, values = weights.sum(axis=-1, keepdims=True), _product(weights.astype(q.dtype), own.v)
    else:
        shared_q = q.transpose(0, 2, 1, 3, 4).reshape(N, K, G * T * R, A)
        known = jnp.arange(context.k.shape[-1])[None, :] < context_length[:, None]
        shared = jnp.where(known[:, None, None], _product(shared_q, context.k), _MASKED)

        def of_samples(x: Float[Array, "N K rows S"]) -> Float[Array, "N G K TR S"]:
            return x.reshape(N, K, G, T * R, -1).transpose(0, 2, 1, 3, 4)

        def of_prompts(x: Float[Array, "N G K TR S"]) -> Float[Array, "N K rows S"]:
            return x.transpose(0, 2, 1, 3, 4).reshape(N, K, G * T * R, -1)

        # The maximum cancels, so its gradient is zero.
        peak = jnp.maximum(scores.max(axis=-1, keepdims=True), of_samples(shared.max(axis=-1, keepdims=True)))
        peak = jax.lax.stop_gradient(peak)
        weights, shared = jnp.exp(scores - peak), jnp.exp(shared - of_prompts(peak))
        total = weights.sum(axis=-1, keepdims=True) + of_samples(shared.sum(axis=-1, keepdims=True))
        values = _product(weights.astype(q.dtype), own.v)
        values += of_samples(_product(shared.astype(q.dtype), context.v))
    values = values / total
    return values.reshape(N, G, K, T, R, A).transpose(0, 1, 3, 2, 4, 5)


def _product(a: Float[Array, "*batch i j"], b: Float[Array, "*batch j k"]) -> Float[Array, "*batch i k"]:
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)
