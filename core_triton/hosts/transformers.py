"""The fused loss in causal language models of transformers: `patch(model)`.

While a patched model is in training mode and gets labels, its head (`get_output_embeddings()`) returns a stand-in for
the logits. The model applies its factor or soft cap to the stand-in, and its loss function computes the loss from it
(`deferred.py`). This needs no list of models. Without labels or in evaluation mode a patched model is unchanged.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import metadata
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakSet, WeakValueDictionary

from torch import nn

try:
    import transformers
except ImportError as error:
    message = 'core_triton.hosts.transformers needs transformers: pip install "transformers==5.24.*"'
    raise ImportError(message) from error
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core_triton.hosts.deferred import ForwardCall, FusedHead
from core_triton.hosts.interface import Patch, check_options, check_version

__all__ = ["patch", "unpatch"]

TESTED_VERSIONS = ("5.20", "5.21", "5.22", "5.23", "5.24")
TESTED_LIGER_VERSIONS = ("0.8.5",)
HOW_TO_GET_LOGITS = (
    "To get logits, call the model without labels, or in evaluation mode (model.eval()), or after "
    "core_triton.hosts.transformers.unpatch or the end of `with patch(...):`"
)

_classes: dict[type, "_ClassPatch"] = {}  # patched in place
_model_classes: WeakValueDictionary[str, type] = WeakValueDictionary()  # of patched models
_of_all: dict[str, Any] = {}  # of `patch()`: its classes and PreTrainedModel.post_init


class _Installed:
    """A patch of a model or a class. Others may keep its forward method after unpatch, such as accelerate's autocast.
    That of a class is then off. That of a model is for models of the class that the model has until unpatch. A copy
    has this class too, and stays patched when the model is unpatched."""

    def __init__(self) -> None:
        self.on = True
        self.heads: WeakSet[FusedHead] = WeakSet()  # that it changed
        self.model_class: type | None = None  # of the patch of a model

    def covers(self, model: PreTrainedModel) -> bool:
        """Returns whether a model is patched."""
        return self.on and (self.model_class is None or isinstance(model, self.model_class))

    def remove(self) -> None:
        self.on = False
        for head in list(self.heads):
            _restore_head(head)


class _ClassPatch(NamedTuple):
    installed: _Installed
    before: dict[str, Any]  # the attributes of the class before, None for those that it had not


def patch(model_or_class: Any = None, *, liger: bool = False, **options: Any) -> Patch:
    """Makes causal language models of transformers compute their loss with `linear_cross_entropy`.

    In training mode and with labels, the loss is computed in the head's forward call, without the logits, and
    `outputs.logits` raises an error for any use. In all other cases the model is unchanged.

    Args:
        model_or_class: a model, also one with adapters of peft; a class of models, for all its models; or None, for all
            classes in transformers' mapping of causal language models. Patch a model before you pass it to
            torch.compile, DistributedDataParallel or a Trainer. `fully_shard` and `deepspeed.initialize` may come
            before or after.
        liger: whether the model also gets the other kernels of liger-kernel, such as norms, rotary embeddings and MLPs,
            with Liger's own losses off. Only for a model. Liger has no way to undo this, so `unpatch` leaves them, and
            Liger also replaces functions that other models of the same type call.
        options: implementation, memory_budget, head_precision and batch_invariant of `linear_cross_entropy`.

    Returns:
        A context manager that calls `unpatch(model_or_class)` at the end of its block.

    Raises:
        ImportError: liger-kernel is not installed.
        RuntimeError: a version of transformers or liger-kernel that was not tested, or something that is patched
            already.
        TypeError: something that is not a model or a class of models, or an unknown option.
        ValueError: the value of an option; a model that is not supported, by the loss or by Liger, with the reason.
            What a model does with its logits is known only when it runs: `LogitsError`, a RuntimeError, names what is
            not supported.

    Example:
        >>> import torch, transformers
        >>> from core_triton.hosts.transformers import patch
        >>> sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2)
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=1))
        >>> _ = patch(model)
        >>> tokens = torch.randint(50, (2, 8))
        >>> model.train()(input_ids=tokens, labels=tokens).loss.backward()
    """
    check_version(__name__, "transformers", transformers.__version__, TESTED_VERSIONS)
    check_options(options)
    is_class = isinstance(model_or_class, type) and issubclass(model_or_class, PreTrainedModel)
    if liger and (model_or_class is None or is_class):
        raise ValueError(
            f"liger must be False for {'all models' if model_or_class is None else 'a class'}, got {liger}"
        )
    if model_or_class is None:
        _patch_all(options)
    elif is_class:
        _patch_class(model_or_class, options)
    else:
        model = _base_model(model_or_class)
        apply_liger = _liger_kernels(model) if liger else None
        _patch_model(model, options)
        if apply_liger is not None:
            try:
                apply_liger()
            except Exception:
                unpatch(model)
                raise
    return Patch(partial(unpatch, model_or_class), model_or_class)


def unpatch(model_or_class: Any = None) -> None:
    """Undoes `patch(model_or_class)`.

    Raises:
        RuntimeError: it is not patched, or `fully_shard` got the model after `patch`.
    """
    if model_or_class is None:
        if not _of_all:
            raise RuntimeError("unpatch() needs patch() before it")
        PreTrainedModel.post_init = _of_all["post_init"]
        for cls in _of_all["classes"]:
            if cls in _classes:
                _unpatch_class(cls)
        _of_all.clear()
    elif isinstance(model_or_class, type):
        if model_or_class not in _classes:
            raise RuntimeError(f"{model_or_class.__name__} is not patched")
        _unpatch_class(model_or_class)
    else:
        model = _base_model(model_or_class)
        cls: Any = type(model)
        if "unpatched" not in vars(cls):
            raise RuntimeError(
                f"{cls.__name__} was sharded after patch, and cannot be unpatched"
                if hasattr(cls, "unpatched")
                else f"this {cls.__name__} is not patched"
            )
        model.__class__ = cls.unpatched
        for module in model.modules():  # the head, and copies of it, such as those of peft
            if isinstance(module, FusedHead):
                _restore_head(module)


def _base_model(model: Any) -> PreTrainedModel:
    """Returns the model, without the wrapper of peft."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "model_or_class must be a model of transformers, as it is before torch.compile or a wrapper gets it, or a "
            f"class of such models, got {type(model).__name__}"
        )
    return model


