"""A token loss in the middle of plan A: a function of the log-probabilities, called and differentiated in each chunk.

A token loss f maps the log-probability of each target to a loss. Between the matmul of the logits and those of the
gradients, the statistics of a chunk's rows are complete, so its log-probabilities are known. `TokenHook.process` calls
f on these n numbers and differentiates it. The gradients are then those of a negative log-likelihood whose row weights
are -row_weight * f'(log_prob): MATH.md (35), (36). So the kernels of the gradients are those of the cross-entropy.
Where kernels can run, a named loss is one kernel (`token_kernels.py`).

A loss of the entropies takes them as its second argument, and has a second row weight: MATH.md (45), (46).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from core_triton.token_losses import Named
from core_triton.transforms import check_levels, check_transforms
from linear_ce.spec import check_flag

TokenLoss = Callable[..., Tensor]  # (log_prob, *per_token) or (log_prob, entropy, *per_token) -> loss, all (n,) float32


class TokenHook:
    """The token loss of one call, with its results for all rows.

    `process` fills in the results of some rows. No row depends on another one, so chunks may come in any order.

    Args:
        token_loss: the function.
        per_token: (N,) each, its arguments besides the log-probabilities.
        row_weight: (N,) float32 of `row_math.row_weights`; rows of weight 0 are excluded.
        d_logits: whether the gradients with respect to the logits are needed.
        d_per_token: which of the arguments are differentiated.
        log_prob: whether the log-probabilities are kept.
        with_entropy: whether the function takes the entropies.
        kernels: whether kernels can run where the arrays are.
    """

    def __init__(
        self,
        token_loss: TokenLoss,
        per_token: Sequence[Tensor],
        row_weight: Tensor,
        *,
        d_logits: bool,
        d_per_token: Sequence[bool],
        log_prob: bool = False,
        with_entropy: bool = False,
        kernels: bool,
    ) -> None:
        self.token_loss = token_loss
        self.with_entropy = with_entropy
        self.kernels = kernels
        self.per_token = per_token
        self.row_weight = row_weight
        self.loss = torch.empty_like(row_weight)  # (N,), times the row weight
        # (N,), the row weight in the gradients. It is also 0 where the derivative is 0.
        self.gradient_weight = torch.empty_like(row_weight) if d_logits else None
        # (N,) the same for the entropy, and whether either of the two is not 0.
        self.d_entropy = torch.empty_like(row_weight) if d_logits and with_entropy else None
        self.contributes = self.gradient_weight if self.d_entropy is None else torch.empty_like(row_weight)
        self.log_prob = torch.empty_like(row_weight) if log_prob else None  # (N,)
        # (N,) float32 each, times the row weight; None if not needed.
        self.d_per_token = [torch.empty_like(row_weight) if needed else None for needed in d_per_token]

    @property
    def bytes(self) -> int:
        """How many bytes the vectors take at most, without those that the token loss allocates and the results."""
        return bytes_of(len(self.row_weight), self.per_token, with_entropy=self.with_entropy)

    def process(
        self, rows: slice | Tensor, nll: Tensor, entropy: Tensor | None = None, *, of_call: bool = False
    ) -> Tensor | None:
        """Calls and differentiates the token loss on rows of the call, and writes their results. Returns their weights
        in the gradients (n,), if those are needed.

        Rows that do not contribute may hold any values. They are replaced by 0 before the call, and their results are
        0. Nothing multiplies them by 0.

        Args:
            rows: which rows of the call, (n,) int64 if not a slice.
            nll: (n,) their negative log-likelihoods, NaN where the target is not a class.
            entropy: (n,) if the function takes it.
            of_call: whether nll is (N,), of all rows of the call. Then `rows` must be a tensor, and entropy None.
        """
        assert not of_call or (isinstance(rows, Tensor) and entropy is None)
        if self.kernels and isinstance(self.token_loss, Named):
            from core_triton import token_kernels  # Triton is not on every machine that has PyTorch

            weight = token_kernels.token_loss(
                self.token_loss,
                rows,
                nll,
                self.row_weight,
                self.per_token,
                of_call=of_call,
                loss=self.loss,
                gradient_weight=self.gradient_weight,
                log_prob=self.log_prob,
                d_per_token=self.d_per_token,
            )
            if entropy is not None:
                self._add_bonus(self.token_loss.entropy_weight, rows, nll, entropy, weight)
            return weight
        if of_call:
            nll = nll[rows]
        contributes, kept, log_prob = self._factors(rows, nll)
        if self.log_prob is not None:
            self.log_prob[rows] = log_prob
        per_token = [one[rows] for one in self.per_token]
        arguments = per_token if entropy is None else [entropy, *per_token]
        values = [torch.where(contributes, one.float(), 0.0) for one in arguments]
        results = self.d_per_token if entropy is None else [self.d_entropy, *self.d_per_token]
        needs_grad = self.gradient_weight is not None, *(one is not None for one in results)
        loss, (d_log_prob, *d_values) = call_and_differentiate(self.token_loss, [log_prob, *values], needs_grad)
        self.loss[rows] = torch.where(contributes, kept * loss, 0.0)
        for result, derivative in zip(results, d_values, strict=True):
            if result is not None and derivative is not None:
                result[rows] = torch.where(contributes, kept * derivative, 0.0)
        if self.gradient_weight is None or d_log_prob is None:
            return None
        weight = torch.where(contributes, kept * -d_log_prob, 0.0)  # of nll = -log_prob
        self.gradient_weight[rows] = weight
        self._mark_contributes(rows, weight)
        return weight

    def _factors(self, rows: slice | Tensor, nll: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns which rows contribute, what multiplies their token losses, and their log-probabilities, (n,) each."""
        row_weight = self.row_weight[rows]
        contributes = row_weight != 0
        log_prob = log_prob_of(nll, contributes)
        return contributes, factors(log_prob, row_weight), log_prob

    def _add_bonus(
        self, entropy_weight: float, rows: slice | Tensor, nll: Tensor, entropy: Tensor, weight: Tensor | None
    ) -> None:
        """Subtracts the entropies times a weight from the losses that the kernel of a named loss wrote."""
        contributes, kept, _ = self._factors(rows, nll)
        d_entropy = torch.where(contributes, -entropy_weight * kept, 0.0)
        self.loss[rows] += torch.where(contributes, d_entropy * entropy, 0.0)
        if self.d_entropy is not None and weight is not None:
            self.d_entropy[rows] = d_entropy
            self._mark_contributes(rows, weight)

    def _mark_contributes(self, rows: slice | Tensor, weight: Tensor) -> None:
        if self.d_entropy is not None and self.contributes is not None:
            self.contributes[rows] = ((weight != 0) | (self.d_entropy[rows] != 0)).float()


