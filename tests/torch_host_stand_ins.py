"""Modules with the interfaces of trainers that the tests do not install: names, arguments and results, on materialized
logits. Each function says which files of which version have its interface."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional


@contextlib.contextmanager
def importable(*modules: ModuleType) -> Iterator[None]:
    """Makes modules importable, and the classes of adapters that are made from them."""
    importlib.import_module("torch._dynamo")  # optimizers load it, and newer versions look for spmd_types
    from core_triton.hosts import torchtitan as adapter

    names = {one.__name__: one for one in modules}
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(names)
    adapter._loss_class.cache_clear()
    try:
        yield
    finally:  # other modules that were imported meanwhile stay
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
        adapter._loss_class.cache_clear()


def torch_hosts() -> contextlib.AbstractContextManager[None]:
    """Makes all hosts of this file importable."""
    return importable(*torchtitan(), *megatron(), *of_examples())


def is_installed(name: str) -> bool:
    """Returns whether a package is installed."""
    return importlib.util.find_spec(name) is not None


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names, __path__=[])
    return made


# torchtitan


def torchtitan(version: str = "0.3.0") -> list[ModuleType]:
    """torchtitan 0.3.0: `torchtitan/components/loss.py`, `torchtitan/models/llama3/config_registry.py`,
    `torchtitan/distributed/utils.py` and `spmd_types.py`, and `spmd_types/__init__.py` of spmd_types 0.2.3."""
    backend, meshes = ["spmd_types"], list[Any]()

    @contextlib.contextmanager
    def set_current_spmd_mesh(mesh: Any) -> Iterator[None]:
        meshes.append(mesh)
        yield
        meshes.pop()

    def spmd_mesh_size(axis_name: str) -> int:
        names = meshes[-1].mesh_dim_names if meshes else ()
        return meshes[-1].size(names.index(axis_name)) if axis_name in names else 1

    def redistribute(x: Tensor, axis: Any, *, src: str, dst: str) -> Tensor:
        assert (src, dst) == ("R", "I")
        result: Any = _ReplicateToInvariant.apply(x, axis)
        return result

    return [
        module("torchtitan", __version__=version),
        module("torchtitan.components"),
        module(
            "torchtitan.components.loss",
            IGNORE_INDEX=-100,
            BaseLoss=BaseLoss,
            CrossEntropyLoss=CrossEntropyLoss,
            ChunkedLossWrapper=ChunkedLossWrapper,
        ),
        module("torchtitan.models"),
        module("torchtitan.models.llama3"),
        module("torchtitan.models.llama3.config_registry", llama3_8b=SimpleNamespace),
        module("torchtitan.distributed"),
        module(
            "torchtitan.distributed.utils",
            get_spmd_backend=lambda: backend[0],
            set_spmd_backend=lambda name: backend.__setitem__(0, name),
        ),
        module(
            "torchtitan.distributed.spmd_types",
            current_spmd_mesh=lambda: meshes[-1],
            spmd_mesh_size=spmd_mesh_size,
            set_current_spmd_mesh=set_current_spmd_mesh,
        ),
        module(
            "spmd_types",
            R="R",
            I="I",
            P="P",
            redistribute=redistribute,
            no_typecheck=contextlib.nullcontext,
            is_type_checking=lambda: False,
        ),
    ]


class BaseLoss:
    """`Configurable` of `torchtitan/config/configurable.py` has `build`, and gives a Config its class."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        def build(self, **kwargs: Any) -> Any:
            return self._owner(config=replace(self), **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls  # pyright: ignore[reportAttributeAccessIssue]


class CrossEntropyLoss(BaseLoss):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        global_vocab_size: int | None = None

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        pass

    def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **unused: Any) -> Any:
        loss = functional.cross_entropy(
            pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100
        )
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class ChunkedLossWrapper(BaseLoss):
    """All of the sequence is one chunk."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        num_chunks: int = 8
        loss_fn: Any = field(default_factory=CrossEntropyLoss.Config)

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        self.loss_fn = config.loss_fn.build(compile_config=compile_config)
        self.lm_head: nn.Module | None = None

    def set_lm_head(self, lm_head: nn.Module) -> None:
        self.lm_head = lm_head

    def __call__(self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, **inputs: Any) -> Any:
        assert self.lm_head is not None
        return self.loss_fn(self.lm_head(pred), labels, global_valid_tokens, **inputs)


class _ReplicateToInvariant(torch.autograd.Function):
    """The gradient is whole on each rank: one rank returns it, and the others return 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rank = group.rank()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (gradient if ctx.rank == 0 else torch.zeros_like(gradient)), None


