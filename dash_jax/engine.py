"""The rollout engine: decoding cut into segments, between which the host rearranges the rows.

A plain rollout reads its whole cache for every token and works on every row until the longest answer
ends. The engine looks at the samples between two segments, and

- lets the cache grow with the oldest sample instead of reading all of it from the start,
- moves the samples that go on into fewer rows (compaction),
- gives the rows of those that have ended to prompts that wait (refill).

What is sampled stays the same: a token depends on its sample's key and position, and a sample sees
nothing but its prompt and its own part of the cache.

A slot is a prompt with R rows, which attend to the prompt together. A group of G samples begins in one
slot of G rows and may be spread over several narrower ones later. Every device rearranges its own slots
only, so that no cache moves between devices. A row without a sample has the id -1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from dash_jax import sampling
from dash_jax.config import Engine
from dash_jax.model import KeyValues, ModelConfig
from dash_jax.problems import Finish
from dash_jax.sampling import Prompts, Rows, Rule, Samples
from dash_jax.sharding import constrain, row_ways, split_rows
from dash_jax.types import Key

_FEWEST_ROWS = 8  # a device; with fewer a step takes no less time
_WIDTHS = 4  # of the growing cache; each compiles
SLOTS_OF_A_GROUP = 4  # once its samples are rearranged


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What stays the same throughout a rollout; see `sampling.sample`."""

    params: dict[str, Any]
    config: ModelConfig
    eos_ids: Int[Array, " E"]
    temperature: Float[Array, ""]
    rule: Rule
    limit: int
    mesh: Mesh

    @property
    def _static(self) -> dict[str, Any]:
        return {"config": self.config, "rule": self.rule, "limit": self.limit}

    def begin(self, prompts: Any, lengths: Any, keys: Key) -> tuple[Prompts, Rows, Float[Array, "n G"]]:
        placed = jax.device_put((prompts, lengths), split_rows(self.mesh, (prompts, lengths), axis=0))
        return _begin(self.params, *placed, keys, self.eos_ids, self.temperature, **self._static)

    def decode(self, batch: Batch, steps: int) -> tuple[sampling.Decoded, Batch]:
        """Waits for nothing; so `slot` stays, and the caller moves it on by `taken`."""
        decoded, rows, past = _decode(
            self.params, batch.prompts, batch.rows, batch.past, jnp.int32(batch.slot),
            self.eos_ids, self.temperature, steps=steps, **self._static,
        )  # fmt: skip
        return decoded, batch._replace(rows=rows, past=past)


class Batch(NamedTuple):
    """What is on the devices. All rows write their next keys and values into `slot` of `past`."""

    prompts: Prompts
    rows: Rows
    past: list[KeyValues]
    slot: int


class Ended(NamedTuple):
    """Completions that have ended, in no order; `ids` are n * G + g."""

    ids: Int[np.ndarray, " E"]
    tokens: Int[np.ndarray, "E C"]
    lengths: Int[np.ndarray, " E"]
    finish: Int[np.ndarray, " E"]


