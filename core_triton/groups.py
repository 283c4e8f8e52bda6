"""The groups of arguments and of results of the functions of `ops.py`."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core_triton.problem import NO_GRADIENTS, NeedsGrad
from core_triton.vocab_shard import VocabShard, own_tokens
from linear_ce.spec import LossSpec


class Arrays(NamedTuple):
    """The arrays of a call. Their gradients have the same order."""

    input: Tensor  # (N, D)
    linear_weight: Tensor  # (V, D)
    linear_bias: Tensor | None  # (V,)
    target: Tensor  # (N,) int64
    class_weight: Tensor | None  # (K,) float32

    def needs_grad(self) -> NeedsGrad:
        """Returns which gradients a backward pass may need."""
        if not torch.is_grad_enabled():
            return NO_GRADIENTS
        input, linear_weight, bias = self.differentiated()
        return NeedsGrad(input.requires_grad, linear_weight.requires_grad, bias is not None and bias.requires_grad)

    def differentiated(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self[:3]

    def of_rows(self, rows: slice) -> "Arrays":
        return self._replace(input=self.input[rows], target=self.target[rows])


class TokenWeights(NamedTuple):
    """The arguments of `row_math.row_weights` besides the targets and the class weights."""

    token_weight: Tensor | None  # (N,)
    normalizer: Tensor | None  # ()


class Options(NamedTuple):
    """The options of a call, in types that the schema of an operator supports."""

    mean: bool  # the reduction's denominator is part of a row's weight
    ignore_index: int
    label_smoothing: float
    z_loss_weight: float
    softcap: float | None
    logit_scale: float
    vocab_size: int
    memory_budget: int
    implementation: str
    splits_head: bool
    saved_budget: int  # 0 but for losses of rows and log-probabilities: `saved_ops.py`
    batch_invariant: bool = False
    vocab_group: str = ""  # name of the process group whose ranks have shards of the head; "" where there is none
    vocab_ranks: int = 0
    vocab_offset: int = 0  # class index of the first row of this rank's shard
    shard_rows: int = 0  # of the largest shard
    reduce_dtype: str = "float32"  # of the sum of d_input over the ranks
    rank_tokens: int = 0  # of each rank of vocab_group, where input has this rank's and target those of all; else 0

    # Methods, because torch.compile of PyTorch 2.10 does not evaluate properties of NamedTuples.

    def shard(self) -> VocabShard | None:
        if not self.vocab_group:
            return None
        of_group = self.vocab_group, self.vocab_ranks, self.vocab_offset, self.shard_rows
        return VocabShard(*of_group, self.reduce_dtype, self.rank_tokens)

    def of_problem(self) -> dict[str, Any]:
        """Returns the options by the names that `Problem` has for them."""
        named = {"spec": self.spec(), "classes": self.vocab_size, "vocab_offset": self.vocab_offset}
        return named | {"shard": self.shard()}

    def most_classes(self) -> int:
        """`Problem.most_classes`."""
        return self.shard_rows if self.vocab_group else self.vocab_size

    def own_tokens(self, rows: int) -> slice:
        """Returns which tokens of the call the `rows` rows of this rank's input are."""
        return own_tokens(self.shard(), rows)

    def spec(self) -> LossSpec:
        reduction = "mean" if self.mean else "sum"
        rest = self.label_smoothing, self.z_loss_weight, self.softcap, self.logit_scale
        precision = "float32" if self.splits_head else "input"
        return LossSpec(reduction, self.ignore_index, *rest, head_precision=precision)


class Losses(NamedTuple):
    """What `losses` and `loss_and_gradients` return besides gradients: (N,) float32 each, or () for a reduced loss.

    row_weight and lse are None unless `statistics` or the backward pass needs them. The fields after them are None
    unless they are part of `statistics`, an int of `linear_ce.statistics`.
    """

    loss: Tensor  # weighted; () where reduced
    row_weight: Tensor | None
    lse: Tensor | None
    target_logit: Tensor | None
    max: Tensor | None  # the largest logit
    argmax: Tensor | None  # int64
    entropy: Tensor | None
    mean_logit: Tensor | None
    sum_squared_probs: Tensor | None


class LogProbs(NamedTuple):
    """What `log_probs` returns: (N,) float32 each."""

    log_prob: Tensor
    entropy: Tensor
    lse: Tensor
    row_weight: Tensor | None  # where there is a backward pass


def grouped(group: Any, found: Iterable[Any], there: Iterable[bool]) -> Any:
    """Returns a group of the next results in `found`, with None for the fields where `there` is False."""
    rest = iter(found)
    return group(*[next(rest) if one else None for one in there])


def kept(group: Any, made: Iterable[Any], there: Iterable[bool]) -> Any:
    """Returns a group of the results in `made` where `there` is True, with None for the other fields."""
    return group(*[one if wanted else None for one, wanted in zip(made, there, strict=True)])