def _liger_kernels(model: PreTrainedModel) -> Callable[[], None]:
    """Returns a function that gives a model Liger's kernels, but not its losses."""
    try:
        from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("liger=True needs liger-kernel: pip install liger-kernel==0.8.5") from error
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:  # as a nightly build, or without its metadata
        found = "no version"
    check_version(__name__, "liger-kernel", found, TESTED_LIGER_VERSIONS)
    name, kind = type(model).__name__, model.config.model_type
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise ValueError(f"liger must be False for {name}: Liger has no kernels for models of type {kind}")
    losses = {"cross_entropy", "fused_linear_cross_entropy"} & set(inspect.signature(apply).parameters)
    return partial(apply, model=model, **dict.fromkeys(losses, False))


def _patch_model(model: PreTrainedModel, options: dict[str, Any]) -> None:
    cls = type(model)
    if _is_patched(cls):
        raise RuntimeError(f"{cls.__name__} is patched already")
    if "forward" in vars(model):
        raise ValueError(
            f"the forward method of this {cls.__name__} was replaced, by accelerate or by another patch: patch the "
            "model before that"
        )
    patched = _model_class(cls, options, uuid4().hex)
    _fused_head(model, patched.forward.installed)
    model.__class__ = patched


def _model_class(cls: type[PreTrainedModel], options: dict[str, Any], key: str) -> Any:
    """Returns the class of a patched model, of its copies, and of models that were pickled with this key."""
    if key in _model_classes:
        return _model_classes[key]
    installed = _Installed()
    # Names of classes decide what transformers does, so this class has the name of the original.
    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}

    def reduce(self: PreTrainedModel, protocol: Any) -> Any:
        made: Any = cls.__reduce_ex__(self, max(protocol, 2))
        # fully_shard gives a model a subclass of its class.
        return (_new_model, (cls, options, key), *made[2:]) if type(self) is installed.model_class else made

    names |= {"forward": _fused_forward(cls, options, installed), "__setattr__": _keeps_forward(cls)}
    installed.model_class = type(cls.__name__, (cls,), {**names, "__reduce_ex__": reduce, "unpatched": cls})
    _model_classes[key] = installed.model_class
    return installed.model_class


