"""The fused loss in trainers of trl: `patch(trainer)`.

`SFTTrainer`, `GRPOTrainer`, `DPOTrainer`, `KTOTrainer` and `RLOOTrainer` of trl 1.16.0 give their models a forward
method for `model(..., labels=labels, fused_lm_head=True)` (`add_fused_lm_head` in `trl/trainer/utils.py`). It computes
the log-probabilities and statistics of all tokens that count with `_ChunkedLogProbFunction.apply`
(`ChunkedLogProbFunction` in `trl/kernels/chunked_logprob.py`), which takes four matmuls with gradients. While the model
of a patched trainer is called, `_Installed.head` is called in its place.

The trainer computes its loss from the log-probabilities. Three matmuls are enough where the direction of the gradient
of this loss by the log-probabilities is a function of each log-probability and of numbers that are known before the
call (`trl_losses.Objective`): in SFT, and in GRPO for most options. `linear_token_loss_with_stats` then computes the
gradients together with the log-probabilities, and the backward pass scales them by a number. In GRPO with these
options, `trl_losses.GrpoLoss` computes the loss and the metrics in place of trl. The backward pass raises an error if
the gradient by the log-probabilities has another direction. In GRPO it compares them in the first step after each log,
and in each step of a subclass that computes log-probabilities in another way.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

try:
    import trl
except ImportError as error:
    raise ImportError('core_triton.hosts.trl needs trl: pip install "trl==1.16.*"') from error
from trl.trainer import utils  # pyright: ignore[reportMissingImports]

from core_triton.hosts.interface import OPTIONS, Patch, check_options, check_version
from core_triton.hosts.trl_losses import GrpoLoss, Metrics, Objective, is_of_tokens, sft_objective
from core_triton.linear_ce import linear_log_probs, linear_token_loss_with_stats

__all__ = ["patch", "unpatch"]

TESTED_VERSIONS = ("1.16",)
TRAINERS = ("SFTTrainer", "GRPOTrainer", "DPOTrainer", "KTOTrainer", "RLOOTrainer")
# Other trainers need more statistics than `linear_log_probs`, the function with a saved_budget, has.
TAKE_SAVED_BUDGET = ("GRPOTrainer", "RLOOTrainer")
# trl's names of what a head returns after the log-probabilities, in order, and the statistic that each is computed from
STATISTICS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logit",
    "is_top1": "argmax",
}
TOLERANCE = 1e-3  # of the entries of a gradient, relative to the largest one

_classes: dict[type, "_ClassPatch"] = {}
_trainers: "WeakSet[_Installed]" = WeakSet()
_replaced: dict[str, Any] = {}  # names of trl.trainer.utils while something is patched
# The patched trainers whose models are being called in this thread, the last one innermost
_called: ContextVar[tuple["_Installed", ...]] = ContextVar("called", default=())


def patch(trainer_or_class: Any = None, **options: Any) -> Patch:
    """Makes trainers of trl compute log-probabilities and statistics of tokens, and their gradients, with core_triton.

    Args:
        trainer_or_class: a trainer, before its `train()`; a class of trainers, for those that are made afterwards; or
            None, for the classes SFTTrainer, GRPOTrainer, DPOTrainer, KTOTrainer and RLOOTrainer, but those that are
            patched already. Subclasses of these are supported. If they compute the loss in another way, it takes four
            matmuls. A GRPOTrainer also gets another `_compute_loss` and another `log`, which adds the metrics of the
            loss to `_metrics`. Entropies have a gradient in calls of GRPO and RLOO that take four matmuls. In others, a
            gradient of them is an error in the backward pass.
        options: implementation, memory_budget, head_precision and batch_invariant of `linear_log_probs`, and for
            GRPOTrainer and RLOOTrainer its saved_budget, which holds for losses that take four matmuls without it.

    Returns:
        A context manager that calls `unpatch(trainer_or_class)` at the end of its block.

    Raises:
        RuntimeError: a version of trl that was not tested, or something that is patched already.
        TypeError: something that is not one of these trainers, or an unknown option.
        ValueError: an option of the trainer or of this function is not supported. The message names it.

    Example:
        >>> from core_triton.hosts.trl import patch
        >>> from trl import GRPOConfig, GRPOTrainer
        >>> trainer = GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(), train_dataset=prompts)
        >>> _ = patch(trainer)
        >>> trainer.train()
    """
    found = trl.__version__  # pyright: ignore[reportAttributeAccessIssue]
    check_version(__name__, "trl", found, TESTED_VERSIONS)
    check_options(options, (*OPTIONS, "saved_budget"))
    if trainer_or_class is None:
        classes = [cls for cls in (getattr(trl, name) for name in TRAINERS) if cls not in _classes]
        if not classes:
            raise RuntimeError("patch() was called already")
        for cls in classes:
            _check_saved_budget(cls, options)
        for cls in classes:
            _patch_class(cls, options, of_all=True)
    elif isinstance(trainer_or_class, type):
        if trainer_or_class in _classes:
            raise RuntimeError(f"{trainer_or_class.__name__} is patched already")
        _check_saved_budget(_base(trainer_or_class), options)
        _patch_class(trainer_or_class, options)
    else:
        _check_saved_budget(_base(type(trainer_or_class)), options)
        if _patch_of(trainer_or_class) is not None:
            raise RuntimeError(f"this {type(trainer_or_class).__name__} is patched already")
        _patch_trainer(trainer_or_class, options)
    return Patch(partial(unpatch, trainer_or_class), trainer_or_class)


def unpatch(trainer_or_class: Any = None) -> None:
    """Undoes `patch(trainer_or_class)`. For a class, it also undoes the patches of its trainers.

    Raises:
        RuntimeError: it is not patched.
    """
    if trainer_or_class is None:
        classes = [cls for cls, patched in _classes.items() if patched.of_all]
        if not classes:
            raise RuntimeError("unpatch() needs patch() before it")
        for cls in classes:
            _unpatch_class(cls)
    elif isinstance(trainer_or_class, type):
        if trainer_or_class not in _classes:
            raise RuntimeError(f"{trainer_or_class.__name__} is not patched")
        _unpatch_class(trainer_or_class)
    else:
        installed = _patch_of(trainer_or_class)
        if installed is None:
            raise RuntimeError(f"this {type(trainer_or_class).__name__} is not patched")
        installed.remove()
    _replace_functions()


def _base(cls: type) -> type:
    """Returns the class of trl that a class of trainers is or has as a base."""
    for name in TRAINERS:
        base = getattr(trl, name)
        if issubclass(cls, base):
            return base
    raise TypeError(f"trainer_or_class must be one of {', '.join(TRAINERS)} or a class of these, got {cls.__name__}")


def _is_of_trl(trainer: Any, name: str) -> bool:
    """Returns whether a method of a trainer is that of trl, and neither a subclass nor the trainer has another one."""
    return getattr(getattr(trainer, name), "__func__", None) is getattr(_base(type(trainer)), name)


def _check_saved_budget(base: type, options: dict[str, Any]) -> None:
    saved_budget = options.get("saved_budget", 0)
    if saved_budget and base.__name__ not in TAKE_SAVED_BUDGET:
        raise ValueError(
            f"saved_budget must be 0 for {base.__name__}, got {saved_budget}: only {' and '.join(TAKE_SAVED_BUDGET)} "
            "take it"
        )


class _ClassPatch(NamedTuple):
    installed: "WeakSet[_Installed]"  # in trainers that the patched class made
    init: Callable[..., None] | None  # the attribute of the class before, None if it had none
    of_all: bool  # whether `patch()` patched it


def _patch_class(cls: Any, options: dict[str, Any], of_all: bool = False) -> None:
    init = cls.__init__
    installed: WeakSet[_Installed] = WeakSet()

    @wraps(init)
    def patched(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if cls in _classes and _patch_of(self) is None:
            installed.add(_patch_trainer(self, options))

    _classes[cls] = _ClassPatch(installed, vars(cls).get("__init__"), of_all)
    cls.__init__ = patched


def _unpatch_class(cls: Any) -> None:
    patched = _classes.pop(cls)
    if patched.init is None:
        del cls.__init__
    else:
        cls.__init__ = patched.init
    for installed in list(patched.installed):
        installed.remove()


def _patch_of(trainer: Any) -> "_Installed | None":
    return vars(trainer).get("_core_triton")


def _patch_trainer(trainer: Any, options: dict[str, Any]) -> "_Installed":
    given = {"torch_compile": trainer.args.torch_compile}
    if _base(type(trainer)).__name__ == "SFTTrainer":  # which computes the logits for these two
        given["label_smoothing_factor"] = trainer.args.label_smoothing_factor
        given["compute_loss_func"] = trainer.compute_loss_func
    for name, value in given.items():
        if value:
            raise ValueError(f"{type(trainer).__name__} cannot be patched with {name}, got {name}={value}")
    trainer._core_triton = installed = _Installed(trainer, options)
    _trainers.add(installed)
    _replace_functions()
    return installed


class _Installed:
    """The patch of one trainer: hooks of its models, and in GRPO its `_compute_loss` and `log`."""

    def __init__(self, trainer: Any, options: dict[str, Any]) -> None:
        self.trainer = trainer
        self.name = type(trainer).__name__
        self.options = {name: value for name, value in options.items() if name != "saved_budget"}
        self.saved_budget = options.get("saved_budget", 0)
        self.hooks: list[Any] = []
        for model in {trainer.model, getattr(trainer, "ref_model", None)} - {None}:
            self.hooks.append(model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True))
            self.hooks.append(model.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        # Makes the objective of the loss that the trainer is computing, given the number of tokens of the head.
        self.objective: Callable[[int], Objective] | None = None
        base = _base(type(trainer)).__name__
        if base == "SFTTrainer" and _is_of_trl(trainer, "compute_loss"):
            objective = sft_objective(trainer)
            self.objective = lambda tokens: objective
        self.metrics = Metrics(trainer)
        self.logs = vars(trainer).get("log")  # the method that the trainer has as an attribute
        if base == "GRPOTrainer" and _is_of_trl(trainer, "_compute_loss"):
            trainer._compute_loss = self._compute_loss
            trainer.log = self._log

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if vars(self.trainer).get("_compute_loss") == self._compute_loss:
            del self.trainer._compute_loss
        if vars(self.trainer).get("log") == self._log:
            del self.trainer.log
            if self.logs is not None:
                self.trainer.log = self.logs
        del self.trainer._core_triton
        _trainers.discard(self)
        self.metrics.read()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """`GRPOTrainer._compute_loss`, which calls the model once with gradients."""
        if _patch_of(self.trainer) is not self or not is_of_tokens(self.trainer):
            return type(self.trainer)._compute_loss(self.trainer, model, inputs)
        # A hook of the model may change log-probabilities too, so the first step after each log is checked.
        checked = not self.metrics.waiting or not _is_of_trl(self.trainer, "_get_per_token_logps_and_entropies")
        loss = GrpoLoss(self.trainer, inputs, self.metrics, checked=checked)
        self.objective = loss.objective
        try:
            return loss.compute(model)
        finally:
            self.objective = None

    def _log(self, *args: Any, **kwargs: Any) -> None:
        """`GRPOTrainer.log`, with the metrics that are still on the device."""
        self.metrics.read()
        log = self.logs or partial(type(self.trainer).log, self.trainer)
        log(*args, **kwargs)

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("fused_lm_head"):
            _called.set((*_called.get(), self))

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("fused_lm_head"):
            _called.set(_called.get()[:-1])

    def head(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """`ChunkedLogProbFunction.apply`: log-probabilities, and what `STATISTICS` names or None, (N,) each.

        Args:
            hidden: (N, D), of the tokens that count.
            weight: (V, D). Of another dtype than hidden, it is float32, or cast.
            bias: (V,) or None.
            targets: (N,) classes.
            temperature: the logits after the soft cap are divided by it.
            chunk_size: is not used. memory_budget limits the memory.
            final_logit_softcapping: the soft cap, or None.
            logit_scale: factor before the soft cap.
            outputs: which statistics are computed, of `STATISTICS`.
        """
        if hasattr(weight, "ds_id"):
            raise ValueError(f"DeepSpeed ZeRO-3 is not supported by core_triton.hosts.trl: {self.name} uses it")
        if weight.dtype not in (hidden.dtype, torch.float32) and not torch.is_autocast_enabled(hidden.device.type):
            weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        softcap = final_logit_softcapping
        # softcap / T * tanh(logit_scale * t / softcap): softcap of core_triton divides what logit_scale multiplied.
        options = {
            "linear_bias": bias,
            "logit_scale": logit_scale / temperature,
            "softcap": None if softcap is None else softcap / temperature,
            **self.options,
        }
        differentiated = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in (hidden, weight, bias)
        )
        wanted = [name for name in STATISTICS if name in outputs]
        objective = None
        if differentiated and self.objective is not None:
            objective = self.objective(len(targets))
        if differentiated and objective is None and not set(wanted) - {"entropy"}:
            found = linear_log_probs(hidden, weight, targets, saved_budget=self.saved_budget, **options)
            return found.log_prob, found.entropy if wanted else None, None, None, None
        stats = ("log_prob", *(STATISTICS[name] for name in wanted))
        if objective is not None:
            token_loss, per_token, token_weight = objective.token_loss, objective.per_token, objective.token_weight
            options |= {"token_weight": token_weight, "reduction": "sum"}
        else:
            token_loss, per_token = torch.neg, ()
            options |= {"reduction": "none" if differentiated else "sum"}
        loss, of_tokens = linear_token_loss_with_stats(
            hidden, weight, targets, token_loss, *per_token, stats=stats, **options
        )
        if objective is not None:
            log_prob = _LogProbsOfLoss.apply(loss, of_tokens.log_prob, objective, self.name)
        else:
            log_prob = -loss if differentiated else of_tokens.log_prob
        entropy = of_tokens.entropy
        if differentiated and entropy is not None:
            entropy = _EntropyWithoutGradient.apply(loss, entropy, self.name)
        return (
            log_prob,
            entropy,
            None if of_tokens.sum_squared_probs is None else of_tokens.sum_squared_probs.log(),
            of_tokens.mean_logit,
            None if of_tokens.argmax is None else of_tokens.argmax == targets,
        )


class _Function:
    """In place of trl's `_ChunkedLogProbFunction`."""

    @staticmethod
    def apply(*arguments: Any) -> Any:
        called = _called.get()
        return (called[-1].head if called else _replaced["_ChunkedLogProbFunction"].apply)(*arguments)