# Megatron-core


def megatron(version: str = "0.19.2") -> list[ModuleType]:
    """megatron-core 0.19.2: the files that `core_triton/hosts/megatron.py` lists, and
    `megatron/core/transformer/transformer_config.py`."""
    return [
        module("megatron"),
        module("megatron.core", __version__=version),
        module("megatron.core.parallel_state", initialize_model_parallel=lambda size: None),
        module("megatron.core.tensor_parallel", ColumnParallelLinear=ColumnParallelLinear),
        module("megatron.core.models"),
        module("megatron.core.models.gpt", GPTModel=GPTModel),
        module("megatron.core.models.gpt.gpt_layer_specs", get_gpt_layer_local_spec=lambda: None),
        module("megatron.core.transformer"),
        module("megatron.core.transformer.transformer_config", TransformerConfig=TransformerConfig),
        module(
            "megatron.core.distributed",
            DistributedDataParallel=DistributedDataParallel,
            DistributedDataParallelConfig=DistributedDataParallelConfig,
        ),
    ]


@dataclass
class TransformerConfig:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    use_cpu_initialization: bool = False
    gradient_accumulation_fusion: bool = False
    bias_dropout_fusion: bool = True
    defer_embedding_wgrad_compute: bool = False
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    use_mup: bool = False
    mup_base_hidden_size: int | None = None
    mup_output_mult: float = 1.0


def _gathered(own: Tensor, group: Any) -> Tensor:
    """Returns what the ranks have, one after the other along the first axis."""
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


class _Sum(torch.autograd.Function):
    """The sum over ranks. Each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        own = own.clone()
        dist.all_reduce(own, group=group)
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class _Part(torch.autograd.Function):
    """A rank's part of the first axis. The gradient is that of all parts."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return whole.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gathered(gradient, ctx.group), None


class _Whole(torch.autograd.Function):
    """The parts of all ranks along the first axis. The gradient, whole on each rank, is cut."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.chunk(ctx.group.size())[ctx.group.rank()], None


class _Linear(torch.autograd.Function):
    """The matmul of `LinearWithGradAccumulationAndAsyncCommunication`. The gradient of the hidden states is summed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, layer: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.layer = layer
        whole = _gathered(hidden, layer.tp_group) if layer.sequence_parallel else hidden
        ctx.save_for_backward(whole, weight)
        return whole @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (whole, weight), group = ctx.saved_tensors, ctx.layer.tp_group
        d_hidden = gradient @ weight
        dist.all_reduce(d_hidden, group=group)
        if ctx.layer.sequence_parallel:
            d_hidden = d_hidden.chunk(group.size())[group.rank()]
        return d_hidden, gradient.flatten(0, 1).T @ whole.flatten(0, 1), None


class ColumnParallelLinear(nn.Module):
    def __init__(self, config: Any, input_size: int, rows: int, tp_group: Any, weight: Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.tp_group = tp_group
        self.output_size_per_partition = rows
        self.sequence_parallel = config.sequence_parallel and tp_group.size() > 1
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion
        self.skip_bias_add = self.disable_grad_reduce = self.is_expert = False
        self.gtp_remat_size = 1
        self.bias = None

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Any, Tensor | None]:
        return _Linear.apply(input_, self.weight if weight is None else weight, self), None