def bytes_of(tokens: int, per_token: Sequence[Tensor], *, with_entropy: bool) -> int:
    """Returns `TokenHook.bytes`."""
    # Each argument and its derivative, selected and not; the same for log_prob; weights and conditions.
    return 4 * tokens * (12 + 4 * len(per_token) + 8 * with_entropy)


def log_prob_of(nll: Tensor, contributes: Tensor) -> Tensor:
    """Returns the log-probabilities (n,), 0 in rows that do not contribute. nll is never below 0, so they are never
    above 0, and never -0.0."""
    return 0.0 - torch.where(contributes, nll, 0.0)


def factors(log_prob: Tensor, row_weight: Tensor) -> Tensor:
    """Returns what multiplies each row's token loss, (n,): row_weight, NaN where log_prob is NaN.

    That is where the target is not a class, or a logit is NaN. Then the loss of that row is NaN, and so are its
    gradients, also if the token loss replaces NaN.
    """
    return torch.where(log_prob.isnan(), torch.nan, row_weight)


def call(token_loss: TokenLoss, log_prob: Tensor, values: Sequence[Tensor]) -> Tensor:
    """Returns token_loss(log_prob, *values), (n,) float32.

    Raises:
        RuntimeError: token_loss raised an exception, which is the cause.
        TypeError: the result is not a Tensor, or not float32.
        ValueError: the result has another shape, or is on another device.
    """
    with _named("token_loss"):
        # By name, because torch.compile cannot call a frozen dataclass, such as `Named`, that it has made itself.
        loss: Any = token_loss.__call__(log_prob, *values)
    must = f"token_loss must return a float32 Tensor of shape {tuple(log_prob.shape)}, the shape of log_prob"
    if not isinstance(loss, Tensor):
        raise TypeError(f"{must}, got {type(loss).__name__}")
    if loss.dtype != torch.float32:
        raise TypeError(f"{must}, got {str(loss.dtype).removeprefix('torch.')}")
    if loss.shape != log_prob.shape:
        raise ValueError(f"{must}, got shape {tuple(loss.shape)}")
    if loss.device != log_prob.device:
        raise ValueError(f"{must} on {log_prob.device}, got one on {loss.device}")
    return loss


def takes_entropy(token_loss: TokenLoss, with_entropy: bool = False) -> bool:
    """Returns whether a token loss takes the entropies. Named losses do if they have an entropy weight."""
    check_flag("with_entropy", with_entropy)
    if not isinstance(token_loss, Named):
        return with_entropy
    if with_entropy and not token_loss.entropy_weight:
        raise ValueError(
            f"with_entropy must be False for token_losses.{token_loss.name} without entropy_weight, got True"
        )
    return token_loss.entropy_weight != 0