def _leaves_out_tokens(device: torch.device) -> bool:
    """In place of trl's `_use_triton`: whether the head gets only the tokens that count."""
    return bool(_called.get()) or _replaced["_use_triton"](device)


def _replace_functions() -> None:
    """Replaces the functions in trl while a trainer or a class is patched."""
    needed = bool(_trainers) or bool(_classes)
    if needed and not _replaced:
        for name, function in (("_ChunkedLogProbFunction", _Function), ("_use_triton", _leaves_out_tokens)):
            _replaced[name] = getattr(utils, name)
            setattr(utils, name, function)
    elif not needed and _replaced:
        for name, function in _replaced.items():
            setattr(utils, name, function)
        _replaced.clear()


class _LogProbsOfLoss(torch.autograd.Function):
    """Log-probabilities (N,), whose gradient is that of a loss () that was computed from them, times a number."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, log_prob: Tensor, objective: Objective, trainer: str) -> Tensor:
        ctx.save_for_backward(log_prob)
        ctx.objective, ctx.trainer = objective, trainer
        return log_prob.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        (log_prob,) = ctx.saved_tensors
        derivative = ctx.objective.derivative(log_prob).double()
        d_log_prob = gradient.double()
        factor = (d_log_prob @ derivative) / (derivative @ derivative).clamp(min=torch.finfo(torch.float64).tiny)
        if ctx.objective.checked and len(derivative):
            rest = (d_log_prob - factor * derivative).abs()
            wrong = rest.amax() > TOLERANCE * d_log_prob.abs().amax()  # False with NaN, which propagates
            wrong = wrong & (derivative.abs().amax() > ctx.objective.rounding)
            if wrong.item():  # waits for the device
                raise RuntimeError(
                    f"the gradient of the loss of {ctx.trainer} by the log-probabilities is not the one that "
                    "core_triton.hosts.trl computes for its options. Undo the patch with "
                    "core_triton.hosts.trl.unpatch to compute another loss"
                )
        return factor.float(), None, None, None


class _EntropyWithoutGradient(torch.autograd.Function):
    """Entropies (N,) that come from the same pass as a loss. A gradient of them is an error, because it would be lost:
    in trl they have one."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, entropy: Tensor, trainer: str) -> Tensor:
        ctx.trainer = trainer
        ctx.set_materialize_grads(False)
        return entropy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        if gradients[0] is not None:
            raise RuntimeError(
                f"the loss of {ctx.trainer} has a gradient with respect to the entropies, which core_triton.hosts.trl "
                "does not compute there. Undo the patch with core_triton.hosts.trl.unpatch to compute it"
            )
        return None, None, None