class GPTModel(nn.Module):
    """A table of embeddings, one linear layer and the output layer."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        share_embeddings_and_output_weights: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.tp_group = config, dist.group.WORLD
        tables = [nn.Parameter(torch.randn(vocab_size, config.hidden_size) / 4) for _ in range(2)]
        self.first_row = vocab_size // config.tensor_model_parallel_size * dist.get_rank()
        own = [
            nn.Parameter(table.detach().chunk(config.tensor_model_parallel_size)[dist.get_rank()]) for table in tables
        ]
        self.embedding = nn.Module()
        self.embedding.word_embeddings = nn.Module()
        self.embedding.word_embeddings.weight = own[0]
        self.decoder = nn.Linear(config.hidden_size, config.hidden_size)
        for parameter in self.decoder.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.output_layer = ColumnParallelLinear(
            config,
            config.hidden_size,
            len(own[1]),
            self.tp_group,
            None if share_embeddings_and_output_weights else own[1],
        )
        if share_embeddings_and_output_weights:
            vars(own[0])["zero_out_wgrad"] = True

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        whole: Any = _Whole.apply(logits.movedim(-1, 0), self.tp_group)  # (V, s, b)
        return functional.cross_entropy(whole.permute(2, 0, 1).float(), labels, reduction="none")

    def _scale_logits(self, logits: Tensor) -> Tensor:
        return logits * self.config.mup_output_mult if self.config.use_mup else logits

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
    ) -> Tensor:
        embedding: Any = self.embedding
        table: Tensor = embedding.word_embeddings.weight
        rows = input_ids.T - self.first_row
        mine = (rows >= 0) & (rows < len(table))
        hidden: Any = functional.embedding(rows.where(mine, 0), table) * mine[..., None]
        hidden = _Sum.apply(hidden, self.tp_group)
        if self.config.sequence_parallel:
            hidden = _Part.apply(hidden, self.tp_group)
        hidden = torch.tanh(self.decoder(hidden))
        output_weight = table if self.share_embeddings_and_output_weights else None
        if output_processor is not None:
            return output_processor(
                hidden_states=hidden,
                output_layer=self.output_layer,
                output_weight=output_weight,
                labels=labels,
                loss_mask=loss_mask,
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                decoder_input=decoder_input,
                inference_context=None,
                packed_seq_params=None,
                runtime_gather_output=None,
                context=output_processor_context,
                compute_language_model_loss=self.compute_language_model_loss,
                scale_logits=self._scale_logits,
                config=self.config,
            )
        logits = self._scale_logits(self.output_layer(hidden, weight=output_weight)[0])
        return logits.transpose(0, 1) if labels is None else self.compute_language_model_loss(labels, logits)


@dataclass
class DistributedDataParallelConfig:
    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False


class DistributedDataParallel(nn.Module):
    """Adds gradients to main_grad when autograd has accumulated them."""

    def __init__(self, config: Any, ddp_config: Any, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            vars(parameter).update(main_grad=torch.zeros(parameter.shape), grad_added_to_main_grad=False)
            parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Any) -> None:
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        for parameter in self.parameters():
            vars(parameter)["main_grad"].zero_()
            vars(parameter)["grad_added_to_main_grad"] = False

    def no_sync(self) -> Any:
        return contextlib.nullcontext()

    def finish_grad_sync(self) -> None:
        pass


# Other trainers of docs/hosts.md


def of_examples() -> list[ModuleType]:
    """`get_batch` and `loss_func` of `pretrain_gpt.py`, in the repository of megatron-core; ai2-olmo-core 3.0.0,
    nemo-automodel 0.7.0, axolotl 0.21.0 and lightning 2.6.6: the files that docs/hosts.md names."""
    names = ("olmo_core", "olmo_core.nn", "olmo_core.nn.functional", "axolotl", "axolotl.integrations")
    names += ("nemo_automodel", "nemo_automodel.components", "nemo_automodel.components.loss")
    return [
        *map(module, names),
        module("pretrain_gpt", get_batch=None, loss_func=None),
        module("olmo_core.nn.functional.cross_entropy_loss", _fused_linear_cross_entropy_loss=None),
        module("nemo_automodel.components.loss.linear_ce_base", LinearCrossEntropy=LinearCrossEntropy),
        module("axolotl.integrations.base", BasePlugin=object),
        module("lightning", LightningModule=nn.Module),
    ]


class LinearCrossEntropy(nn.Module):
    @staticmethod
    def materialize_lm_weight(lm_weight: Tensor, *, grad_reduce_group: Any = None) -> Tensor:
        return lm_weight
