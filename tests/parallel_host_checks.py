"""Trainings with the adapters of torchtitan and Megatron-core, in one process and on several. They use the installed
hosts where there are some, and stand-ins otherwise."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch_host_stand_ins import importable, is_installed, megatron, torchtitan

STEPS = 20
VOCABULARY, HIDDEN = 64, 32
BATCH, SEQUENCE = 2, 12


def tokens_and_labels(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Returns tokens and the labels of each, of which some are -100."""
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    labels = tokens.roll(-1, 1)
    labels[0, : 3 + seed] = -100
    return tokens, labels


# torchtitan


def torchtitan_modules(*, installed: bool) -> contextlib.AbstractContextManager[None]:
    return importable() if installed else importable(*torchtitan())


class Decoder(nn.Module):
    """The end of torchtitan's `Decoder` (`torchtitan/models/common/decoder.py`), after a table of embeddings."""

    _skip_lm_head = False

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(torch.tanh(self.tok_embeddings(tokens)))
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def titan_loss(lm_head: nn.Module, **options: Any) -> Any:
    """Returns the loss of core_triton for the output layer of a model."""
    from core_triton.hosts.torchtitan import LinearCrossEntropyLoss  # pyright: ignore[reportAttributeAccessIssue]

    loss = LinearCrossEntropyLoss.Config(**options).build(compile_config=None)
    loss.set_lm_head(lm_head)
    return loss


def train_titan(
    fused: bool, model: Any, seed: int = 1, count: Tensor | None = None, steps: int = STEPS
) -> tuple[Tensor, list[Tensor]]:
    """Returns the losses of steps of `Trainer._forward_backward_body` and an optimizer, and the parameters. The loss is
    that of core_triton, or torchtitan's own."""
    from torchtitan.components.loss import CrossEntropyLoss  # pyright: ignore[reportMissingImports]

    model._skip_lm_head = fused
    loss_fn = titan_loss(model.lm_head) if fused else CrossEntropyLoss.Config().build(compile_config=None)
    tokens, labels = tokens_and_labels(seed)
    count = (labels != -100).sum() if count is None else count
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, metrics = loss_fn(model(tokens), labels, count, positions=None)
        assert metrics == {}
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters: list[Any] = [one.detach() for one in model.parameters()]
    return torch.stack(losses), [one.full_tensor() if hasattr(one, "full_tensor") else one for one in parameters]


def check_titan_fsdp2(rank: int, ranks: int, *, tied: bool) -> None:
    """FSDP2 as `apply_fsdp_to_decoder` (`torchtitan/distributed/fsdp.py`) applies it: the norm and the output layer are
    one group, and gradients are summed."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    count: Any = sum((tokens_and_labels(seed)[1] != -100).sum() for seed in range(1, ranks + 1))
    results = []
    with torchtitan_modules(installed=is_installed("torchtitan")):
        for fused in (False, True):
            torch.manual_seed(0)
            model = Decoder(tied)
            fully_shard(
                [model.tok_embeddings, model.norm, model.lm_head] if tied else [model.norm, model.lm_head], mesh=mesh
            )
            fully_shard(model, mesh=mesh)
            gathers: list[str] = []
            for one in model.modules():
                if isinstance(one, FSDPModule):
                    one.set_gradient_divide_factor(1.0)
                    one.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
            model.lm_head.register_forward_pre_hook(lambda *_, gathers=gathers: gathers.append("head"))
            losses, parameters = train_titan(fused, model, rank + 1, count)
            dist.all_reduce(losses)
            results.append((losses, parameters))
            assert not fused or gathers == ["head"] * STEPS
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert results[0][0][-1] < results[0][0][0] / 2  # it has learned something


def check_titan_tensor_parallel(rank: int, ranks: int, *, backend: str, classes: int) -> None:
    """The hidden states are the same on all ranks, and each has a part of the classes, with and without DTensors."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    group = mesh.get_group("tp")
    torch.manual_seed(0)
    head: Any = nn.Linear(HIDDEN, classes, bias=False)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    labels = tokens_and_labels()[1]
    labels[labels >= 0] %= classes
    count = torch.tensor(17)
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum") / count
    d_hidden, d_weight = torch.autograd.grad(expected, (hidden, head.weight))
    whole = head.weight.detach()
    with torchtitan_modules(installed=is_installed("torchtitan")), contextlib.ExitStack() as stack:
        from torchtitan.distributed import spmd_types, utils  # pyright: ignore[reportMissingImports]

        stack.callback(utils.set_spmd_backend, utils.get_spmd_backend())
        utils.set_spmd_backend(backend)
        given: Any = hidden.detach().requires_grad_()
        if backend == "spmd_types":
            stack.enter_context(spmd_types.set_current_spmd_mesh(mesh))
            head.weight = nn.Parameter(whole.chunk(ranks)[rank])
        else:
            head.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
            given = DTensor.from_local(given, mesh, [Replicate()])
            given.retain_grad()
        loss, _ = titan_loss(head)(given, labels, count)
        assert type(loss) is Tensor
        loss.backward()
        of_hidden: Any = given.grad
        if backend == "spmd_types":
            dist.all_reduce(of_hidden, group=group)  # as the backward pass of torchtitan's norm does, whose output is R
            of_weight = head.weight.grad
        else:
            of_weight: Any = head.weight.grad
            of_hidden, of_weight = of_hidden.to_local(), of_weight.to_local()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(of_hidden, d_hidden)
        torch.testing.assert_close(of_weight, d_weight.chunk(ranks)[rank])
        with torch.no_grad():
            torch.testing.assert_close(titan_loss(head)(given.detach(), labels)[0], expected * count)


