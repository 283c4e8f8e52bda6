"""Tests packed rows: each example occurs once, complete and independent of the others in its row. Tests resuming."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import gpu, small_trainer

import flax_models.data.packing as packing
import flax_models.model.attention as attention
import flax_models.model.attention_choice as attention_choice
from flax_models.data.batches import IGNORED, Batch, padded
from flax_models.data.examples import Example
from flax_models.data.packing import PackedSampler, describe_examples, pack_rows
from flax_models.errors import RunError
from flax_models.model.attention import AttentionContext, make_sequences
from flax_models.model.attention_choice import explain_attention
from flax_models.model.decoder import Decoder, ModelConfig, decoder_shapes
from flax_models.train.accounting import mean_keys
from flax_models.train.step import Trainer
from jax_pallas.linear_ce import linear_cross_entropy

SHAPE = ModelConfig(97, 16, 2, 2, 1, 8, 24, 32)


def examples(count: int, longest: int = 16, seed: int = 0) -> list[Example]:
    generator = np.random.default_rng(seed)
    made = []
    for number in range(count):
        tokens = generator.integers(1, 97, generator.integers(3, longest + 2)).astype(np.int32)
        counted = np.arange(len(tokens)) >= len(tokens) // 2
        made.append(Example(f"{number}", tokens, counted))
    return made


def rows_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Yields tokens and targets of each sequence of a batch, including padding."""
    assert batch.lengths is not None
    found = []
    for tokens, targets, lengths in zip(batch.tokens, batch.targets, batch.lengths, strict=True):
        ends = np.cumsum(lengths)
        assert ends[-1] == len(tokens)
        assert not lengths[np.argmin(lengths > 0) :].any() or lengths.all()  # only trailing zeros
        for end, length in zip(ends, lengths, strict=True):
            if length:
                found.append((tokens[end - length : end].tolist(), targets[end - length : end].tolist()))
    return found


def as_row(example: Example) -> tuple[list[int], list[int]]:
    """Returns the expected row of an example. A token's target is the next token if that counts, else IGNORED."""
    following = [
        int(token) if counted else IGNORED
        for token, counted in zip(example.tokens[1:], example.counted[1:], strict=True)
    ]
    return example.tokens[:-1].tolist(), following


@pytest.fixture
def sampler_of():
    made = []

    def make(*arguments, **options) -> PackedSampler:
        made.append(PackedSampler(*arguments, **options))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


@pytest.mark.parametrize("room", [1, 3, packing.ROOM])
def test_pass_has_every_complete_example_once(sampler_of, room, monkeypatch):
    monkeypatch.setattr(packing, "BINS", 6)
    given = examples(60)
    sampler = sampler_of(given, 1, 16, 0, room=room)
    for done in range(2):
        found: list = []
        numbers: list[int] = []
        while True:
            before = sampler.state()
            batch = sampler.next()
            if sampler.passes > done:
                sampler.restore(before)
                break
            assert batch.tokens.shape == (1, 16)
            assert batch.lengths is not None
            assert batch.lengths.shape == (1, sampler.columns)
            several = [row for row in rows_of(batch) if any(row[0])]  # padding tokens are 0
            assert len(several) == len(sampler.starts) <= room
            assert sampler.tokens == sum(len(tokens) for tokens, _ in several)
            found += several
            numbers += sampler.starts.tolist()
        assert sorted(numbers) == list(range(len(given)))
        assert sorted(found) == sorted(as_row(example) for example in given)
        sampler.next()
        sampler.restore({"passes": 1, "rows": sampler_of(given, 1, 16, 0, room=room).state()["rows"]})
    batch = sampler_of(given, 7, 16, 0).next()
    assert batch.tokens.shape == (7, 16)


def test_orders_differ_between_passes_and_seeds(sampler_of):
    given = examples(20)
    one, other = (sampler_of(given, 1, 16, seed) for seed in (0, 1))
    orders = [[tuple(sampler.next().tokens[0]) for _ in range(24)] for sampler in (one, other)]
    assert orders[0] != orders[1]
    assert orders[0][:12] != orders[0][12:]