def check_elementwise(token_loss: TokenLoss, arguments: Sequence[Tensor], *, with_entropy: bool) -> None:
    """Raises ValueError if the loss of a token, or its derivatives, depend on other tokens: `check_token_loss`."""
    number = torch.arange(len(arguments[0]), device=arguments[0].device)
    half, even = len(number) // 2, number % 2 == 0
    others = [torch.where(even, one, 0.5 * one.flip(0) - 0.25) for one in arguments]
    of_tokens = [f"per_token[{index}]" for index in range(len(arguments) - 1 - with_entropy)]
    names = [
        "loss",
        *(f"derivative with respect to {one}" for one in ["log_prob", *["entropy"] * with_entropy, *of_tokens]),
    ]
    expected = _results(token_loss, arguments)

    def of_every_second(*arguments: Tensor) -> Tensor:
        return torch.where(even, token_loss(*arguments), 0.0)

    for what, function, tokens, compared, given in (
        ("in reverse order", token_loss, number.flip(0), number >= 0, arguments),
        ("without the first half of the tokens", token_loss, number[half:], number >= 0, arguments),
        ("without the second half of the tokens", token_loss, number[:half], number >= 0, arguments),
        ("with other numbers in every second token", token_loss, number, even, others),
        ("of the losses of every second token", of_every_second, number, even, arguments),
    ):
        found = _results(function, [one[tokens] for one in given])
        for name, result, of_all in zip(names, found, expected, strict=True):
            same = torch.isclose(result, of_all[tokens], rtol=1e-4, atol=1e-6, equal_nan=True)
            wrong = (compared[tokens] & ~same).nonzero().flatten().tolist()
            if wrong:
                token = int(tokens[wrong[0]])
                raise ValueError(
                    f"token_loss must be elementwise, but the {name} of token {token} is "
                    f"{float(of_all[token]):g} with all tokens and {float(result[wrong[0]]):g} {what}"
                )


def _results(token_loss: TokenLoss, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Returns the loss of each row and its derivatives with respect to all arguments."""
    leaves = [one.clone() for one in arguments]
    loss, derivatives = call_and_differentiate(token_loss, leaves, [True] * len(leaves))
    return [loss, *(one for one in derivatives if one is not None)]


def call_and_differentiate(
    token_loss: TokenLoss, arguments: list[Tensor], needs_grad: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the loss of each row (n,), and its derivatives with respect to the arguments that need it, None for the
    others."""
    log_prob, *values = arguments
    check_levels("token_loss")
    leaves = [argument for argument, needed in zip(arguments, needs_grad, strict=True) if needed]
    with _plain_autograd(bool(leaves) or torch.is_grad_enabled(), log_prob.device.type):
        for leaf in leaves:
            leaf.requires_grad_()
        loss = call(token_loss, log_prob, values)
        check_transforms("the result of token_loss", loss)  # of a tensor that it closes over
        _check_closure(loss, leaves)
        found: list[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
        if leaves and loss.requires_grad:
            with _named("the backward pass of token_loss"):
                # The loss of a row depends on no other row, so the gradient of the sum is each row's derivative.
                given = torch.autograd.grad(loss, leaves, torch.ones_like(loss), allow_unused=True)
            found = [zero if one is None else one for one, zero in zip(given, found, strict=True)]
    derivatives = iter(found)
    return loss.detach(), [next(derivatives) if needed else None for needed in needs_grad]


def _check_closure(loss: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raises ValueError if the loss depends on a tensor that requires grad and is not an argument, so it gets none."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that accumulates the gradient of a leaf
        if variable is not None and not any(variable is leaf for leaf in leaves):
            raise ValueError(
                "token_loss must not close over a tensor that requires grad, got one that depends on a tensor of shape "
                f"{tuple(variable.shape)}: detach it, or expand it to target's shape and pass it in per_token"
            )
        waiting += [following for following, _ in node.next_functions]


@contextmanager
def _plain_autograd(differentiates: bool, device: str) -> Iterator[None]:
    """Records a graph if `differentiates`, in float32 and without the caller's hooks of saved tensors.

    The graph is differentiated before the call returns. With the hooks of activation checkpointing that would compute
    the checkpointed function again, and autocast could change dtypes.
    """
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # autocast does not support the meta device
    with (
        torch.set_grad_enabled(differentiates),
        # An operator runs below autograd, which would record nothing.
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        torch.autograd.graph.saved_tensors_hooks(_save, _saved),
        torch.autocast(device, enabled=False) if autocast else nullcontext(),
    ):
        yield


def _save(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _saved(saved: tuple[Tensor, int]) -> Tensor:
    """Returns a saved tensor. PyTorch does not check whether tensors that hooks save are changed in place."""
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError("a tensor that the derivative needs was changed in place")
    return tensor


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Says what raised an exception, which becomes the cause."""
    try:
        yield
    except torch.OutOfMemoryError:  # programs catch it by its type
        raise
    except Exception as error:
        raise RuntimeError(f"{what} raised {type(error).__name__}: {error}") from error