def _new_model(cls: type[PreTrainedModel], options: dict[str, Any], key: str) -> PreTrainedModel:
    """Returns a patched model without its state, for pickle and copy."""
    check_version(__name__, "transformers", transformers.__version__, TESTED_VERSIONS)
    made = _model_class(cls, options, key)
    return made.__new__(made)


def _patch_class(cls: type[PreTrainedModel], options: dict[str, Any]) -> None:
    if _is_patched(cls):
        raise RuntimeError(f"{cls.__name__} is patched already")
    installed = _Installed()
    forward = _fused_forward(cls, options, installed)
    attributes = {"forward": forward, "__setattr__": _keeps_forward(cls)}
    _classes[cls] = _ClassPatch(installed, {name: vars(cls).get(name) for name in attributes})
    for name, value in attributes.items():
        setattr(cls, name, value)


def _unpatch_class(cls: type) -> None:
    installed, before = _classes.pop(cls)
    for name, value in before.items():
        if value is None:
            delattr(cls, name)
        else:
            setattr(cls, name, value)
    installed.remove()


INSTEAD = {  # by the package that would replace the forward method
    "liger_kernel": "with use_liger_kernel=True of Trainer, set "
    'liger_kernel_config={"fused_linear_cross_entropy": False}',
    "trl": "patch the trainer with core_triton.hosts.trl, and not its model",
}


def _keeps_forward(cls: type) -> Callable[[Any, str, Any], None]:
    """Returns a `__setattr__` of a patched class that refuses the forward methods of Liger and trl. They compute the
    loss without a call of the head, so the patch would have no effect."""
    set_attribute: Any = cls.__setattr__

    @wraps(set_attribute)
    def guarded(self: Any, name: str, value: Any) -> None:
        if name == "forward":
            # trl gives its function the __module__ of the one before.
            modules = getattr(value, "__module__", None), getattr(value, "__globals__", {}).get("__name__")
            for package in {(module or "").split(".")[0] for module in modules} & INSTEAD.keys():
                raise RuntimeError(
                    f"{package} would replace the forward method of this {type(self).__name__}, so that the patch of "
                    f"core_triton has no effect: {INSTEAD[package]}, or undo the patch"
                )
        set_attribute(self, name, value)

    return guarded


def _is_patched(cls: type) -> bool:
    return hasattr(cls.forward, "installed")  # pyright: ignore[reportAttributeAccessIssue]


def _patch_all(options: dict[str, Any]) -> None:
    """Patches the classes of causal language models that are loaded, and others when they make their first model."""
    if _of_all:
        raise RuntimeError("patch() was called already")
    post_init = PreTrainedModel.post_init
    classes: list[type] = []

    def patch_once(cls: type[PreTrainedModel]) -> None:
        if cls.__name__ in CAUSAL_LANGUAGE_MODELS and _place_of_labels(cls) is not None and not _is_patched(cls):
            _patch_class(cls, options)
            classes.append(cls)

    @wraps(post_init)
    def patch_at_end(self: PreTrainedModel) -> None:
        post_init(self)
        patch_once(type(self))

    _of_all.update(post_init=post_init, classes=classes)
    for cls in list(_subclasses(PreTrainedModel)):
        patch_once(cls)
    PreTrainedModel.post_init = patch_at_end


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


CAUSAL_LANGUAGE_MODELS = {
    name
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in ([names] if isinstance(names, str) else names)
}