# Megatron-core


@contextlib.contextmanager
def megatron_modules(*, installed: bool) -> Iterator[None]:
    """Makes Megatron-core importable. The installed one is changed to run on a CPU, with a LayerNorm that sequence
    parallelism allows."""
    if not installed:
        with importable(*megatron()):
            yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron and what it imports warn about what is not installed
        from megatron.core.tensor_parallel.random import (  # pyright: ignore[reportMissingImports]
            CudaRNGStatesTracker,
        )
        from megatron.core.transformer.torch_norm import (  # pyright: ignore[reportMissingImports]
            WrappedTorchNorm,
        )

        with (
            mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
            mock.patch.object(torch.cuda, "current_stream"),
            mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
            mock.patch.object(WrappedTorchNorm, "__new__", _norm),
        ):
            yield


def _norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> nn.Module:
    made = nn.LayerNorm(hidden_size, eps)
    for parameter in made.parameters():
        vars(parameter)["sequence_parallel"] = config.sequence_parallel
    return made


def gpt_model(*, ranks: int = 1, tied: bool = False, sequence_parallel: bool = False, mup: bool = False) -> Any:
    from megatron.core.models.gpt import GPTModel  # pyright: ignore[reportMissingImports]
    from megatron.core.models.gpt.gpt_layer_specs import (  # pyright: ignore[reportMissingImports]
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        **({"use_mup": True, "mup_base_hidden_size": HIDDEN // 2, "mup_output_mult": 0.5} if mup else {}),
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )


def gpt_inputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the positional arguments of a `GPTModel`."""
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    return tokens, torch.arange(SEQUENCE).expand(BATCH, -1), mask


def train_megatron(
    fused: bool, *, fusion: bool = False, masked: bool = True, options: Any = None, **model_options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Returns the losses of steps of two micro-batches, and the parameters. `fusion`: the output layer adds its
    gradient to main_grad."""
    from megatron.core.distributed import (  # pyright: ignore[reportMissingImports]
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )

    from core_triton.hosts.megatron import output_processor

    model = gpt_model(**model_options)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=fusion)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    # The installed Megatron adds the gradient of its own layer with a CUDA extension, so only that of the loss does.
    model.output_layer.gradient_accumulation_fusion = fusion and fused
    more = {"output_processor": output_processor(**(options or {}))} if fused else {}
    losses = []
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        total = torch.zeros(())
        for seed in (1, 2):
            tokens, labels = tokens_and_labels(seed)
            loss_mask = (labels != -100).float()
            inputs, labels = gpt_inputs(tokens), labels.clamp(min=0)
            with ddp.no_sync() if seed == 1 else contextlib.nullcontext():
                given = {"loss_mask": loss_mask} if masked else {}
                output = ddp(*inputs, labels=labels, **given, **more)
                assert (output.shape, output.dtype) == (labels.shape, torch.float32)
                loss = (output * loss_mask).sum() / loss_mask.sum() / 2
                loss.backward()
                total += loss.detach()
        ddp.finish_grad_sync()
        with torch.no_grad():
            for parameter in model.parameters():
                gradient: Any = getattr(parameter, "main_grad")  # noqa: B009
                if getattr(parameter, "sequence_parallel", False):  # a rank's tokens gave a part of it
                    dist.all_reduce(gradient)
                parameter -= 0.5 * gradient
        losses.append(total)
    return torch.stack(losses), [one.detach() for one in model.parameters()]


def check_megatron(rank: int, ranks: int, *, sequence_parallel: bool) -> None:
    """Tensor parallelism has the losses and the parameters of Megatron's own loss, with a tied output layer or not, and
    with gradients that are added to main_grad."""
    options = {"ranks": ranks, "sequence_parallel": sequence_parallel}
    installed = is_installed("megatron")
    with megatron_modules(installed=installed):
        from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

        parallel_state.initialize_model_parallel(ranks)
        for tied in (False, True):
            expected = train_megatron(False, tied=tied, **options)
            assert expected[0][-1] < 0.7 * expected[0][0]  # it has learned something
            for fusion in (False, True):
                found = train_megatron(True, tied=tied, fusion=fusion, **options)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if installed:
            parallel_state.destroy_model_parallel()


PARALLEL_HOST_CHECKS: dict[str, Callable[[int, int], None]] = {
    "titan_fsdp2": partial(check_titan_fsdp2, tied=False),
    "titan_fsdp2_tied": partial(check_titan_fsdp2, tied=True),
    "titan_dtensor": partial(check_titan_tensor_parallel, backend="partial_dtensor", classes=61),
    "titan_spmd_types": partial(check_titan_tensor_parallel, backend="spmd_types", classes=61),
    "megatron": partial(check_megatron, sequence_parallel=False),
    "megatron_sequence_parallel": partial(check_megatron, sequence_parallel=True),
}