@pytest.mark.parametrize("drawn", [0, 1, 5, 17])
def test_packed_sampler_resumes_from_its_json_state(sampler_of, drawn, monkeypatch):
    monkeypatch.setattr(packing, "BINS", 5)  # not a multiple of the batch size 2
    given = examples(40)
    sampler, other = sampler_of(given, 2, 16, 5), sampler_of(given, 2, 16, 5)
    for _ in range(drawn):
        sampler.next()
    state = json.loads(json.dumps(sampler.state()))
    other.next()
    other.restore(state)
    for _ in range(20):
        for ours, theirs in zip(sampler.next(), other.next(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(sampler.starts, other.starts)
        assert sampler.passes == other.passes
    assert sampler.state() == other.state()


def test_lengths_like_an_instruction_sets_leave_little_padding(sampler_of):
    """Draws log-normal lengths whose mean is a quarter of the longest."""
    generator, longest = np.random.default_rng(0), 1024
    lengths = np.clip(np.exp(generator.normal(np.log(longest / 4) - 0.32, 0.8, 3000)), 8, longest).astype(int)
    assert 0.22 < lengths.mean() / longest < 0.28
    given = [
        Example(str(i), np.ones(length + 1, np.int32), np.ones(length + 1, bool)) for i, length in enumerate(lengths)
    ]
    room = packing.room_for(lengths, longest)
    assert room <= 10
    sampler = sampler_of(given, 8, longest, 0, room=room)
    tokens = [(sampler.next(), sampler.tokens)[1] for _ in range(len(given) // 40)]
    assert 1 - np.sum(tokens) / (len(tokens) * 8 * longest) < 0.03


@pytest.mark.parametrize(("mean", "room"), [(100, 2), (40, 6), (25, 8), (24, 10), (1, 32)])
def test_a_row_has_room_for_twice_the_mean_number_of_examples(mean, room):
    assert packing.room_for(np.array([mean - 1, mean + 1]), 100) == room


def test_a_row_has_more_room_where_most_examples_are_short():
    lengths = np.where(np.arange(1000) % 10 == 0, 2048, 10)
    assert 2048 / lengths.mean() < 10  # room for twice the mean count would double the rows of short examples
    most = 100 + -(-900 // packing.ROOM)
    assert len(packing.best_fit(lengths, 2048, packing.ROOM)) == most
    assert len(packing.best_fit(lengths, 2048, packing.room_for(lengths, 2048))) <= 1.01 * most + 1
    assert packing.best_fit(np.array([5, 3, 4, 2]), 8, 3).tolist() == [[5, 3, 0], [4, 2, 0]]


def test_held_out_examples_are_packed_in_their_order_once():
    given = examples(30)
    batch = pack_rows(given, 16, most=100)
    assert sorted(row for row in rows_of(batch) if any(row[0])) == sorted(as_row(example) for example in given)
    assert batch.counted == sum(int(example.counted[1:].sum()) for example in given)
    assert len(pack_rows(given, 16, most=3).tokens) == 3
    for ours, theirs in zip(batch, pack_rows(given, 16, most=100), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_padding_rows_are_one_sequence_without_targets():
    batch = pack_rows(examples(10), 16, most=3)
    first, second = padded(batch, 2)
    assert second.lengths is not None
    assert second.lengths[1].tolist() == [16, *[0] * (second.lengths.shape[1] - 1)]
    assert first.counted + second.counted == batch.counted


def test_examples_that_cannot_be_packed_raise():
    with pytest.raises(RunError, match="no example to train on"):
        PackedSampler([], 1, 16, 0)
    with pytest.raises(RunError, match="no held-out example for evaluation"):
        pack_rows([], 16, 5)
    long = Example("a.jsonl:3", np.ones(18, np.int32), np.ones(18, bool))
    for make in (lambda given: PackedSampler(given, 1, 16, 0), lambda given: pack_rows(given, 16, 5)):
        with pytest.raises(
            ValueError, match=re.escape("examples must have 2 to 17 tokens (length + 1), got 18 in a.jsonl:3")
        ):
            make([long])
        with pytest.raises(ValueError, match=r"counted must have 17 entries, as tokens, got 18 in a"):
            make([long._replace(tokens=np.ones(17, np.int32))])


def test_a_batch_is_described_by_its_examples():
    assert describe_examples(examples(9), np.array([3, 5])) == "3, 5"
    assert describe_examples(examples(9), np.arange(9)) == "0, 1, 2, 3, and 5 more"


# The model


FAMILIES = {
    "llama": {},
    "window": {"sliding_window": 3},
    "gemma2": {"attention_softcap": 20.0, "sliding_window": 3, "window_pattern": (True, False), "post_norms": True},
    "remat": {"remat": "attention", "query_key_norm": True},
}
LENGTHS = np.array([[5, 7, 1, 3, 0], [16, 0, 0, 0, 0], [2, 2, 2, 2, 8]], np.int32)


@nnx.jit
def losses_of(model: Decoder, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array:
    targets = jnp.roll(tokens, -1, axis=1)
    return linear_cross_entropy(model(tokens, lengths), model.head_weight(), targets, reduction="none")


EVERYDAY = ("llama", "gemma2")


@pytest.mark.parametrize(
    "changes",
    [pytest.param(*one, marks=() if name in EVERYDAY else pytest.mark.slow) for name, *one in FAMILIES.items()],
    ids=FAMILIES,
)
def test_examples_do_not_see_each_other(changes):
    """Replacing an example does not change any bit of the other losses, which match the losses of separate rows."""
    model = Decoder(dataclasses.replace(SHAPE, **changes), rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(1).integers(0, 97, (3, 16), np.int32)  # NumPy compiles no program for its changes
    before = np.asarray(losses_of(model, jnp.asarray(tokens), jnp.asarray(LENGTHS)))
    ends = np.cumsum(LENGTHS, axis=1)
    for row, number in ((0, 0), (0, 1), (0, 3), (2, 2), (2, 4)):
        own = slice(ends[row, number] - LENGTHS[row, number], ends[row, number])
        other = tokens.copy()
        other[row, own] = (tokens[row, own] + 31) % 97
        after = np.asarray(losses_of(model, jnp.asarray(other), jnp.asarray(LENGTHS)))
        moved = before != after
        inside = np.zeros_like(moved)
        inside[row, own] = True
        inside[row, own.start - 1] = True  # the first changed token is the target of this position; targets are rotated
        assert moved[row, own].any()
        assert not (moved & ~inside).any()
    for row, lengths in enumerate(LENGTHS):
        for end, length in zip(ends[row], lengths, strict=True):
            if length > 1:  # padding after it changes nothing, so all use the same length
                moved_to_start = np.roll(tokens[row : row + 1], length - end, axis=1)
                alone = np.asarray(losses_of(model, jnp.asarray(moved_to_start), None))
                together = before[row, end - length : end - 1]
                np.testing.assert_allclose(alone[0, : length - 1], together, rtol=2e-6, atol=2e-6)


def test_cudnn_gets_the_positions_of_sequences(monkeypatch):
    """Replaces cuDNN's kernels by their documentation: lengths and starts per row, and -1 if unused."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    calls = []

    def attend(query, key, value, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
        assert (q_seqlen is kv_seqlen, q_offsets is kv_offsets) == (True, True)
        assert (q_seqlen.dtype, q_offsets.dtype) == (jnp.int32, jnp.int32)
        assert mask_type is cudnn.MaskType.PADDING_CAUSAL
        calls.append((q_seqlen.tolist(), q_offsets.tolist()))
        query, key, value = (np.repeat(array, 2 // array.shape[2], axis=2) for array in (query, key, value))
        result = np.full(query.shape, np.nan, query.dtype)
        for row, (lengths, starts) in enumerate(zip(*calls[-1], strict=True)):
            for length, start in zip(lengths, starts[:-1], strict=True):
                if length >= 0:
                    own = slice(start, start + length)
                    scores = np.exp(scale * np.einsum("thd,shd->hts", query[row, own], key[row, own]))
                    scores *= np.tri(length)
                    weights = scores / scores.sum(axis=-1, keepdims=True)
                    result[row, own] = np.einsum("hts,shd->thd", weights, value[row, own])
        return result

    monkeypatch.setattr(cudnn, "dot_product_attention", attend)
    keys = jax.random.split(jax.random.key(1), 3)
    query, key, value = (jax.random.normal(one, (3, 16, heads, 8)) for one, heads in zip(keys, (2, 1, 1), strict=True))
    sequences, nothing = make_sequences(jnp.asarray(LENGTHS), 16), jnp.zeros(0)
    found = attention._attend_packed(SHAPE, query, key, value, sequences)
    assert calls[0][0][0] == [5, 7, 1, 3, -1]
    assert calls[0][1][:2] == [[0, 5, 12, 13, -1, -1], [0, -1, -1, -1, -1, -1]]
    context = AttentionContext(jnp.arange(16), nothing, nothing, sequences)
    expected = attention._attend_seen(SHAPE, query, key, value, context, None)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("requested", [None, "cudnn", "xla"])
def test_packed_rows_use_the_reported_implementation(requested, monkeypatch):
    ran = []

    def attend(config, query, *rest):
        ran.append("cudnn")
        return query

    monkeypatch.setattr(attention_choice, "_default_device", gpu)
    monkeypatch.setattr(attention, "_attend_packed", attend)
    config = dataclasses.replace(SHAPE, dtype="bfloat16", attention_implementation=requested)
    graph, params = nnx.split(decoder_shapes(config))
    places, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 16), (3, 5)))
    jax.eval_shape(lambda params, *given: nnx.merge(graph, params)(*given), params, places, lengths)
    assert ran == ([] if requested == "xla" else ["cudnn"])


def test_one_sequence_per_row_equals_no_lengths():
    model = Decoder(SHAPE, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 97)
    np.testing.assert_array_equal(model(tokens, jnp.full((2, 1), 16)), model(tokens))
    with pytest.raises(ValueError, match=re.escape("lengths must have shape (2, M) (tokens' rows), got (3, 1)")):
        model(tokens, jnp.full((3, 1), 16))


def test_positions_of_sequences():
    sequences = make_sequences(jnp.asarray(LENGTHS), 16)
    assert sequences.of[0].tolist() == [0] * 5 + [1] * 7 + [2] + [3] * 3
    assert sequences.starts[0].tolist() == [0, 5, 12, 13, 16]


def test_cudnn_needs_hopper_and_no_window_for_packed_rows():
    half = dataclasses.replace(SHAPE, dtype="bfloat16")
    assert explain_attention(half, 16, gpu("9.0"), packed=True).name == "cudnn"
    older = explain_attention(half, 16, gpu("8.9"), packed=True)
    assert older == ("xla", "cudnn needs compute capability 9.0 or later for packed rows, got 8.9")
    window = dataclasses.replace(half, sliding_window=4, attention_implementation="cudnn")
    with pytest.raises(ValueError, match="needs layers without a window for packed rows, got sliding_window 4"):
        explain_attention(window, 16, gpu(), packed=True)


def test_mean_keys_of_sequences_of_different_lengths():
    assert mean_keys(np.array([5, 7, 1, 3])) == (15 + 28 + 1 + 6) / 16
    assert mean_keys(np.array([5, 2]), window=2) == (1 + 2 * 4 + 3) / 7


# Training


def test_packed_rows_give_the_gradients_of_padded_rows(sampler_of):
    """The same examples have the same mean loss over counted tokens and the same gradient, packed or one per row."""
    given = [example._replace(tokens=example.tokens * 2) for example in examples(12)]
    packed, alone = (pack_rows(given, 16, most=100, room=room) for room in (packing.ROOM, 1))
    assert len(packed.tokens) < len(alone.tokens) == len(given)
    found = []
    for batch in (packed, alone):
        trainer = small_trainer()
        loss, gradients = jax.jit(trainer._gradients)(trainer.initial.params, batch)
        found.append((float(loss), jax.tree.leaves(gradients)))
        assert trainer.held_out_loss(trainer.initial.params, batch) == pytest.approx(float(loss), rel=1e-6)
    (loss, ours), (other, theirs) = found
    assert loss == pytest.approx(other, rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_micro_batches_of_packed_rows_match_the_whole_batch():
    batch = pack_rows(examples(12), 16, most=4)
    steps = {}
    for accumulate in (1, 2):
        trainer: Trainer = small_trainer(batch_size=4, accumulate=accumulate)
        compiled = trainer.compile(4, 16, batch.lengths.shape[1] if batch.lengths is not None else None)
        assert compiled is trainer.compile(4, 16)
        steps[accumulate] = trainer.step(jax.tree.map(jnp.copy, trainer.initial), jax.device_put(batch))[1]
    np.testing.assert_allclose(steps[1].loss, steps[2].loss, rtol=1e-6)
    np.testing.assert_allclose(steps[1].grad_norm, steps[2].grad_norm, rtol=1e-5)