def _place_of_labels(cls: type) -> int | None:
    """Returns the place of labels among the arguments of the forward method after self."""
    names = list(inspect.signature(cls.forward).parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return names.index("labels") - 1 if "labels" in names else None


def _fused_forward(cls: type, options: dict[str, Any], installed: _Installed) -> Callable[..., Any]:
    """Returns the forward method of a class in which losses of training are computed in the head."""
    forward: Callable[..., Any] = cls.forward  # pyright: ignore[reportAttributeAccessIssue]
    place = _place_of_labels(cls)
    if place is None:
        raise ValueError(f"{cls.__name__} is not supported: its forward method has no argument labels")

    @wraps(forward)
    def fused(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        labels = args[place] if len(args) > place else kwargs.get("labels")
        if labels is None or not self.training or not installed.covers(self):
            return forward(self, *args, **kwargs)
        head = _fused_head(self, installed)
        if head.forward_call is not None:
            if head.forward_call.patch is installed:
                raise RuntimeError(
                    f"{type(self).__name__} was called with labels before another such call has ended: threads cannot "
                    "share a patched model that is trained"
                )
            return forward(self, *args, **kwargs)  # a subclass calls the forward method of its base
        call = ForwardCall(installed, type(self).__name__, options, HOW_TO_GET_LOGITS)
        head.forward_call = call
        try:
            output = forward(self, *args, **kwargs)
        finally:
            head.forward_call = None
            call.end()
        if call.losses == 0:
            without = "torch.nn.functional.cross_entropy of its logits"
            if not call.sources:
                without = "a call of the module that get_output_embeddings returns"
            raise ValueError(f"{type(self).__name__} is not supported: it computed its loss without {without}")
        return output

    # Not __wrapped__: `Accelerator.unwrap_model(keep_fp32_wrapper=False)` would follow it and remove the patch.
    del fused.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
    vars(fused)["__signature__"] = inspect.signature(forward)
    vars(fused)["installed"] = installed  # `_is_patched` looks for it
    return fused


def _fused_head(model: PreTrainedModel, installed: _Installed) -> FusedHead:
    """Returns the head of a model, which becomes a FusedHead if it is not one yet."""
    name = type(model).__name__
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(f"{name} is not supported: its head is sharded by tensor parallelism")
    head: Any = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{name} is not a causal language model: its get_output_embeddings() returns None")
    if hasattr(head, "modules_to_save"):  # peft trains a copy of the head
        saved = not head.disable_adapters and head.active_adapters
        head = head.modules_to_save[head.active_adapters[0]] if saved else head.original_module
    if isinstance(head, FusedHead):
        return head
    cls = type(head)
    if hasattr(head, "lora_A") or hasattr(head, "base_layer"):
        raise ValueError(
            f"{name} is not supported: its head has an adapter of peft ({cls.__name__}). Leave the head out of "
            "target_modules, or train all of it with modules_to_save"
        )
    if hasattr(head, "token_adapter"):
        raise ValueError(
            f"{name} is not supported: trainable_token_indices of peft change its head or an embedding that is tied to "
            "it. Train all of it with modules_to_save"
        )
    if not isinstance(head, nn.Linear) or cls.forward is not nn.Linear.forward:
        raise ValueError(f"{name} is not supported: its head must be a torch.nn.Linear, got {cls.__name__}")
    if "forward" in vars(head):
        raise ValueError(f"{name} is not supported: the forward method of its head was replaced, as by device_map")
    # fully_shard and parametrizations give a module a subclass of its class.
    head.__class__ = FusedHead if cls is nn.Linear else type(f"Fused{cls.__name__}", (FusedHead, cls), {})
    assert isinstance(head, FusedHead)
    head.forward_call = None
    installed.heads.add(head)
    return head


def _restore_head(head: Any) -> None:
    cls: Any = type(head)
    if cls is FusedHead:
        head.__class__ = nn.Linear
    elif len(cls.__bases__) == 2 and cls.__bases__[0] is FusedHead:
        head.__class__ = cls.__bases__[1]
    else:
        # fully_shard or a parametrization got it after patch: without a call of a patched model, it is nn.Linear
        return
    del head.forward_call
