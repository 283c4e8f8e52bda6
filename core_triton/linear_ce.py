"""The public functions: fused linear + cross-entropy for PyTorch, without the N x V logits in memory.

A public function checks its arguments and flattens their leading axes (`prepare`), runs one of the functions of
`ops.py` (`_loss`), and reshapes the results. The functions of `ops.py` fold ignore_index, token weights, the reduction
and its denominator into one weight for each row (`row_math.row_weights`). This table shows which of them a call runs:

    no gradient needed                      `losses`, forward pass only                 plan B, 1 matmul
    scalar reduction                        `loss_and_gradients`, scaled backward       plan A, 3 matmuls
    reduction="none", frozen head           `loss_and_gradients`, rows scaled backward  2 matmuls
    reduction="none", any other; log-probs  `losses`, `log_probs`, backward recomputes  plan C, 4 matmuls
    token loss, scalar reduction            `token_loss`, scaled backward               plan A, 3 matmuls
    token loss, reduction="none"            `token_loss_rows`, as reduction "none"      4 matmuls, 2 with a frozen head

A token loss of the entropies takes 4 matmuls in the kernels for 16 bits, and 3 with a frozen head and reduction "none".

With a `saved_budget`, `saved_ops.py` runs losses of rows and log-probabilities: 3 matmuls for the rows that it holds.

The files of a call, in order: this one, `arguments.py`, `ops.py` (`token_ops.py` for a token loss), `plan.py`, then
`scaled_exp.py` (or `chunked.py` with `recompute.py`, or with `stored_logits.py` for float32), then the file of a kernel
with its launcher: `hopper_logits.py`, `hopper_gradients.py`, `ampere_logits.py`, `ampere_gradients.py`, `kernels.py`,
`row_kernels.py`, `input_grad.py`, `target_grad.py` or `float32_matmuls.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils import _pytree

from core_triton import gathered_tokens, ops, saved_ops, token_hook, token_losses, token_ops
from core_triton.arguments import Call, Groups, check_per_token, class_indices, prepare, spec_of
from core_triton.dtensors import Gather, takes_dtensors
from core_triton.explanation import Explanation, explained
from core_triton.row_math import TokenStats, is_top1
from core_triton.token_hook import TokenLoss
from core_triton.token_losses import Named
from linear_ce.spec import HeadPrecision, Reduction, check_ignore_index, check_integer_dtype, check_vocab_size
from linear_ce.statistics import BY_ROW, LSE, MAX, NO_STATS, TOKEN_STATS, check_stats


class LossStats(NamedTuple):
    """What `linear_cross_entropy_with_stats` returns besides the loss. None of it has a gradient.

    Rows that do not contribute (ignored, or with token_weight 0) have lse and target_logit 0. With token_group,
    accuracy and n_valid are those of this rank's tokens, and the mean of the ranks' z_loss is that of all tokens. With
    DTensors and sequence_parallel, z_loss, accuracy and n_valid are those of all tokens.
    """

    lse: Tensor  # (...,) float32, log-sum-exp of the logits
    target_logit: Tensor  # (...,) float32, NaN for a target that is not a class
    z_loss: Tensor  # the z-loss's part of the loss: () float32, (...,) for reduction "none"
    accuracy: Tensor  # () float32, fraction of contributing tokens whose target has the largest logit; ties count
    n_valid: Tensor  # () int64, targets that are not ignore_index


class LogProbs(NamedTuple):
    """Per-token results of `linear_log_probs`, each (...,) float32 and differentiable."""

    log_prob: Tensor
    entropy: Tensor
    lse: Tensor


if hasattr(_pytree, "_register_namedtuple"):  # torch.export.save needs it, and PyTorch has no public function
    for result in (LossStats, LogProbs, TokenStats):
        _pytree._register_namedtuple(result, serialized_type_name=f"core_triton.{result.__name__}")
    del result


@takes_dtensors
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    vocab_group: "dist.ProcessGroup | None" = None,
    token_group: "dist.ProcessGroup | None" = None,
    reduce_dtype: torch.dtype = torch.float32,
    check_agreement: bool = False,
    gather: Gather | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    r"""Cross-entropy of a linear layer's logits, computed without storing the logits.

    .. math::
        \ell_i = \mathrm{lse}_i - z_{i,y_i}, \qquad z = \mathrm{cap}(\mathrm{logit\_scale} \cdot (x W^\top + b)), \qquad
        \mathrm{cap}(t) = \mathrm{softcap} \cdot \tanh(t / \mathrm{softcap})

    Options that `torch.nn.functional.cross_entropy` also has mean exactly the same here. There is one deviation: if no
    token is counted (no valid target, an empty batch, a zero denominator), the loss is 0 with zero gradients, not NaN.

    float32 inputs on Hopper: a kernel computes the matmuls on tensor cores, with the precision of float32
    (`float32_matmuls.py`), where `explain` says so. cuBLAS computes them if PyTorch's settings allow TF32
    (`torch.set_float32_matmul_precision`), in chunks of few tokens, and on other GPUs.

    Args:
        input: (..., D) float16, bfloat16 or float32 hidden states.
        linear_weight: (V, D) head, any strides; input's dtype or float32. A float32 head is rounded to input's dtype
            one vocabulary chunk at a time, unless head_precision is "float32". Its gradient is float32 in both cases.
        target: (...,) class indices, any integer dtype. If a target is neither a class nor `ignore_index`, the loss
            and the gradients are NaN; `check_targets` finds such targets.
        linear_bias: (V,) input's dtype or float32.
        weight: (V,) class weights. With "mean" the denominator is their sum over the counted targets.
        token_weight: (...,) factor on each token's loss. It is not part of the denominator and is not differentiated.
        reduction: "mean", "sum" or "none".
        normalizer: () denominator of "mean" in place of the number of counted tokens, for example the number in a
            global batch or in all micro-batches. It is not differentiated. A negative or non-finite number is an
            error; such a value in a Tensor is not read back, and makes the loss NaN.
        ignore_index: target of tokens that do not contribute. Their input may hold any values.
        label_smoothing: in [0, 1].
        z_loss_weight: adds `z_loss_weight * lse**2` to each token's loss. Class weights do not apply to it.
        softcap: bound on the absolute value of the logits, or None.
        logit_scale: factor on the raw logits.
        vocab_size: number of classes. The rows of linear_weight past it are padding: they have no probability and a
            zero gradient.
        memory_budget: bytes of workspace besides inputs and gradients; None is 512 MiB.
        saved_budget: bytes that reduction "none" may keep from the forward pass to the backward pass, besides input and
            results: about `2 * (V + D)` for a row with a 16-bit input. If they hold all rows, the gradients take three
            matmuls in place of four. If they hold a part of at least 512 rows, the other rows take four. It must be 0
            with grad_into, with head_precision "float32" and with batch_invariant. With the kernels it must also be 0
            for label smoothing with a 16-bit input.
        implementation: "triton", "triton_sm80", "chunked", or None for the best on this device (`explain` returns
            which). A named implementation never falls back to another. "triton_sm80" runs, on newer GPUs too,
            the kernels that "triton" runs on an A100, or on the GPU if its compute capability is 8.x.
        grad_into: (V, D) float32 buffer, contiguous, for example Megatron's `weight.main_grad`, or the `grad` of a
            float32 head. The gradient of linear_weight is added to it, in float32, and linear_weight gets none from
            autograd, so there is no second (V, D) buffer, and the gradients of several calls and of a tied embedding
            round once. The rows past vocab_size stay as they are. Without gradients (`torch.no_grad`) nothing is added.

            With reduction "mean" or "sum" the forward pass adds it, because that is where the gradients are computed:
            adding it in the backward pass would take a fourth matmul, or a second buffer. The upstream gradient of the
            loss is not known there, so it must be 1, as in `loss.backward()`. The backward pass checks that without
            waiting for the device: on a GPU another number is a device-side assertion. So do not divide the loss by the
            number of accumulation steps, but pass the number of tokens of all steps as normalizer, or use token_weight.
            Every forward pass with gradients enabled must be followed by one backward pass.

            With reduction "none" each backward pass adds the gradient, for any upstream gradient and any requested
            inputs. Use it, and sum the losses, if the upstream gradient is not 1 (`torch.amp.GradScaler`), or within
            activation checkpointing, which would run the forward pass twice.
        head_precision: None or "input" rounds a float32 linear_weight to input's dtype. "float32", for a bfloat16
            input, splits it into the sum of two bfloat16 matrices, which hold 16 bits of each weight. The logits and
            d_input take two matmuls each, so a call takes five instead of three, or seven if the logits are computed
            twice (reduction "none", log-probabilities). The relative error of a weight is at most `2**-17`, in place
            of `2**-8`. d_weight is float32 in both cases.
        batch_invariant: whether the loss, lse and d_input of a token must be bit-for-bit independent of the other
            tokens of the call (their number, order, values and range of logits) and of memory_budget. The order of sums
            is then fixed, which takes longer if d_input has few tiles (`explain` shows this). With "mean" it holds for
            the same denominator: pass a normalizer. d_weight is a sum over tokens. It needs the kernels, a bfloat16
            input, label_smoothing 0 and saved_budget 0; and for the gradient of input compute capability 8.x, 9.0 or
            12.x and a bfloat16 linear_weight whose rows start at multiples of 16 bytes. Results of another GPU, of
            another version or of another engine's head may differ in their last bits.
        vocab_group: process group whose ranks have the same tokens and different classes. linear_weight and linear_bias
            are this rank's shard: the same number of rows on all ranks, or vocab_size classes divided as `torch.chunk`
            divides them. vocab_size is the number of all classes, and without it all rows are classes. input, target,
            weight (of all classes), token_weight and the options are the same on all ranks. Every rank returns the same
            loss, bit for bit, and the whole gradient of input. The gradients of linear_weight and linear_bias are those
            of its shard. The matmuls are divided by the ranks: the three of one GPU for a 16-bit input and the
            kernels, and otherwise four. saved_budget is bytes of each rank, the same on all, which keeps the
            exponentials of its classes and the whole gradient of input. With batch_invariant the ranks add d_input in
            their order, which is not done beside a matmul, and the bits depend on the number of ranks.
        token_group: process group whose ranks have different tokens. Their numbers of tokens may differ. The mean of
            the losses of its ranks is the loss of all their tokens, and the mean of their gradients is its gradient, so
            `DistributedDataParallel` and FSDP2, which take means, compute the global gradient. With reduction "mean"
            each rank divides by the number of counted tokens of all ranks (or by their class weights, or by
            normalizer), divided by the number of ranks. A rank may have no counted token. Statistics are those of the
            tokens of a rank. Reduction "none" is an error.
        reduce_dtype: torch.float32 or torch.bfloat16, in which the gradient of input is summed over vocab_group.
            bfloat16 sends half of the bytes and rounds each part.
        check_agreement: the ranks of a group compare shapes and options at each call, those of vocab_group also their
            targets, and all raise if they differ or if one of them raises. The first three calls of a group do it in
            any case, in eager mode. Ranks that differ later wait for each other until the timeout of the group, or
            return wrong results.
        gather: "tokens" or "head": what ranks with different tokens and different classes gather. input and
            linear_weight are then DTensors that are sharded on the same dimension of a mesh, on tokens and on classes.
            None gathers whichever is smaller: the tokens if all ranks together have fewer tokens than classes. With
            "head" input may be a plain Tensor of this rank's tokens, as in FSDP2, which takes the mean of the ranks'
            gradients.
        sequence_parallel: the ranks of vocab_group have different tokens, the same number on each. All ranks return the
            loss of all of these, or for reduction "none" the losses of a rank's tokens. The gradient of input is that
            of these. The three matmuls for a 16-bit input gather the tokens chunk by chunk, within memory_budget. All
            other calls gather them at once, (ranks N, D), and so do calls with batch_invariant, with saved_budget or
            whose memory_budget holds no such chunk.

    input, linear_weight, linear_bias, target, token_weight and normalizer may be DTensors of one mesh. On a dimension
    of the mesh where linear_weight is Shard(0) and input Replicate, ranks have the same tokens and different classes,
    as with vocab_group. Where input is sharded on tokens and linear_weight is Replicate, ranks have different tokens.
    Where both are sharded, `gather` says what is gathered. The loss is that of all tokens and a DTensor (Replicate, or
    for reduction "none" as input), and the gradients are those of the loss of all tokens, summed over ranks in float32.
    token_group is then a group of ranks that are not on the mesh.

    Returns:
        float32 loss, () or, for reduction "none", (...,).

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: a shape, a device or an option is wrong, or memory_budget cannot hold the smallest chunk. The
            message names the argument.
        RuntimeError: a second derivative. With grad_into: a second backward pass, an upstream gradient that is not 1,
            or hooks of saved tensors, which activation checkpointing and offloading use, where the forward pass adds.

    Example:
        >>> import torch, core_triton
        >>> x, w = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> core_triton.linear_cross_entropy(x, w, torch.arange(6)).backward()
        >>> w.grad.shape
        torch.Size([100, 16])
        >>> total = torch.zeros(100, 16)  # of two micro-batches, each of half of the tokens
        >>> for half in (slice(0, 3), slice(3, 6)):
        ...     batch = x[half], w, torch.arange(6)[half]
        ...     core_triton.linear_cross_entropy(*batch, normalizer=6, grad_into=total).backward()
        >>> torch.allclose(total, w.grad, atol=1e-6)
        True

    Source:
        Gradients in the forward pass: Hsu et al., "Liger Kernel", 2024, section 3.2. Recomputation by vocabulary
        chunk: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024. Equations: linear_ce/MATH.md
        (1)-(18); what the kernels store: (29)-(33).
    """
    options = reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, weight, token_weight, normalizer
    groups = Groups(vocab_group, token_group, reduce_dtype, check_agreement, sequence_parallel)
    how = memory_budget, implementation, grad_into, batch_invariant, saved_budget, groups
    call = prepare(options, *arrays, *how)
    return _shaped(_loss(call, statistics=0).loss, target)


@takes_dtensors
def linear_cross_entropy_with_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss_weight: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    vocab_group: "dist.ProcessGroup | None" = None,
    token_group: "dist.ProcessGroup | None" = None,
    reduce_dtype: torch.dtype = torch.float32,
    check_agreement: bool = False,
    gather: Gather | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, LossStats]:
    """`linear_cross_entropy` that also returns statistics from its pass over the logits.

    Args:
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        The loss and `LossStats`. Only the loss has a gradient.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import torch, core_triton
        >>> x, w = torch.randn(6, 16), torch.randn(100, 16)
        >>> loss, stats = core_triton.linear_cross_entropy_with_stats(x, w, torch.arange(6))
        >>> int(stats.n_valid)
        6
    """
    options = reduction, ignore_index, label_smoothing, z_loss_weight, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, weight, token_weight, normalizer
    groups = Groups(vocab_group, token_group, reduce_dtype, check_agreement, sequence_parallel)
    how = memory_budget, implementation, grad_into, batch_invariant, saved_budget, groups
    call = prepare(options, *arrays, *how)
    loss, row_weight, lse, target_logit, top, *_ = _loss(call, statistics=MAX | LSE)
    assert row_weight is not None
    assert lse is not None
    assert target_logit is not None
    assert top is not None
    leading = target.shape
    contributes = row_weight != 0
    z_loss = row_weight * call.spec.z_loss_weight * lse.square()
    stats = LossStats(
        lse=lse.reshape(leading),
        target_logit=target_logit.reshape(leading),
        z_loss=_shaped(z_loss if reduction == "none" else z_loss.sum(), target),
        accuracy=is_top1(row_weight, target_logit, top).sum().float() / contributes.sum().clamp(min=1),
        n_valid=(call.arrays.target != ignore_index).sum(),
    )
    return _shaped(loss, target), stats


@takes_dtensors
def linear_log_probs(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    vocab_group: "dist.ProcessGroup | None" = None,
    reduce_dtype: torch.dtype = torch.float32,
    check_agreement: bool = False,
    gather: Gather | None = None,
    sequence_parallel: bool = False,
) -> LogProbs:
    r"""Log-probability of each target, and entropy and log-sum-exp of each row, all differentiable, without storing the
    logits.

    .. math:: \log p_{i,y_i} = z_{i,y_i} - \mathrm{lse}_i, \qquad H_i = -\sum_j p_{ij} \log p_{ij}

    Args:
        grad_into: (V, D) float32 buffer, contiguous. Each backward pass adds the gradient of linear_weight to it.
        saved_budget: bytes that may be kept from the forward pass to the backward pass. They save a matmul if entropy
            and lse get no gradient. Otherwise they are not used, and the call takes one matmul more than with 0. It
            must be 0 with grad_into, with head_precision "float32" and with batch_invariant.
        batch_invariant: as for `linear_cross_entropy`, for log_prob, lse and the gradient of log_prob with respect to
            input. A gradient of entropy or lse is then an error in the backward pass.
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        `LogProbs(log_prob, entropy, lse)`, each (...,) float32; rows of `ignore_index` give 0 and have zero gradients.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.

    Example:
        >>> import torch, core_triton
        >>> x, w = torch.randn(2, 6, 16, requires_grad=True), torch.randn(100, 16)
        >>> out = core_triton.linear_log_probs(x, w, torch.zeros(2, 6, dtype=torch.long))
        >>> (out.log_prob.sum() - 0.01 * out.entropy.sum()).backward()

    Source:
        linear_ce/MATH.md (19)-(22); entropy from running sums: (25)-(27).
    """
    options = "none", ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, None, None
    groups = Groups(vocab_group, None, reduce_dtype, check_agreement, sequence_parallel)
    how = memory_budget, implementation, grad_into, batch_invariant, saved_budget, groups
    call = prepare(options, *arrays, *how)
    call = gathered_tokens.of_all_tokens(call)
    if call.options.saved_budget:
        found = saved_ops.log_probs(call.arrays, call.options)
    else:
        found = _run(ops.log_probs, call.arrays, call.options, grad_into=call.grad_into)
    return LogProbs(*(result.reshape(target.shape) for result in (found.log_prob, found.entropy, found.lse)))


@takes_dtensors
def linear_token_loss(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    token_loss: TokenLoss,
    *per_token: Tensor,
    with_entropy: bool = False,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    vocab_group: "dist.ProcessGroup | None" = None,
    token_group: "dist.ProcessGroup | None" = None,
    reduce_dtype: torch.dtype = torch.float32,
    check_agreement: bool = False,
    gather: Gather | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    r"""A loss that is your function of each target's log-probability, in three matmuls like the cross-entropy.

    .. math:: L = \frac{1}{d} \sum_i t_i\, f(\log p_{i,y_i}, u_{i1}, u_{i2}, \ldots) \quad \text{or} \quad
        \frac{1}{d} \sum_i t_i\, f(\log p_{i,y_i}, H_i, u_{i1}, u_{i2}, \ldots)

    Here f is token_loss, u are per_token, t is token_weight, H is the entropy and d is the denominator of
    `linear_cross_entropy`. `token_losses` has common losses: PPO, GRPO, CISPO, REINFORCE and the weighted negative
    log-likelihood, each with an entropy bonus if it gets an entropy_weight.

    The forward pass calls token_loss and differentiates it with autograd, for one chunk of rows at a time. With
    reduction "none" the upstream gradients are not known there, and the backward pass computes the logits again: four
    matmuls, or two if the head is frozen. A loss that takes the entropy takes four matmuls in the kernels for 16-bit
    inputs, because they store too few bits for its gradient; with reduction "none" it takes four, or three if the head
    is frozen. `explain(..., with_entropy=True)` prints them.

    Args:
        token_loss: a named loss of `token_losses`, or a function (log_prob, *per_token) -> loss of PyTorch operations.
            It takes and returns float32 tensors of shape (n,). It is called for some rows at a time, in any order, so
            the loss of a row must depend on that row only, which `check_token_loss` checks. log_prob is never above 0.
            A tensor that the function closes over and that requires grad is an error, except with reduction "none",
            where it gets its gradient. For float16 inputs the derivative should be of order 1e-4 to 1e4, because the
            gradients are stored before the upstream gradient is known. Under torch.compile a named loss is part of the
            graph. Any other function breaks the graph.
        per_token: (...) each, target's shape, any floating-point dtype. token_loss receives them as float32. Those
            that require grad get a gradient of their dtype.
        with_entropy: whether token_loss is a function (log_prob, entropy, *per_token) -> loss of the entropy of the
            distribution of each token too. It is differentiated with respect to both. Leave it False for a loss of
            `token_losses`, which takes the entropy if it has an entropy_weight.
        reduction: "mean", "sum" or "none".
        memory_budget: bytes of workspace besides inputs, gradients and what token_loss allocates; None is 512 MiB.
        input: for this and all other arguments, see `linear_cross_entropy`.

    Returns:
        float32 loss, () or, for reduction "none", (...,). Rows that do not contribute have no effect, even if
        their per_token hold NaN. Where log_prob is NaN (a target that is neither a class nor ignore_index, a NaN
        logit), the loss and the gradients are NaN, whatever token_loss returns. There is one exception: with reduction
        "none", a per_token in which token_loss is constant gets no gradient from autograd, so it is not NaN there. An
        example is old_log_prob of `token_losses.cispo`.

    Raises:
        TypeError: as `linear_cross_entropy`; token_loss is not callable, or returns anything but a float32 Tensor.
        ValueError: as `linear_cross_entropy`; the shape or the device of per_token or of the result of token_loss; the
            number of per_token of a named loss.
        RuntimeError: token_loss raised an exception, which is the cause; or a second derivative.

    Example:
        >>> import torch
        >>> from core_triton import linear_token_loss, token_losses
        >>> x, w = torch.randn(6, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
        >>> advantage, old_log_prob = torch.randn(6), torch.full((6,), -5.0)
        >>> linear_token_loss(x, w, torch.arange(6), token_losses.ppo_clip(), advantage, old_log_prob).backward()
        >>> linear_token_loss(x, w, torch.arange(6), lambda log_prob: log_prob.exp()).shape
        torch.Size([])

    Source:
        linear_ce/MATH.md (35), (36).
    """
    options = reduction, ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, token_weight, normalizer
    groups = Groups(vocab_group, token_group, reduce_dtype, check_agreement, sequence_parallel)
    how = memory_budget, implementation, grad_into, batch_invariant, 0, groups
    return _token_loss(options, arrays, how, token_loss, per_token, NO_STATS, with_entropy=with_entropy)[0]


@takes_dtensors
def linear_token_loss_with_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    token_loss: TokenLoss,
    *per_token: Tensor,
    stats: Sequence[str] = TOKEN_STATS,
    with_entropy: bool = False,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: Tensor | float | None = None,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    batch_invariant: bool = False,
    vocab_group: "dist.ProcessGroup | None" = None,
    token_group: "dist.ProcessGroup | None" = None,
    reduce_dtype: torch.dtype = torch.float32,
    check_agreement: bool = False,
    gather: Gather | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, TokenStats]:
    r"""`linear_token_loss` that also returns statistics of each token's distribution, from its pass over the logits.

    .. math:: H_i = -\sum_j p_{ij} \log p_{ij}, \qquad \frac{1}{K} \sum_j z_{ij}, \qquad \sum_j p_{ij}^2

    Args:
        stats: the names of the fields of `TokenStats` to compute. log_prob and lse cost nothing. Each of the others
            takes a few instructions for each logit.
        input: for this and all other arguments, see `linear_token_loss`.

    Returns:
        The loss and `TokenStats`. Only the loss has a gradient.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_token_loss`; stats is not a tuple of names of `TokenStats`.

    Example:
        >>> import torch
        >>> from core_triton import linear_token_loss_with_stats, token_losses
        >>> x, w, advantage = torch.randn(6, 16), torch.randn(100, 16), torch.randn(6)
        >>> loss, stats = linear_token_loss_with_stats(
        ...     x, w, torch.arange(6), token_losses.reinforce(), advantage, stats=("entropy", "argmax")
        ... )
        >>> stats.entropy.shape, stats.lse
        (torch.Size([6]), None)

    Source:
        linear_ce/MATH.md (3), (19), (20), (43), (44).
    """
    options = reduction, ignore_index, 0.0, 0.0, softcap, logit_scale, vocab_size, head_precision
    arrays = input, linear_weight, target, linear_bias, None, token_weight, normalizer
    groups = Groups(vocab_group, token_group, reduce_dtype, check_agreement, sequence_parallel)
    how = memory_budget, implementation, grad_into, batch_invariant, 0, groups
    return _token_loss(options, arrays, how, token_loss, per_token, check_stats(stats), with_entropy=with_entropy)


def _token_loss(
    options: tuple[Any, ...],
    arrays: tuple[Any, ...],
    how: tuple[Any, ...],
    token_loss: TokenLoss,
    per_token: tuple[Tensor, ...],
    stats: tuple[bool, ...],
    *,
    with_entropy: bool,
) -> tuple[Tensor, TokenStats]:
    """`options` are those of `spec_of`, `arrays` and then `how` the other arguments of `prepare`."""
    _check_is_loss(token_loss)
    with_entropy = token_hook.takes_entropy(token_loss, with_entropy)
    if torch.compiler.is_compiling() and not isinstance(token_loss, Named):
        from core_triton.compiling import call_between_graphs  # loads torch._dynamo

        arguments = options, arrays, how, token_loss, per_token, stats
        return call_between_graphs(_token_loss, *arguments, with_entropy=with_entropy)
    call, target = prepare(options, *arrays, *how, token_loss=token_loss, per_token=per_token), arrays[2]
    reduce = call.spec.reduction != "none"
    run = token_ops.token_loss if reduce else token_ops.token_loss_rows
    if call.options.rank_tokens:
        statistics = token_ops.statistics_of(stats, with_entropy)
        vectors = reduce * token_hook.bytes_of(target.numel(), per_token, with_entropy=with_entropy)
        call = gathered_tokens.with_tokens(call, statistics=statistics, reduce=reduce, vectors=vectors)
    of_call = *call[1:4], token_loss, call.per_token, stats
    loss, found = _run(run, *of_call, with_entropy=with_entropy, grad_into=call.grad_into)
    return _shaped(loss, target), TokenStats(*(None if one is None else one.reshape(target.shape) for one in found))


def _check_is_loss(token_loss: Any) -> None:
    """Raises TypeError for what is not callable, and for a function of `token_losses` that was not called."""
    if not callable(token_loss):
        raise TypeError(f"token_loss must be callable, got {type(token_loss).__name__}")
    name = "" if isinstance(token_loss, Named) else getattr(token_loss, "__name__", "")
    if name and getattr(token_losses, name, None) is token_loss:
        name = f"token_losses.{name}"
        raise TypeError(f"token_loss must be a loss, got {name}, which returns one: pass {name}()")


def check_targets(target: Tensor, vocab_size: int, ignore_index: int = -100) -> None:
    """Raises an error if a target is neither a class nor `ignore_index`. It waits for the device, to read the tensor.

    Args:
        target: (...,) integer.
        vocab_size: number of classes.
        ignore_index: the only value outside [0, vocab_size) that is allowed.

    Raises:
        TypeError: target is not a tensor of integers, or vocab_size or ignore_index is not an int.
        ValueError: vocab_size is below 1, or there are such targets: names how many, and the first positions with their
            values.

    Example:
        >>> import torch, core_triton
        >>> core_triton.check_targets(torch.tensor([1, -100]), vocab_size=10)
    """
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(target).__name__}")
    check_integer_dtype("target", str(target.dtype).removeprefix("torch."))
    vocab_size, ignore_index = check_vocab_size(vocab_size), check_ignore_index(ignore_index)
    values = class_indices(target, ignore_index)  # PyTorch does not compare unsigned integers of 16 bits or more
    bad = ((values < 0) | (values >= vocab_size)) & (values != ignore_index)
    positions = bad.nonzero()
    if len(positions):
        first = ", ".join(f"target{p or ''} = {target[tuple(p)].item()}" for p in positions[:5].tolist())
        raise ValueError(
            f"target must lie in [0, {vocab_size}) or be ignore_index {ignore_index}, "
            f"got {len(positions)} others: {first}"
        )


def check_token_loss(token_loss: TokenLoss, *per_token: Tensor, with_entropy: bool = False) -> None:
    """Raises an error if a token loss is not elementwise. It waits for the device, to read the values.

    `linear_token_loss` calls the function with some tokens at a time, in any order, and checks only the shape and dtype
    of the result. This function calls it with all tokens, with some of them in another order, and with other numbers in
    every second token. The losses of the other tokens and their derivatives must stay the same.

    Args:
        token_loss: as in `linear_token_loss`.
        per_token: (...) each, the values to try, of two tokens or more. The log-probabilities and the entropies are
            generated. Without per_token there are 64 tokens.
        with_entropy: as in `linear_token_loss`.

    Raises:
        TypeError, ValueError, RuntimeError: as `linear_token_loss`.
        ValueError: the loss of a token depends on other tokens; the message names the first one. Or there are fewer
            than two tokens.

    Example:
        >>> import torch, core_triton
        >>> core_triton.check_token_loss(lambda log_prob, advantage: -advantage * log_prob, torch.randn(8))
    """
    _check_is_loss(token_loss)
    tokens = per_token[0] if per_token else torch.empty(64, device="cpu")
    if isinstance(tokens, Tensor) and tokens.numel() < 2:
        raise ValueError(f"per_token[0] must be a Tensor of two tokens or more, got shape {tuple(tokens.shape)}")
    flat = check_per_token(token_loss, per_token, tokens, "per_token[0]")
    with_entropy = token_hook.takes_entropy(token_loss, with_entropy)
    number = torch.arange(1, tokens.numel() + 1, dtype=torch.float32, device=tokens.device)
    log_prob = -8.0 * torch.frac(0.618 * number)  # between 0 and -8, in no order
    arguments = [log_prob, *(one.detach().float() for one in flat)]
    if with_entropy:
        arguments.insert(1, 6.0 * torch.frac(0.732 * number))
    token_hook.check_elementwise(token_loss, arguments, with_entropy=with_entropy)


def explain(
    input: Tensor,
    linear_weight: Tensor,
    *,
    gradients: bool = True,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    memory_budget: int | None = None,
    saved_budget: int = 0,
    implementation: str | None = None,
    grad_into: Tensor | None = None,
    head_precision: HeadPrecision | None = None,
    with_entropy: bool = False,
    batch_invariant: bool = False,
    device: str | None = None,
    vocab_group: "dist.ProcessGroup | None" = None,
    sequence_parallel: bool = False,
) -> Explanation:
    """Returns the implementation that a call with these arrays runs, and why. Printing it shows the plan of the call.

    Under torch.compile it returns an `Implementation`: the name and the reason, without the plan.

    Args:
        input: (..., D).
        linear_weight: (V, D).
        gradients: whether the gradients of input and linear_weight are computed.
        reduction: as given to the call. For log-probabilities, pass "none".
        label_smoothing, softcap, vocab_size, memory_budget, saved_budget, implementation: as given to the call.
        grad_into, head_precision, batch_invariant: as given to the call.
        with_entropy: whether the call is `linear_token_loss` with a token_loss that takes the entropy, or
            `linear_log_probs` with a gradient of the entropy. The backward pass of `linear_log_probs` may need that
            gradient, so its forward pass raises an error for the same memory_budget as this function with with_entropy.
            A token loss with reduction "mean" or "sum" needs a few more bytes for each token.
        device: the plan is that of this GPU: "a100", "b200", "h100", "h200", "l40s", "rtx4090" or "rtx5090". The
            machine needs no GPU, and the tensors may be on any device. None is the plan of input's device.
        vocab_group: as given to the call. linear_weight and grad_into are this rank's shard.
        sequence_parallel: as given to the call. input has this rank's tokens.

    Raises:
        TypeError: a dtype that is not supported.
        ValueError: a shape or an option; `implementation` is unknown, or cannot run on the device; memory_budget cannot
            hold the smallest chunk; `device` is not one of these names.

    Example:
        >>> import torch
        >>> from core_triton import explain
        >>> explained = explain(torch.ones(6, 16), torch.ones(100, 16), implementation="chunked")
        >>> explained.reason
        'asked for by name'
        >>> print(explained)
        implementation: chunked, asked for by name
        path: chunked: no kernels
        kernels: none
        chunks: 1 of up to 6 rows
        weight: read where it is
        matmuls: logits, d_input, d_weight by PyTorch
        workspace: 0.0 MiB of a budget of 512.0 MiB
    """
    spec = spec_of(reduction, -100, label_smoothing, 0.0, softcap, 1.0, vocab_size, head_precision)
    return explained(
        input,
        linear_weight,
        spec,
        implementation,
        gradients=gradients,
        memory_budget=memory_budget,
        saved_budget=saved_budget,
        grad_into=grad_into,
        with_entropy=with_entropy,
        batch_invariant=batch_invariant,
        device=device,
        vocab_group=vocab_group,
        sequence_parallel=sequence_parallel,
    )


def _shaped(loss: Tensor, target: Tensor) -> Tensor:
    """Returns a loss of rows in the target's shape, and one of all rows as it is."""
    return loss if loss.ndim == 0 or loss.shape == target.shape else loss.reshape(target.shape)


def _loss(call: Call, *, statistics: int) -> ops.Losses:
    """Runs what the call needs."""
    statistics |= BY_ROW if call.options.batch_invariant else 0
    if call.options.saved_budget:
        call = gathered_tokens.of_all_tokens(call)
        return saved_ops.losses(call.arrays, call.weights, call.options, statistics=statistics)
    reduce = call.spec.reduction != "none"
    call = gathered_tokens.with_tokens(call, statistics=statistics, reduce=reduce)
    return _run(ops.loss, *call[1:4], statistics=statistics, reduce=reduce, grad_into=call.grad_into)


def _run(function: Callable[..., Any], *arguments: Any, grad_into: Tensor | None, **options: Any) -> Any:
    """Returns function(*arguments, grad_into=grad_into, **options). The operators of torch.compile change none of their
    arguments, so with `grad_into` the function runs between two graphs."""
    if grad_into is not None and torch.compiler.is_compiling():
        from core_triton.compiling import call_between_graphs  # loads torch._dynamo

        return call_between_graphs(function, *arguments, grad_into=grad_into, **options)
    return function(*arguments, grad_into=grad_into, **options)
