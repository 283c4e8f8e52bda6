"""The public functions: fused linear + cross-entropy for JAX, without the N x V logits in memory.

A public function checks its arguments and flattens their leading axes (`prepare`), runs one of the operators of
`ops.py` (`_loss`), and reshapes the results. `prepare` folds ignore_index, token weights, the reduction and its
denominator into one weight for each row (`row_math.row_weights`). This table shows which operator a call runs:

    scalar reduction     `loss_and_gradients`   plan A, 3 matmuls; undifferentiated plan B, 1 matmul
    reduction="none"     `row_losses`           plan C, 4 matmuls, 2 with a frozen head; undifferentiated plan B
    log-probabilities    `log_probs`            plan C
    token loss           `token_loss_and_gradients`, or `token_losses` for "none", of `token_ops.py`: the plans of the
                         first two lines
    saved_budget         `row_losses` and `log_probs` of `saved_ops.py`: 3 matmuls where all rows are saved, else plan C

A token loss of the entropies takes 4 matmuls in the kernels, and 3 with a frozen head and reduction "none". A scalar
reduction with grad_into also computes the gradient of the head where it is not differentiated: 2 matmuls. In the other
calls with grad_into the backward pass adds to it.

The files of a call, in order: this one, `arguments.py`, `ops.py` (`token_ops.py` for a token loss; with a saved_budget
`saved_ops.py` before it), `plan.py`, then `scaled_exp.py` (with `float16.py` for float16; or `chunked.py` with
`recompute.py`, or with `stored_logits.py` for float32 on a GPU), then the file of a kernel with its launcher:
`hopper_logits.py`, `hopper_gradients.py`, `kernels.py`, `row_kernels.py`, `saved_kernels.py`, `target_grad.py` or
`float32_matmuls.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.typing import ArrayLike, DTypeLike

from jax_pallas import elementwise, ops, row_math, saved_ops, token_ops
from jax_pallas.arguments import Call, check_are_arrays, check_per_token, prepare
from jax_pallas.devices import check_shards, devices_of, divides_explicit_axes
from jax_pallas.explanation import Explanation, explained
from jax_pallas.options import TokenOptions
from jax_pallas.primitives import usual_promotion
from jax_pallas.row_math import TokenStats
from jax_pallas.token_hook import takes_entropy
from linear_ce.spec import HeadPrecision, LossSpec, Reduction, check_ignore_index, check_integer_dtype, check_vocab_size
from linear_ce.statistics import (
    BY_ROW,
    D_ENTROPY,
    ENTROPY,
    LSE,
    MAX,
    NO_STATS,
    TOKEN_STATS,
    check_stats,
    statistics_for,
)


class LossStats(NamedTuple):
    """What `linear_cross_entropy_with_stats` returns besides the loss. None of it has a gradient.

    Rows that do not contribute (ignored, or with token_weight 0) have lse and target_logit 0. With token_axis_names,
    accuracy, n_valid and the z_loss of a scalar reduction are those of all devices.
    """

    lse: Array  # (...,) float32, log-sum-exp of the logits
    target_logit: Array  # (...,) float32, NaN for a target that is not a class
    z_loss: Array  # the z-loss's part of the loss: () float32, (...,) for reduction "none"
    accuracy: Array  # () float32, fraction of contributing tokens whose target has the largest logit; ties count
    n_valid: Array  # () int32, targets that are not ignore_index


class LogProbs(NamedTuple):
    """Per-token results of `linear_log_probs`, each (...,) float32 and differentiable."""

    log_prob: Array
    entropy: Array
    lse: Array


for result in (LossStats, LogProbs, TokenStats):  # so that programs that return them can be serialized
    export.register_namedtuple_serialization(result, serialized_name=f"jax_pallas.{result.__name__}")


@divides_explicit_axes
def linear_cross_entropy(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array | None = None,
    weight: Array | None = None,
    token_weight: Array | None = None,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    vocab_axis: int = 0,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    token_axis_names: str | Sequence[str] | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
    gather: Literal["tokens", "head"] | None = None,
    reduce_dtype: DTypeLike = jnp.float32,
    replicated: bool = False,
) -> Array:
    r"""Cross-entropy of a linear layer's logits, computed without storing the logits.

    .. math::
        \ell_i = \mathrm{lse}_i - z_{i,y_i}, \qquad z = \mathrm{cap}(\mathrm{logit\_scale} \cdot (x W^\top + b)), \qquad
        \mathrm{cap}(t) = \mathrm{softcap} \cdot \tanh(t / \mathrm{softcap})

    Options that `torch.nn.functional.cross_entropy` also has mean exactly the same here. There is one deviation: if no
    token is counted (no valid target, an empty batch, a zero denominator), the loss is 0 with zero gradients, not NaN.

    - Several devices: call `jax_pallas.sharded.linear_cross_entropy`, or call the function within `jax.shard_map`, on
      the tokens of each device. If the mesh has explicit axes, the function reads from the types of its arrays how they
      are divided and does the former. The compiler cannot divide the loops and kernels among devices. So any other
      program for several devices raises an error when it is compiled, unless `replicated` is True or "chunked" runs in
      one chunk.
    - `jax.lax.scan` over micro-batches: differentiate within its body, or under `jax.checkpoint`. Otherwise the head's
      gradient of each micro-batch is saved.
    - `jax.export`: kernels need `DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")`, which includes that of
      float32 matmuls. A symbolic number of tokens runs "chunked" without kernels, in chunks of at most 1024 rows. Then
      memory_budget does not include 64 bytes for each token.
    - float32 inputs on Hopper: a kernel computes the matmuls on tensor cores, with the precision of float32
      (`float32_matmuls.py`), where `explain` says so. XLA computes them if `jax.default_matmul_precision` is set.

    Args:
        input: (..., D) float16, bfloat16 or float32 hidden states.
        linear_weight: (V, D) head, or (D, V) with vocab_axis 1; input's dtype or float32. Unless head_precision is
            "float32", a float32 head under a 16-bit input is rounded to input's dtype one vocabulary chunk at a time,
            and the kernels compute the logits twice; pass a copy in input's dtype to avoid that. The gradient of a
            float32 head is float32.
        target: (...,) class indices, any integer dtype. If a target is neither a class nor `ignore_index`, the loss
            and the gradients are NaN; `check_targets` finds such targets.
        linear_bias: (V,) input's dtype or float32.
        weight: (V,) class weights. With "mean" the denominator is their sum over the counted targets.
        token_weight: (...,) factor on each token's loss. It is not part of the denominator and is not differentiated.
        reduction: "mean", "sum" or "none".
        normalizer: () denominator of "mean" in place of the number of counted tokens, for example the number in a
            global batch or in all micro-batches. It is not differentiated. A negative or non-finite number is an
            error; such a value in an array is not read back, and makes the loss NaN.
        ignore_index: target of tokens that do not contribute. Their input may hold any values.
        label_smoothing: in [0, 1].
        z_loss_weight: adds `z_loss_weight * lse**2` to each token's loss. Class weights do not apply to it.
        softcap: bound on the absolute value of the logits, or None.
        logit_scale: factor on the raw logits.
        vocab_size: number of classes. The rows of linear_weight past it are padding: they have no probability and a
            zero gradient.
        vocab_axis: which axis of linear_weight is the vocabulary. 1 is the kernel layout of Flax. The head is never
            transposed in memory.
        memory_budget: bytes of workspace besides inputs and gradients; None is 512 MiB.
        saved_budget: bytes that reduction "none" may keep from the forward pass to the backward pass, besides input and
            results: about `2 * (V + D)` for a row with a 16-bit input. If they hold all rows, the gradients take three
            matmuls in place of four. If they hold a part of at least 512 rows, the other rows take four. It must be 0
            with grad_into and with head_precision "float32". "chunked" saves rows of any other call. The kernels save
            rows of a 16-bit input and a linear_weight of its dtype without label smoothing: "mosaic" if D is a multiple
            of 64, "pallas_triton" if V is a multiple of 64 without padding. If devices divide the vocabulary, the rows
            of a shard must be a multiple of 64. If they divide the tokens, "mosaic" needs a multiple of 8 for
            vocab_axis 0. Other calls raise an error that names the reason. Under `jax.vmap` the budget is that of one
            element of the batch. The implementation is chosen where the call is traced: a program that is lowered for a
            platform with another one raises an error, unless it is named.
        implementation: "mosaic" (NVIDIA Hopper, 16 bits), "pallas_triton" (NVIDIA GPUs of compute capability 8.0 and
            later; on a CPU in Pallas' interpreter) or "chunked" (any device, with XLA's operators, but for float32
            matmuls on Hopper); None for the best on each platform that the call is lowered for (`explain` returns
            which). A named implementation never falls back to another.
        grad_into: linear_weight's shape, float32. The gradient of linear_weight is added to it, in float32, and
            linear_weight gets no gradient from the call. So gradients of several micro-batches and of a tied embedding
            take no second array of that size and round once. Carry it through `jax.lax.scan` and donate it to `jax.jit`
            (donate_argnums): it is then added to in place.

            With reduction "mean" or "sum" the call returns the pair (loss, grad_into + the gradient of the loss by
            linear_weight). Differentiate the loss with has_aux=True, as in the example. The returned sum is a value
            without a gradient: it is that of the returned loss, whatever is computed from it afterwards. So do not
            scale the loss outside, but by normalizer or token_weight. Kernels other than those for Hopper, and those
            too if V is no multiple of 8 and vocab_axis is 0, compute the logits twice for it.

            With reduction "none" the call returns the losses, and the gradient of grad_into is grad_into + the gradient
            of linear_weight, for any upstream gradient: `jax.grad(f, argnums=...)` with respect to grad_into returns
            the new sum in place of a gradient, as for the collection `_overwrite_with_gradient` of Flax. Differentiate
            with respect to grad_into wherever you differentiate with respect to input, linear_weight or linear_bias.
            One array belongs to one call in each differentiated function, whose result must depend on the losses: JAX
            adds up the gradients of all uses of an array, so two calls would count it twice, and no use gives zeros. A
            call that is not differentiated adds nothing.
        head_precision: None or "input" rounds a float32 linear_weight to input's dtype. "float32", for a bfloat16
            input, splits it into the sum of two bfloat16 matrices, which hold 16 bits of each weight. The logits and
            d_input take two matmuls each, so a call takes five instead of three, or seven if the logits are computed
            twice (reduction "none", log-probabilities, token losses of the entropy, and sizes for which the kernels
            store no exponentials: `explain` names the matmuls). The relative error of a weight is at most `2**-17`, in
            place of `2**-8`. d_weight is float32 in both cases.
        batch_invariant: whether the loss, lse and d_input of a token must be bit-for-bit independent of the other
            tokens of the call (their number, order, values and range of logits) and of memory_budget. The order of sums
            is then fixed, which takes longer if d_input has few tiles (`explain` shows this). With "mean" it holds for
            the same denominator: pass a normalizer. d_weight is a sum over tokens. It needs the kernels, a bfloat16
            input and linear_weight, label_smoothing 0 and saved_budget 0; no gradient of the entropy (a gradient of
            entropy or lse of `linear_log_probs`, or a token loss that takes the entropy); for the gradient of input
            "mosaic". "mosaic" needs a hidden size that is a multiple of 64, and "pallas_triton" V a multiple of 64
            without padding. Results of another GPU, of another version or of another engine's head may differ in their
            last bits.
        token_axis_names: mesh axes of a `jax.shard_map` around the call, over which the devices have different tokens.
            "mean" divides by the number of counted tokens (or the sum of their class weights) of all these devices, and
            normalizer is the denominator of all. "mean" and "sum" return the loss of the tokens of all devices, the
            same on each. The gradients of linear_weight and linear_bias are summed over the devices in float32, and
            then rounded; so do not sum them again. That takes a float32 array of linear_weight's shape besides
            memory_budget, to which the kernels add as to grad_into. Results for tokens stay on their device, and so
            does what is added to grad_into: sum it after the last micro-batch. Without this argument each device
            computes the loss of its tokens, and JAX sums the gradients of shared arrays in their dtype.
        vocab_axis_name: mesh axis of a `jax.shard_map` around the call, over which the vocabulary is divided. (Not
            vocab_axis, which says which axis of the array linear_weight is the vocabulary.) Each device of the mesh
            axis passes its shard of linear_weight, and of linear_bias and grad_into, in the order of the axis and with
            as many rows as the others. V is then the number of rows of all shards, vocab_size the number of classes of
            all, and weight has V numbers. All other arrays are the same on the devices of the axis, and so are the
            results and the gradient of input, bit for bit. The gradients of linear_weight and linear_bias are those of
            the shard. The kernels run 16 bits, float16 without label smoothing, in the three matmuls of one GPU divided
            by the devices; all else, and gradients of the entropy, run "chunked", in four. saved_budget is bytes of
            each device, which keeps the exponentials of its classes and the whole gradient of input. With
            batch_invariant the devices add d_input in their order. Names of several axes divide it over all of them,
            the first one into the largest parts. An axis of token_axis_names may be among them: its devices have
            different tokens and different classes, as with FSDP, and `gather` says what they do.
        gather: what devices with different tokens and different classes gather. "tokens": each computes the loss of the
            tokens of all for its classes, as without different tokens. "head": each computes the loss of its tokens for
            all classes, and the gradients of the head are reduce-scattered in float32. The axes of these devices must
            then be the last of vocab_axis_name. None: "tokens" where all have fewer tokens than V, otherwise "head".
            Naming one says that the axes of vocab_axis_name over which input varies are also token_axis_names.
        reduce_dtype: float32, or bfloat16 to halve the bytes of the sum of the gradient of input over the devices of
            vocab_axis_name. Each addition then rounds to bfloat16.
        replicated: whether a program for several devices, outside of `jax.shard_map`, may gather the arrays and compute
            the whole loss on every device. Without it such a program is an error.

    Returns:
        float32 loss, () or, for reduction "none", (...,). With grad_into and another reduction the pair (loss, sum).

    Raises:
        TypeError: an argument is not an array or has an unsupported dtype.
        ValueError: a shape or an option is wrong, memory_budget cannot hold the smallest chunk, the call is compiled
            for several devices outside of `jax.shard_map`, or grad_into is not differentiated with reduction "none", or
            shared there by devices of `jax.shard_map` or by heads of `jax.vmap`. The message names the argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_pallas import linear_cross_entropy
        >>> x, w = jnp.ones((6, 16)), jnp.ones((100, 16))
        >>> loss, d_weight = jax.value_and_grad(linear_cross_entropy, argnums=1)(x, w, jnp.arange(6))
        >>> d_weight.shape
        (100, 16)
        >>> def step(total, batch):  # of two micro-batches
        ...     call = lambda x: linear_cross_entropy(x, w, batch[1], normalizer=6, grad_into=total)
        ...     (loss, total), d_x = jax.value_and_grad(call, has_aux=True)(batch[0])
        ...     return total, (loss, d_x)
        >>> total, _ = jax.lax.scan(step, jnp.zeros((100, 16)), (x.reshape(2, 3, 16), jnp.arange(6).reshape(2, 3)))
        >>> bool(jnp.allclose(total, d_weight, atol=1e-6))
        True

    Source:
        Gradients in the forward pass: Hsu et al., "Liger Kernel", 2024, section 3.2. Recomputation by vocabulary
        chunk: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. Equations: linear_ce/MATH.md
        (1)-(18).
    """
    options = reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, weight, token_weight, grad_into, normalizer
    devices = devices_of(replicated, token_axis_names, vocab_axis_name, reduce_dtype, gather)
    how = memory_budget, implementation, batch_invariant, saved_budget, devices
    call = prepare(LossSpec(*options), arrays, vocab_axis, *how, statistics=0)
    loss, *_, total = _loss(call)
    return _with_total(loss.reshape(call.leading) if reduction == "none" else loss, total)


@divides_explicit_axes
def linear_cross_entropy_with_stats(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array | None = None,
    weight: Array | None = None,
    token_weight: Array | None = None,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    vocab_axis: int = 0,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    token_axis_names: str | Sequence[str] | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
    gather: Literal["tokens", "head"] | None = None,
    reduce_dtype: DTypeLike = jnp.float32,
    replicated: bool = False,
) -> tuple[Array, LossStats]:
    """`linear_cross_entropy` that also returns statistics from its pass over the logits.

    Args:
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        The loss and `LossStats`. Only the loss has a gradient. With grad_into and reduction "mean" or "sum",
        ((loss, sum), stats).

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import linear_cross_entropy_with_stats
        >>> loss, stats = linear_cross_entropy_with_stats(jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.arange(6))
        >>> int(stats.n_valid)
        6
    """
    options = reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, weight, token_weight, grad_into, normalizer
    devices = devices_of(replicated, token_axis_names, vocab_axis_name, reduce_dtype, gather)
    how = memory_budget, implementation, batch_invariant, saved_budget, devices
    call = prepare(LossSpec(*options), arrays, vocab_axis, *how, statistics=MAX | LSE)
    loss, lse, target_logit, top, total = _loss(call)
    lse, target_logit, top = map(jax.lax.stop_gradient, (lse, target_logit, top))
    contributes = call.row_weight != 0
    z_loss = call.row_weight * call.options.spec.z_loss_weight * jnp.square(lse)
    right, total_of = row_math.is_top1(call.row_weight, target_logit, top), call.options.devices.sum
    stats = LossStats(
        lse=lse.reshape(call.leading),
        target_logit=target_logit.reshape(call.leading),
        z_loss=z_loss.reshape(call.leading) if reduction == "none" else total_of(z_loss.sum()),
        accuracy=total_of(right.sum()) / jnp.maximum(total_of(contributes.sum()), 1).astype(jnp.float32),
        n_valid=call.n_valid,
    )
    return _with_total(loss.reshape(call.leading) if reduction == "none" else loss, total), stats


@divides_explicit_axes
def linear_log_probs(
    input: Array,
    linear_weight: Array,
    target: Array,
    *,
    linear_bias: Array | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    vocab_axis: int = 0,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    token_axis_names: str | Sequence[str] | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
    gather: Literal["tokens", "head"] | None = None,
    reduce_dtype: DTypeLike = jnp.float32,
    replicated: bool = False,
) -> LogProbs:
    r"""Log-probability of each target, and entropy and log-sum-exp of each row, all differentiable, without storing the
    logits.

    .. math:: \log p_{i,y_i} = z_{i,y_i} - \mathrm{lse}_i, \qquad H_i = -\sum_j p_{ij} \log p_{ij}

    Args:
        grad_into: linear_weight's shape, float32. Its gradient is grad_into + the gradient of linear_weight, as for
            `linear_cross_entropy` with reduction "none".
        saved_budget: bytes that may be kept from the forward pass to the backward pass. They save a matmul if entropy
            and lse get no gradient. Otherwise they are not used, and the call takes one matmul more than with 0. It
            must be 0 with grad_into and with head_precision "float32".
        batch_invariant: as for `linear_cross_entropy`, for log_prob, lse and the gradient of log_prob with respect to
            input. A gradient of entropy or lse is then an error.
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        `LogProbs(log_prob, entropy, lse)`, each (...,) float32; rows of `ignore_index` give 0 and have zero gradients.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import linear_log_probs
        >>> out = linear_log_probs(jnp.ones((2, 6, 16)), jnp.ones((100, 16)), jnp.zeros((2, 6), int))
        >>> out.entropy.shape
        (2, 6)

    Source:
        linear_ce/MATH.md (19)-(22); entropy from running sums: (25)-(27).
    """
    options = "none", ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, None, grad_into, None
    devices = devices_of(replicated, token_axis_names, vocab_axis_name, reduce_dtype, gather)
    how = memory_budget, implementation, batch_invariant, saved_budget, devices
    call = prepare(LossSpec(*options), arrays, vocab_axis, *how, statistics=LSE | ENTROPY | BY_ROW)
    log_probs = (saved_ops if call.options.saved_budget else ops).log_probs
    if call.tokens == 0:
        results, _ = ops.as_results(call.options.devices, call.arrays, (ops.no_rows(call.grad_into),) * 3)
    else:
        results = log_probs(call.options, *call.arrays)
    return LogProbs(*(result.reshape(call.leading) for result in results))


@divides_explicit_axes
def linear_token_loss(
    input: Array,
    linear_weight: Array,
    target: Array,
    token_loss: Callable[..., Array],
    *per_token: Array,
    with_entropy: bool = False,
    linear_bias: Array | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_weight: Array | None = None,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    implementation: str | None = None,
    vocab_axis: int = 0,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    token_axis_names: str | Sequence[str] | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
    gather: Literal["tokens", "head"] | None = None,
    reduce_dtype: DTypeLike = jnp.float32,
    replicated: bool = False,
) -> Array:
    r"""A loss that is your function of each target's log-probability, in three matmuls like the cross-entropy.

    .. math:: L = \frac{1}{d} \sum_i t_i\, f(\log p_{i,y_i}, u_{i1}, u_{i2}, \ldots) \quad \text{or} \quad
        \frac{1}{d} \sum_i t_i\, f(\log p_{i,y_i}, H_i, u_{i1}, u_{i2}, \ldots)

    Here f is token_loss, u are per_token, t is token_weight, H is the entropy and d is the denominator of
    `linear_cross_entropy`. `token_losses` has common losses: PPO, GRPO, CISPO, REINFORCE and the weighted negative
    log-likelihood, each with an entropy bonus if it gets an entropy_weight.

    The gradients of a scalar reduction are computed in the forward pass: token_loss is called with some of the tokens
    at a time, and differentiated there. With reduction "none" the gradients take four matmuls: two if the head is
    frozen. A loss that takes the entropy takes four matmuls in the kernels, because they store too few bits for its
    gradient; with reduction "none" it takes four, or three if the head is frozen. `explain(..., with_entropy=True)`
    prints them.

    Args:
        token_loss: a named loss of `token_losses`, or a function (log_prob, *per_token) -> loss that takes and returns
            (n,) float32 arrays, for any n. It must be elementwise over tokens, which is checked: it may compute no sum,
            mean, maximum, order or shift over tokens, and must not depend on n. It may close over arrays that are the
            same for all tokens, for example a learned factor. It is differentiated with respect to log_prob, per_token
            and what it closes over. log_prob is never above 0. For float16 inputs its derivative should be of order
            1e-4 to 1e4, because the gradients are stored before the upstream gradient is known.
        per_token: (...) each, target's shape, any floating-point dtype. token_loss receives them as float32, without
            the values in rows that do not contribute. Their gradients have their dtypes.
        with_entropy: whether token_loss is a function (log_prob, entropy, *per_token) -> loss of the entropy of the
            distribution of each token too. It is differentiated with respect to both. Leave it False for a loss of
            `token_losses`, which takes the entropy if it has an entropy_weight.
        token_weight: (...,) factor on each token's loss. It is not part of the denominator and is not differentiated.
            Rows of weight 0 do not contribute: their input and per_token may hold any values.
        reduction: "mean", "sum" or "none".
        batch_invariant: as for `linear_cross_entropy`. With with_entropy, or an entropy_weight of a loss of
            `token_losses`, a gradient of input or linear_weight is an error.
        memory_budget: bytes of workspace besides inputs, gradients and what token_loss computes for each token; None is
            512 MiB.
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        float32 loss, () or, for reduction "none", (...,). With grad_into and another reduction the pair (loss, sum).
        Where log_prob is NaN, for example because the target is neither a class nor `ignore_index`, the token's loss
        and gradients are NaN, whatever token_loss returns.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`; a per-token array has another shape or is not floating point;
            token_loss is not callable, returns anything but (n,) float32, is not elementwise, has a derivative rule
            that is not, depends on the number of tokens, or differentiates an array of more than 64 numbers in
            `jax.checkpoint`, in a branch or in a function with such a rule.
        RuntimeError: token_loss or a derivative rule raised an exception, which is the cause of this one.
        NotImplementedError: a second derivative.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import linear_token_loss, token_losses
        >>> x, w, advantage, old = jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.ones(6), jnp.full(6, -4.0)
        >>> loss = linear_token_loss(x, w, jnp.arange(6), token_losses.ppo_clip(), advantage, old)
        >>> loss.shape
        ()

    Source:
        linear_ce/MATH.md (35), (36). The losses: `token_losses`.
    """
    options = reduction, ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, token_weight, grad_into, normalizer
    devices = devices_of(replicated, token_axis_names, vocab_axis_name, reduce_dtype, gather)
    how = vocab_axis, memory_budget, implementation, batch_invariant, 0, devices
    return _token_loss(options, arrays, how, token_loss, per_token, NO_STATS, with_entropy=with_entropy)[0]


@divides_explicit_axes
def linear_token_loss_with_stats(
    input: Array,
    linear_weight: Array,
    target: Array,
    token_loss: Callable[..., Array],
    *per_token: Array,
    stats: Sequence[str] = TOKEN_STATS,
    with_entropy: bool = False,
    linear_bias: Array | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_weight: Array | None = None,
    reduction: Reduction = "mean",
    normalizer: ArrayLike | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    implementation: str | None = None,
    vocab_axis: int = 0,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    token_axis_names: str | Sequence[str] | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
    gather: Literal["tokens", "head"] | None = None,
    reduce_dtype: DTypeLike = jnp.float32,
    replicated: bool = False,
) -> tuple[Array, TokenStats]:
    r"""`linear_token_loss` that also returns statistics of each token's distribution, from its pass over the logits.

    .. math:: H_i = -\sum_j p_{ij} \log p_{ij}, \qquad \frac{1}{K} \sum_j z_{ij}, \qquad \sum_j p_{ij}^2

    Args:
        stats: the names of the fields of `TokenStats` to compute. log_prob and lse cost nothing. Each of the others
            takes a few instructions for each logit.
        input: for this and all other arguments, see `linear_token_loss`.

    Returns:
        The loss, or with grad_into and reduction "mean" or "sum" the pair (loss, sum), and `TokenStats`. Only the loss
        has a gradient.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_token_loss`; stats is not a tuple of names of `TokenStats`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import linear_token_loss_with_stats, token_losses
        >>> x, w, advantage = jnp.ones((6, 16)), jnp.ones((100, 16)), jnp.ones(6)
        >>> loss, stats = linear_token_loss_with_stats(
        ...     x, w, jnp.arange(6), token_losses.reinforce(), advantage, stats=("entropy", "argmax")
        ... )
        >>> stats.entropy.shape, stats.lse
        ((6,), None)

    Source:
        linear_ce/MATH.md (3), (19), (20), (43), (44).
    """
    options = reduction, ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, token_weight, grad_into, normalizer
    devices = devices_of(replicated, token_axis_names, vocab_axis_name, reduce_dtype, gather)
    how = vocab_axis, memory_budget, implementation, batch_invariant, 0, devices
    return _token_loss(options, arrays, how, token_loss, per_token, check_stats(stats), with_entropy=with_entropy)


def _token_loss(
    options: tuple[Any, ...],
    arrays: tuple[Any, ...],
    how: tuple[Any, ...],
    token_loss: Callable[..., Array],
    per_token: tuple[Array, ...],
    stats: tuple[bool, ...],
    *,
    with_entropy: bool,
) -> tuple[Any, TokenStats]:
    """`options` are those of `LossSpec`, `arrays` and then `how` the other arguments of `prepare`."""
    spec = LossSpec(*options)
    with_entropy = takes_entropy(token_loss, with_entropy)
    statistics = statistics_for(stats) | BY_ROW | (ENTROPY | D_ENTROPY) * with_entropy
    call = prepare(spec, arrays, *how, statistics=statistics)
    check_per_token(token_loss, per_token, call.leading, "target's")
    flat = tuple(jnp.asarray(values).reshape(-1) for values in per_token)
    arguments = with_entropy + len(per_token)
    function, values_of_closure = elementwise.trace_token_loss(token_loss, call.tokens, arguments)
    closure = values_of_closure()
    devices = call.options.devices
    check_shards(devices, {f"per_token[{index}]": values for index, values in enumerate(flat)}, rows=True)
    check_shards(devices, {f"array {index} that token_loss closes over": one for index, one in enumerate(closure)})
    scalar = spec.reduction != "none"
    if call.tokens == 0:
        loss = jnp.zeros((), jnp.float32) if scalar else ops.no_rows(call.grad_into)
        dtypes = TokenStats(*[jnp.float32] * 7)._replace(argmax=jnp.int32, is_top1=jnp.bool_)
        empty = (
            jnp.zeros(call.leading, dtype) if wanted else None for dtype, wanted in zip(dtypes, stats, strict=True)
        )
        found = (loss if scalar else loss.reshape(call.leading)), TokenStats(*empty)
        total = call.grad_into if scalar else None
        (loss, of_tokens), total = ops.as_results(devices, (*call.arrays, *flat, *closure), found, total)
        return _with_total(loss, total), of_tokens
    token = TokenOptions(call.options, function, len(flat), stats, with_entropy)
    operands = (*call.arrays, *flat, *closure)
    loss, *found = (token_ops.token_loss_and_gradients if scalar else token_ops.token_losses)(token, *operands)
    rest = iter(found)
    made = (jax.lax.stop_gradient(next(rest)).reshape(call.leading) if wanted else None for wanted in stats)
    of_tokens = TokenStats(*made)
    return _with_total(loss if scalar else loss.reshape(call.leading), *rest), of_tokens


def check_targets(target: Array, vocab_size: int, ignore_index: int = -100) -> None:
    """Raises an error if a target is neither a class nor `ignore_index`. It waits for the device, to read the tensor.

    Args:
        target: (...,) integer.
        vocab_size: number of classes.
        ignore_index: the only value outside [0, vocab_size) that is allowed.

    Raises:
        TypeError: target is traced, and so has no values yet, or is not an array of integers, or vocab_size or
            ignore_index is not an int.
        ValueError: vocab_size is below 1, or there are such targets: names how many, and the first positions with their
            values.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import check_targets
        >>> check_targets(jnp.array([1, -100]), vocab_size=10)
    """
    if isinstance(target, jax.core.Tracer):
        raise TypeError("target must be a concrete array, got a tracer: call check_targets outside jit, grad and vmap")
    check_are_arrays({"target": target})
    check_integer_dtype("target", str(target.dtype))
    vocab_size, ignore_index = check_vocab_size(vocab_size), check_ignore_index(ignore_index)
    values = np.asarray(target)
    bad = ((values < 0) | (values >= vocab_size)) & (values != ignore_index)
    positions = np.argwhere(bad)
    if len(positions):
        first = ", ".join(f"target{p or ''} = {int(values[tuple(p)])}" for p in positions[:5].tolist())
        raise ValueError(
            f"target must lie in [0, {vocab_size}) or be ignore_index {ignore_index}, "
            f"got {len(positions)} others: {first}"
        )


@usual_promotion
def check_token_loss(token_loss: Callable[..., Array], *per_token: Array, with_entropy: bool = False) -> None:
    """Raises an error if a token loss is not elementwise. `linear_token_loss` makes the same check at each trace.

    The function is traced and not run, so no value is read.

    Args:
        token_loss: as in `linear_token_loss`.
        per_token: (...) each, arrays of the shape of its arguments.
        with_entropy: as in `linear_token_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_token_loss`.
        ValueError: the loss of a token may depend on other tokens; the message names the operation.

    Example:
        >>> import jax.numpy as jnp, jax_pallas
        >>> jax_pallas.check_token_loss(lambda log_prob, advantage: -advantage * log_prob, jnp.ones(8))
    """
    leading = np.shape(per_token[0]) if per_token else (2,)
    check_per_token(token_loss, per_token, leading, "per_token[0]'s")
    arguments = takes_entropy(token_loss, with_entropy) + len(per_token)
    elementwise.trace_token_loss(token_loss, math.prod(leading), arguments)


def explain(
    input: Array,
    linear_weight: Array,
    *,
    vocab_axis: int = 0,
    gradients: bool = True,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Array | None = None,
    head_precision: HeadPrecision | None = None,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    device: str | None = None,
    vocab_axis_name: str | Sequence[str] | None = None,
) -> Explanation:
    """Returns the implementation that a call with these arrays runs, and why. Printing it shows the plan of the call.

    Unless `implementation` names one, the choice depends on the device, which jit determines only when it lowers the
    call. For arrays that are traced or have no device, the answer is for the device of the mesh, or the default device.

    Args:
        input: (..., D).
        linear_weight: (V, D), or (D, V) with vocab_axis 1.
        vocab_axis: as given to the call.
        gradients: whether the gradients of input and linear_weight are computed. With grad_into and reduction "mean" or
            "sum" that of linear_weight always is. Without gradients, `linear_log_probs` and `linear_token_loss` may
            have other chunks than the loss alone, whose plan this is unless with_entropy is True.
        reduction: as given to the call. For log-probabilities, pass "none". They also compute entropies, so their
            chunks may have fewer rows than the plan has, and the smallest memory_budget may be larger.
        label_smoothing, softcap, vocab_size, memory_budget, saved_budget, implementation: as given to the call.
        grad_into, head_precision, batch_invariant: as given to the call.
        with_entropy: whether the call is `linear_token_loss` with a token_loss that takes the entropy, or
            `linear_log_probs` with a gradient of the entropy.
        device: the plan is that of this GPU: "a100", "b200", "h100", "h200", "l40s", "rtx4090" or "rtx5090". The
            machine needs no GPU, and the arrays may be on any device. None is the plan of input's device.
        vocab_axis_name: as given to the call. linear_weight and grad_into are the shards of one device, of which all
            rows count as classes: vocab_size is not used. Outside of `jax.shard_map` the plan is that of 8 devices.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape or an option; `implementation` is unknown, cannot serve these shapes and dtypes, or cannot
            run on the device; memory_budget cannot hold the smallest chunk; `device` is not one of these names.

    Example:
        >>> import jax.numpy as jnp
        >>> from jax_pallas import explain
        >>> explained = explain(jnp.ones((6, 16)), jnp.ones((100, 16)), implementation="chunked")
        >>> explained.reason
        'asked for by name'
        >>> print(explained)
        implementation: chunked, asked for by name
        path: chunked: no kernels
        kernels: none
        chunks: 1 of up to 6 rows
        weight: read where it is
        matmuls: logits, d_input, d_weight by XLA
        workspace: 0.0 MiB of a budget of 512.0 MiB
    """
    if vocab_axis_name is not None:
        vocab_size = None  # of all devices, and a device does not know before how many of its rows are classes
    spec = LossSpec(reduction, -100, label_smoothing, 0.0, softcap, 1.0, vocab_size, head_precision)
    return explained(
        input,
        linear_weight,
        spec,
        vocab_axis,
        implementation,
        gradients=gradients,
        memory_budget=memory_budget,
        saved_budget=saved_budget,
        grad_into=grad_into,
        with_entropy=with_entropy,
        batch_invariant=batch_invariant,
        device=device,
        vocab_axis_name=vocab_axis_name,
    )


def _loss(call: Call) -> tuple[Array, Array, Array, Array, Array | None]:
    """Runs the operator that the call needs; returns loss () or (N,), lse, target_logit and largest logit (N,), and the
    sum of a call with grad_into and a scalar reduction."""
    scalar = call.options.spec.reduction != "none"
    if call.tokens == 0:
        empty = jnp.zeros(0, jnp.float32)
        loss = jnp.zeros((), jnp.float32) if scalar else ops.no_rows(call.grad_into)
        total = call.grad_into if scalar else None
        found, total = ops.as_results(call.options.devices, call.arrays, (loss, empty, empty, empty), total)
        return *found, total
    row_losses = (saved_ops if call.options.saved_budget else ops).row_losses
    loss, lse, target_logit, top, *totals = (ops.loss_and_gradients if scalar else row_losses)(
        call.options, *call.arrays
    )
    return loss, lse, target_logit, top, totals[0] if totals else None


def _with_total(loss: Array, total: Array | None = None) -> Any:
    """Returns a loss, with the sum of a call with grad_into. The sum has no gradient."""
    return loss if total is None else (loss, jax.lax.stop_gradient(total))