def generate(
    sampler: Sampler,
    prompts: Int[np.ndarray, "N P"],
    prompt_lengths: Int[np.ndarray, " N"],
    keys: Key,
    *,
    engine: Engine,
    capacity: int,
    on_ended: Callable[[Ended], None] = lambda ended: None,
) -> Samples:
    """Samples G completions of each prompt. NumPy arrays, equal to what `sampling.sample` gives.

    Args:
      keys: [N, G].
      capacity: prompts, with all their samples, that fit on one device.
      on_ended: given every completion once, soon after it has ended: while the device is busy with the
        next segment, so that what it does costs nothing if it is quick.
    """
    N, G = keys.shape
    if G > 1 and not engine.share_prefix:
        alone = generate(
            sampler, np.repeat(prompts, G, axis=0), np.repeat(prompt_lengths, G), keys.reshape(N * G, 1),
            engine=engine, capacity=capacity * G, on_ended=on_ended,
        )  # fmt: skip
        return Samples(*(field.reshape(N, G, *field.shape[2:]) for field in alone))

    ways = row_ways(sampler.mesh)
    chunks = math.ceil(N / (capacity * ways))
    refill = engine.refill and chunks > 1
    room = capacity if refill else math.ceil(N / chunks / ways)  # equal chunks waste the fewest rows
    shapes = _shapes(room, G, refill=refill)[: None if engine.compact else 1]
    segment = min(engine.segment_tokens or sampler.limit, max(sampler.limit - 1, 1))
    whole = sampler.limit + (segment if refill else 0)  # a young row may go on where an old one ended
    quantum = max(segment, math.ceil(sampler.limit / _WIDTHS)) if engine.grow_cache else whole

    book = _Book(N, G, sampler)
    batch: Batch | None = None
    ids = np.full((ways, 0, 1), -1)
    waiting = np.arange(N)
    with jax.set_mesh(sampler.mesh):
        while len(waiting) or (ids >= 0).any():
            new, new_ids = None, np.full((ways, 0, G), -1)  # prompts that begin now
            count = _admitted(ids, G, shapes[0], len(waiting), room, refill=refill)
            if count:
                chosen, waiting = waiting[: count * ways], waiting[count * ways :]
                chosen = np.pad(chosen, (0, count * ways - len(chosen)), constant_values=-1)
                lengths = np.where(chosen < 0, 0, prompt_lengths[chosen]).astype(np.int32)
                beginning, rows, logprobs = sampler.begin(prompts[chosen], lengths, keys[chosen])
                new = beginning, rows
                new_ids = np.where(chosen[:, None] < 0, -1, chosen[:, None] * G + np.arange(G))
                book.begin(new_ids, rows, logprobs)
                new_ids = book.alive(new_ids).reshape(ways, count, G)

            alive = np.concatenate([ids[ids >= 0], new_ids[new_ids >= 0]])
            if len(alive):
                moved, sources = _arrange(ids, new_ids, G, shapes[:1] if len(waiting) else shapes)
                oldest, youngest = book.lengths[alive].max(), book.lengths[alive].min()
                ahead = min(segment, sampler.limit - youngest)
                changed = new is not None or moved.shape != ids.shape
                if batch is None or changed or batch.slot + ahead > _width(batch.past):
                    slot = int(oldest) - 1
                    batch = _rearranged(
                        batch, new, ids.shape, sources, moved >= 0, slot, sampler,
                        width=math.ceil((slot + ahead) / quantum) * quantum,
                    )  # fmt: skip
                    ids = moved
                decoded, batch = sampler.decode(batch, segment)
                book.hand_over(on_ended)  # what ended before this segment
                book.add(ids, decoded, batch.rows)
                batch = batch._replace(slot=batch.slot + int(decoded.taken))
            ids = book.alive(ids)
    book.hand_over(on_ended)
    return book.samples()


class _Book:
    """The host's record of all samples: id n * G + g is sample g of prompt n."""

    def __init__(self, prompts: int, group_size: int, sampler: Sampler):
        samples = prompts * group_size
        self._shape, self._eos_ids = (prompts, group_size), np.asarray(sampler.eos_ids)
        self._tokens = np.zeros((samples, sampler.limit), np.int32)
        self._logprobs = np.zeros((samples, sampler.limit), np.float32)
        self.lengths, self.done = np.zeros(samples, np.int32), np.zeros(samples, bool)
        self._handed_over = np.zeros(samples, bool)

    def begin(self, ids: Int[np.ndarray, "n G"], rows: Rows, logprobs: Float[Array, "n G"]) -> None:
        decoded = sampling.Decoded(rows.token[:, :, None], logprobs[:, :, None], jnp.int32(1))
        self.add(ids, decoded, rows)

    def add(self, ids: Int[np.ndarray, "*W X R"], decoded: sampling.Decoded, rows: Rows) -> None:
        """Takes over what the rows of `ids` have gained."""
        here = (ids >= 0).reshape(rows.lengths.shape)
        samples = ids[ids >= 0]
        lengths = np.asarray(rows.lengths)[here]
        places = self.lengths[samples][:, None] + np.arange(decoded.tokens.shape[2])
        row, column = np.nonzero(places < lengths[:, None])
        at = samples[row], places[row, column]
        self._tokens[at] = np.asarray(decoded.tokens)[here][row, column]
        self._logprobs[at] = np.asarray(decoded.logprobs)[here][row, column]
        self.lengths[samples], self.done[samples] = lengths, np.asarray(rows.done)[here]

    def alive(self, ids: np.ndarray) -> np.ndarray:
        """`ids` with -1 for the samples that have ended."""
        return np.where((ids >= 0) & ~self.done[ids], ids, -1)

    def hand_over(self, on_ended: Callable[[Ended], None]) -> None:
        ids = np.flatnonzero(self.done & ~self._handed_over)
        self._handed_over[ids] = True
        if len(ids):
            on_ended(Ended(ids, self._tokens[ids], self.lengths[ids], self._finish(ids)))

    def _finish(self, ids: Int[np.ndarray, " E"]) -> Int[np.ndarray, " E"]:
        last = self._tokens[ids, self.lengths[ids] - 1]
        return np.where(np.isin(last, self._eos_ids), np.int32(Finish.EOS), np.int32(Finish.LENGTH))

    def samples(self) -> Samples:
        finish = self._finish(np.arange(len(self.lengths)))
        fields = (self._tokens, self._logprobs, self.lengths, finish)
        return Samples(*(field.reshape(*self._shape, *field.shape[1:]) for field in fields))  # type: ignore[arg-type]


def _shapes(room: int, group_size: int, *, refill: bool) -> list[tuple[int, int]]:
    """(slots, rows of each) on a device, from the largest batch to the smallest, rows halved each time.

    The samples that are left of a group seldom fill a wide slot, so where rows are to be saved slots are
    narrow, and where that is not enough a sample has one to itself.
    """
    narrow = max(group_size // SLOTS_OF_A_GROUP, 1)
    shapes = [(room * math.ceil(group_size / narrow), narrow) if refill else (room, group_size)]
    rows = shapes[0][0] * shapes[0][1]
    while rows > _FEWEST_ROWS:
        rows = math.ceil(rows / 2)
        shapes += [(math.ceil(rows / wide), wide) for wide in (1, narrow)][: 1 if narrow == 1 else 2]
    return shapes


def _admitted(
    ids: Int[np.ndarray, "W X R"],
    group_size: int,
    shape: tuple[int, int],
    waiting: int,
    room: int,
    *,
    refill: bool,
) -> int:
    """Prompts to begin now on each device: few different numbers, as each compiles, none for a few rows."""
    idle = bool((ids < 0).all())
    if not waiting or not (refill or idle):
        return 0
    if idle:
        return room
    slots, rows = shape
    free = min(slots - _slots_needed(of_device, group_size, rows) for of_device in ids)
    fitting = free // math.ceil(group_size / rows)
    if fitting < max(room // 8, 1):
        return 0
    wanted = math.ceil(waiting / len(ids))
    return int(min(2 ** math.floor(math.log2(fitting)), 2 ** math.ceil(math.log2(wanted))))


def _slots_needed(ids: Int[np.ndarray, "*rows"], group_size: int, rows: int) -> int:
    _, counts = np.unique(ids[ids >= 0] // group_size, return_counts=True)
    return int((-(-counts // rows)).sum())


def _arrange(
    ids: Int[np.ndarray, "W X R"],
    new_ids: Int[np.ndarray, "W n G"],
    group_size: int,
    shapes: list[tuple[int, int]],
) -> tuple[Int[np.ndarray, "W Y Q"], Int[np.ndarray, "W Y Q"]]:
    """The last of `shapes` that holds all samples: who is in which row, and where each comes from.

    Sources count the rows of a device, those of its new prompts behind those of the batch.
    """
    ways = len(ids)
    present = np.concatenate([ids.reshape(ways, -1), new_ids.reshape(ways, -1)], axis=1)
    slots, rows = next(
        shape for shape in reversed(shapes)
        if max(_slots_needed(of_device, group_size, shape[1]) for of_device in present) <= shape[0]
    )  # fmt: skip
    sources = np.full((ways, slots, rows), -1)
    for device, of_device in enumerate(present):
        slot = 0
        groups = np.where(of_device < 0, -1, of_device // group_size)
        for group in np.unique(groups[groups >= 0]):
            members = np.flatnonzero(groups == group)
            for start in range(0, len(members), rows):
                part = members[start : start + rows]
                sources[device, slot, : len(part)] = part
                slot += 1
    taken = np.take_along_axis(present, np.maximum(sources, 0).reshape(ways, -1), axis=1)
    return np.where(sources < 0, -1, taken.reshape(sources.shape)), np.maximum(sources, 0)


def _width(past: list[KeyValues]) -> int:
    return past[0].k.shape[-1]


def _rearranged(
    batch: Batch | None,
    new: tuple[Prompts, Rows] | None,
    old_shape: tuple[int, ...],
    sources: Int[np.ndarray, "W Y Q"],
    present: Bool[np.ndarray, "W Y Q"],
    slot: int,
    sampler: Sampler,
    *,
    width: int,
) -> Batch:
    """The batch with its rows, and those of the new prompts, where `sources` says, and a cache of `width`."""
    _, slots, rows = old_shape
    old_rows, first = slots * rows, sources[:, :, 0]
    parts = ([(batch.prompts, batch.rows)] if batch else []) + ([new] if new else [])
    group_size = parts[-1][1].token.shape[1]
    prompt_sources = np.where(first < old_rows, first // rows, slots + (first - old_rows) // group_size)
    prompts, rows_now, past = _move(
        parts, batch.past if batch else None, sources, prompt_sources, present,
        jnp.int32(batch.slot - slot) if batch and batch.slot != slot else None,
        config=sampler.config, width=width,
    )  # fmt: skip
    return Batch(prompts, rows_now, past, slot)


@functools.partial(jax.jit, static_argnames=("config", "width"))
def _move(
    parts: list[tuple[Prompts, Rows]],
    past: list[KeyValues] | None,
    sources: Int[Array, "W Y Q"],
    prompt_sources: Int[Array, "W Y"],
    present: Bool[Array, "W Y Q"],
    shift: Int[Array, ""] | None,
    *,
    config: ModelConfig,
    width: int,
) -> tuple[Prompts, Rows, list[KeyValues]]:
    """Gathers rows and the prompts of slots; the cache moves `shift` slots down, its oldest key to slot 0."""
    ways, slots, rows = sources.shape

    def take(leaves: tuple[jax.Array, ...], index: jax.Array, axes: int) -> jax.Array:
        """Rows (axes 2) or slots (axes 1) of each device, out of all parts one behind the other."""
        flat = jnp.concatenate([leaf.reshape(ways, -1, *leaf.shape[axes:]) for leaf in leaves], axis=1)
        taken = jax.vmap(lambda of_device, at: of_device[at])(flat, index)
        taken = taken.reshape(ways * slots, *taken.shape[2:])
        if jnp.issubdtype(taken.dtype, jax.dtypes.prng_key):
            return taken  # their hidden axis would not fit the partition
        return constrain(taken, "batch", *[None] * (taken.ndim - 1))

    def row(*leaves: jax.Array) -> jax.Array:
        return take(leaves, sources, 2)

    prompts = jax.tree.map(lambda *leaves: take(leaves, prompt_sources, 1), *(part[0] for part in parts))
    moved = Rows(*map(row, *(part[1] for part in parts)))
    here = present.reshape(ways * slots, rows)
    moved = moved._replace(lengths=jnp.where(here, moved.lengths, 0), done=moved.done | ~here)
    if past is None:
        return prompts, moved, sampling.empty_past(config, ways * slots, rows, width)

    old_rows = past[0].k.shape[0] * past[0].k.shape[1] // ways
    kept = jnp.minimum(sources, old_rows - 1)  # new samples have no cache yet: anything will do

    def move(leaf: jax.Array, axis: int) -> jax.Array:
        leaf = take((leaf,), kept, 2)
        pad = [(0, 0)] * leaf.ndim
        pad[axis] = (0, max(width - leaf.shape[axis], 0) if shift is None else width)
        start = 0 if shift is None else shift
        return jax.lax.dynamic_slice_in_dim(jnp.pad(leaf, pad), start, width, axis=axis)

    return prompts, moved, [KeyValues(move(layer.k, 4), move(layer.v, 3)) for layer in past]


_begin = jax.jit(sampling.begin, static_argnames=("config", "rule", "limit"))
_decode = jax.jit(
    sampling.decode, static_argnames=("config", "rule", "limit", "steps"), donate_argnames=("rows", "past")
)
