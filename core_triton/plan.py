"""The plan of a call: which path runs, with which kernels, in which chunks.

`make_plan` is a pure function of shapes, dtypes, strides, device and options, and all these decisions are made here. A
plan determines speed and memory. It changes results only by rounding.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from core_triton import tile_config
from core_triton.chunk_config import choose_chunked, choose_stored
from core_triton.tile_config import DInputTiling, ScaledExpConfig, TileConfig
from linear_ce import chunk_cost, float32_tiles
from linear_ce.chunk_cost import ROW_BLOCK
from linear_ce.chunking import (
    LEAST_ROW_GRADIENTS,
    ChunkConfig,
    SavedRowCount,
    describe_chunks,
    describe_plan,
    logits_again,
    plan_passes,
)
from linear_ce.cost_coefficients import COEFFICIENTS

Path = Literal["scaled_exp", "recompute", "stored_logits", "chunked"]

Stage = Literal[
    "loss_and_gradients",
    "entropy_loss_and_gradients",  # of a token loss that takes the entropies
    "losses",
    "statistics",
    "saved_rows",
    "row_gradients",
    "gradients",
]


class MatrixLayout(NamedTuple):
    """The properties of a matrix that a plan depends on."""

    shape: tuple[int, int]
    strides: tuple[int, int]  # in elements
    itemsize: int
    dtype: str  # "bfloat16", ...
    aligned: bool  # its address is a multiple of 16 bytes

    def tma_compatible(self, *, by_row: bool = False, pointers: bool = False) -> bool:
        """Whether a tensor descriptor (TMA) can describe the matrix, or kernels can read it through `pointers`.

        One stride must be 1, the other a positive multiple of 16 bytes, and the address a multiple of 16 bytes. With
        `by_row` the stride of the columns must be 1. Kernels that read through `pointers` need the same, because they
        copy 16 bytes at a time. Besides, their strides must be less than MAX_STRIDE, and the length of contiguous rows
        must be a multiple of 16 bytes.
        """
        row, column = self.strides
        if not self.aligned:
            return False
        if pointers and max(self.strides) >= tile_config.MAX_STRIDE:
            return False
        if pointers and column == 1 and self.shape[1] * self.itemsize % 16 != 0:
            return False
        by_rows = column == 1 and row > 0 and row * self.itemsize % 16 == 0
        return by_rows or (not by_row and row == 1 and column > 0 and column * self.itemsize % 16 == 0)

    def gemm_compatible(self) -> bool:
        """Whether cuBLAS's GEMM can read the matrix in place. PyTorch copies other matrices first."""
        (rows, columns), (row, column) = self.shape, self.strides
        return (column == 1 and row >= max(columns, 1)) or (row == 1 and column >= max(rows, 1))


class DeviceInfo(NamedTuple):
    """The properties of a device that a plan depends on."""

    type: str  # "cuda", "cpu", ...
    capability: int  # 80, 90, ...; 0 where there are no kernels
    multiprocessors: int
    gpu: str  # the name in `linear_ce.gpus.GPUS` whose speed stands for the device's: `known_gpu`


class PlanKey(NamedTuple):
    """Everything that a plan depends on."""

    stage: Stage
    input: MatrixLayout  # (N, D)
    linear_weight: MatrixLayout  # (V, D), or a shard of it
    classes: int  # K
    copied_bytes: int  # of contiguous copies of strided vectors, part of the workspace
    label_smoothing: float
    softcap: bool
    entropy: bool  # computed, or differentiated
    d_input: bool
    d_weight: bool
    d_bias: bool
    statistics: int  # numbers for each row and class block besides sums of exponentials
    memory_budget: int
    implementation: str
    device: DeviceInfo
    grad_into: bool = False  # d_weight is added to a float32 tensor of the caller
    into_aligned: bool = True  # its address is a multiple of 16 bytes
    splits_head: bool = False  # into two matrices of the input's dtype
    batch_invariant: bool = False
    ranks: int = 0  # that have shards of the head, whose largest has `classes` rows; 0 where the head is whole
    gathers: bool = False  # the ranks have different tokens, N in all, which they gather chunk by chunk
    float32_kernel: bool = True  # may compute matmuls


@dataclass(frozen=True)
class ExecutionPlan:
    """How a call runs.

    Args:
        implementation: "triton", "triton_sm80" (on a newer GPU the kernels for an A100) or "chunked".
        path: "scaled_exp" stores scaled exponentials: 3 matmuls with gradients, 1 without. "recompute" recomputes the
            logits for the gradients: 4 matmuls. "stored_logits" is for float32: the logits stay in memory between the
            passes if `chunks.keeps_logits`: 3 matmuls, else 4. "chunked" uses PyTorch operators only.
        chunks: the rows of a chunk, and what depends on them.
        gpu: name in `linear_ce.gpus.GPUS` of the GPU, or of the one that stands for it.
        tokens: N.
        memory_budget: bytes.
        matmuls: which of "logits", "d_input" and "d_weight" are computed: `matmuls_of`. For the gradients of losses of
            rows, and of token losses of the entropies, the logits of the losses, which have another plan, come first.
            `explain` also lists logits that a scalar loss computes again for its gradients.
        casts_head: whether the head is copied, one vocabulary chunk at a time, to the input's dtype or to rows that the
            kernels can read. A copy of a split head has both parts in a row.
        hopper: whether the matmul kernels are those for sm_90, in Gluon, or those for any GPU.
        pointers: whether the kernels for any GPU read matrices through pointers, or through tensor descriptors.
        arch: what Triton compiles them for, such as "sm80"; None for the GPU itself.
        tile: the tile of logits; None if no kernel computes them.
        ampere_tile: the tile of `ampere_logits` and `ampere_gradients`; None if other kernels run. It has the same rows
            and classes as `tile`.
        programs: multiprocessors of the GPU. A persistent kernel has one program for each, or `TileBlocks.programs`, or
            that of d_input `DInputTiling.programs`.
        d_input_tiling: of our kernel of d_input; None if cuBLAS's GEMM and a pass over its result compute it. On Hopper
            the kernel reads a split head in place, and only the logits need copies of it.
        d_weight_kernel: whether our kernel computes d_weight, or cuBLAS's GEMM.
        holds_rows: whether the memory of d_input holds the packed rows of the input until their gradients replace
            them. Those of a first chunk in the memory of d_weight have a buffer.
        smooths: whether the mean row of the head is computed, a small matmul of cuBLAS.
        fits_float16: whether scaled exponentials of float16 are fitted to its range (`float16.py`). Where no gradient
            follows, now or from a token loss, they are sums in float32 only and need not be.
        saved: which rows of the call the forward pass saves for the backward pass; None if no row.
        others: how the gradients of the other rows are computed, where a part is saved and `explain` asks; None else.
        batch_invariant: whether log_prob, lse and d_input of a row do not depend on the other rows, bit for bit.
        reads_split_head: whether the kernel of repairs reads a split head in place.
        splits_in_place: whether all kernels do, and split it in registers. Otherwise those of the logits take a copy of
            both parts of each vocabulary chunk.
        float32_programs: number of programs of `float32_matmuls.py` that the GPU runs at a time, a wave. 0: PyTorch
            computes the matmuls of float32.
        float32_waves: number of waves in which programs share the inner dimension of tiles, at most.
        gathering_ranks: ranks that have different tokens, N in all, which they gather chunk by chunk; 0: the call has
            all tokens.
    """

    implementation: str
    path: Path
    chunks: ChunkConfig | ScaledExpConfig
    gpu: str
    tokens: int
    memory_budget: int
    matmuls: tuple[str, ...]
    casts_head: bool = False
    hopper: bool = False
    pointers: bool = False
    arch: str | None = None
    tile: TileConfig | None = None
    ampere_tile: TileConfig | None = None
    programs: int = 0
    d_input_tiling: DInputTiling | None = None
    d_weight_kernel: bool = False
    holds_rows: bool = False
    smooths: bool = False
    fits_float16: bool = False
    saved: SavedRowCount | None = None
    others: "ExecutionPlan | None" = None
    batch_invariant: bool = False
    reads_split_head: bool = False
    splits_in_place: bool = False
    float32_programs: int = 0
    float32_waves: int = 0
    gathering_ranks: int = 0

    @property
    def chunk_config(self) -> ChunkConfig:
        """The chunks of every path but "scaled_exp"."""
        assert isinstance(self.chunks, ChunkConfig)
        return self.chunks

    @property
    def scaled_exp_config(self) -> ScaledExpConfig:
        assert isinstance(self.chunks, ScaledExpConfig)
        return self.chunks

    @property
    def class_block(self) -> int:
        """Classes of a class block, of which the kernels of the logits write one number for each row."""
        assert self.tile is not None
        return tile_config.SPLIT_CLASS_BLOCK if self.splits_in_place else self.tile.block_v

    @property
    def keeps_logits(self) -> bool:
        """Whether the logits of a chunk, or their exponentials, stay in memory until its gradients are computed."""
        return self.path == "scaled_exp" or self.chunk_config.keeps_logits

    def with_logits_again(self) -> "ExecutionPlan":
        """This plan of a scalar loss, which lists its logits twice where the gradients compute them again."""
        return self if self.keeps_logits else replace(self, matmuls=logits_again(self.matmuls))

    @property
    def uses_library(self) -> bool:
        """Whether a matmul of PyTorch (cuBLAS) runs."""
        ours = self.path == "scaled_exp" and self.d_input_tiling is not None and self.d_weight_kernel
        return self.smooths or not ours

    def __str__(self) -> str:
        others, tile = self.others, self.tile
        family = "Triton's, for rows of stored logits" if self.path == "stored_logits" else None
        if self.tile is not None:
            triton = "Triton's, for compute capability 8.x and 12.x" if self.pointers else "Triton's, for any GPU"
            family = "Hopper's, in Gluon" if self.hopper else triton
        float32 = self.float32_programs > 0
        ours = {
            "logits": float32 or self.tile is not None,
            "d_input": float32 or self.d_input_tiling is not None,
            "d_weight": float32 or self.d_weight_kernel,
        }
        text = describe_plan(
            path=self.path,
            kernels=family,
            tile=tile_config.SPLIT_TILE if self.splits_in_place else tile and (tile.block_n, tile.block_v),
            chunks=self.describe_chunks(),
            tokens=self.tokens,
            casts_head=self.casts_head,
            matmuls={name: ours[name.split()[0]] for name in self.matmuls},
            library="cuBLAS" if self.path != "chunked" else "PyTorch",
            workspace=max(plan.chunks.bytes for plan in (self, others) if plan is not None),
            budget=self.memory_budget,
            saved=self.saved,
            saves_logits=self.keeps_logits,
            others=None if others is None else (others.path, others.describe_chunks()),
            fixed_rows=self.scaled_exp_config.d_input_rows if self.batch_invariant else None,
        )
        if not self.gathering_ranks:
            return text
        rows = self.chunks.rows // self.gathering_ranks
        return f"{text}\ntokens: gathered chunk by chunk, up to {rows} of each of {self.gathering_ranks} ranks"

    def describe_chunks(self) -> str:
        """Returns the chunks in words."""
        first_rows = self.scaled_exp_config.first_rows if self.path == "scaled_exp" else 0
        return describe_chunks(self.tokens, self.chunks.rows, first_rows)


MOST_SMOOTHING, LEAST_SMOOTHED_CLASSES = 0.3, 256  # of terms of rank one; beyond, they cancel too much of the rest


def smoothing_is_linear(key: PlanKey) -> bool:
    """Whether the terms of label smoothing are of rank one, and small enough to be added in the gradients' dtypes."""
    return not key.softcap and key.label_smoothing <= MOST_SMOOTHING and key.classes >= LEAST_SMOOTHED_CLASSES


def shards_are_scaled(key: PlanKey) -> bool:
    """Whether ranks that have shards of the vocabulary compute the logits once."""
    return key.input.dtype == "bfloat16" or not key.label_smoothing


COPIES = 2  # copies of the head that a chunk usually makes where it must be cast: for the logits and for d_input


EXCHANGED = 8  # numbers of a row that the ranks of a vocabulary exchange, at most

SHARD_ROW = 48  # bytes of a row of the call beside those of `packed_rows.PackedRows`, in `shard_rows.py`

GATHERED_ROW = 48  # bytes of a row beside these where tokens are gathered: target, weight, and those of `token_slices`


def matmuls_of(key: PlanKey) -> tuple[str, ...]:
    """Returns the names of the matmuls of a call. A split head takes two where it is an operand."""
    names = ("logits", *["d_input"] * key.d_input, *["d_weight"] * key.d_weight)
    if not key.splits_head:
        return names
    return tuple(one for name in names for one in ([name] if name == "d_weight" else [f"{name} high", f"{name} low"]))


@lru_cache(maxsize=4096)
def make_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a call.

    Raises:
        ValueError: memory_budget cannot hold the smallest chunk. The message names the smallest budget that can. Or the
            stage is "saved_rows", and the kernels of the call store nothing that can be saved. Or the call must be
            batch-invariant and is not. Or its tokens must be gathered chunk by chunk and cannot be.
    """
    plan = _any_plan(key)
    if key.gathers and (plan.path != "scaled_exp" or key.stage != "loss_and_gradients" or key.batch_invariant):
        raise ValueError("only three matmuls of scaled exponentials gather tokens chunk by chunk")
    why = why_variant(key, plan) if key.batch_invariant else None
    if why is not None:
        raise ValueError(f"batch_invariant=True {why}")
    return replace(plan, batch_invariant=key.batch_invariant)


def why_variant(key: PlanKey, plan: ExecutionPlan) -> str | None:
    """Returns why the results of a row depend on the other rows of a call, the rest of a sentence, or None.

    cuBLAS chooses a kernel, and with it the order of a sum, by the number of rows. So none of its matmuls may compute
    logits or d_input. `recompute` sums over vocabulary chunks that depend on the number of rows.
    """
    x, w = key.input, key.linear_weight
    if plan.path == "chunked":
        return "needs the kernels, got implementation 'chunked'"
    if key.stage == "gradients":
        return "has no gradients of entropy and lse: their matmuls are cuBLAS's. Differentiate log_prob only"
    if key.stage in ("row_gradients", "entropy_loss_and_gradients") and key.entropy:
        return "has no gradient of the entropy (with_entropy, or an entropy_weight): its matmuls are cuBLAS's"
    if x.dtype != "bfloat16":
        return f"needs a bfloat16 input, got {x.dtype}"
    if plan.path != "scaled_exp":
        return f"needs fewer than {tile_config.MAX_STRIDE} classes on this GPU, got {key.classes}"
    if not key.d_input or (plan.d_input_tiling is not None and not key.splits_head):
        return None
    if w.dtype != x.dtype:
        return f"needs a {x.dtype} linear_weight for the gradient of input, got {w.dtype}"
    if plan.casts_head:
        return (
            "needs a linear_weight whose rows start at multiples of 16 bytes for the gradient of input, "
            f"got shape {w.shape} with strides {w.strides}"
        )
    return f"needs compute capability 8.x, 9.0 or 12.x for the gradient of input, got {key.device.capability / 10}"


def _any_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a call, whether or not it must be batch-invariant and is."""
    if key.stage == "entropy_loss_and_gradients" and (key.implementation == "chunked" or key.input.dtype == "float32"):
        return make_plan(key._replace(stage="loss_and_gradients"))
    if key.stage in ("row_gradients", "entropy_loss_and_gradients"):
        # The exponentials in 16 bits have too few bits for the logarithms in the gradient of an entropy.
        plan = None if key.entropy else _plan_a_again(key)
        if plan is None:
            # `why_variant` has a message for this stage.
            keys = [key._replace(stage="gradients", batch_invariant=False)]
            if key.stage == "entropy_loss_and_gradients":  # the losses are part of the call
                no_gradient = {"d_input": False, "d_weight": False, "d_bias": False, "grad_into": False}
                keys.append(keys[0]._replace(stage="statistics", **no_gradient))
            plan = plan_passes(*(partial(make_plan, one) for one in keys))
        first = (f"{name} of the losses" for name in plan.matmuls if name.startswith("logits"))
        return replace(plan, matmuls=(*first, *plan.matmuls))
    if key.implementation == "chunked":
        return _chunked_plan(key)
    if key.input.dtype == "float32":
        return _stored_plan(key)
    (tokens, hidden), x, w = key.input.shape, key.input, key.linear_weight
    of_call, exchanged = _of_call(key), _exchanged(key)
    capability, gpu = key.device.capability, key.device.gpu
    if key.implementation == "triton_sm80" and capability >= 90:
        # The times of these kernels, relative to those of memory, are about the same on a newer GPU as on an A100.
        capability, gpu = 80, "a100"
    # Otherwise Triton would compile kernels of 8.0 to other instructions (wgmma) on a newer GPU.
    arch = "sm80" if capability < 90 <= key.device.capability and key.device.type == "cuda" else None
    capability = tile_config.kernel_capability(capability)
    hopper = capability == 90 and key.device.type == "cuda"
    pointers = capability < 90  # Triton has no asynchronous copies through descriptors there
    scaled_exp = (
        (not key.ranks or shards_are_scaled(key))
        and (not key.label_smoothing or smoothing_is_linear(key))
        and (
            key.stage == "losses"
            or (
                # "statistics" runs what computes the gradients, so that both have the same sums, bit for bit.
                key.stage in ("loss_and_gradients", "saved_rows", "statistics")
                # Rows of exponentials would be too long for the kernels' int32 offsets.
                and not (pointers and tile_config.padded(key.classes) >= tile_config.MAX_STRIDE)
            )
        )
    )
    readable = w.tma_compatible(pointers=pointers)
    splits_in_place = key.splits_head and readable and hopper and scaled_exp
    tile = tile_config.choose_tile(capability, hidden * (1 + key.splits_head))
    width = hidden * (1 + (key.splits_head and not splits_in_place))  # of the operands of the logits
    casts_head = (w.dtype != x.dtype and not splits_in_place) or not readable
    of_kernels: dict[str, Any] = {"hopper": hopper, "pointers": pointers, "arch": arch, "tile": tile}
    of_kernels |= {"casts_head": casts_head, "programs": key.device.multiprocessors}
    needs_grad = key.d_input or key.d_weight or key.d_bias
    padded_hidden = tile_config.padded_hidden(width, x.itemsize)
    if pointers and padded_hidden >= tile_config.MAX_STRIDE:
        most, split = tile_config.MAX_STRIDE // (1 + key.splits_head), ""
        if key.splits_head:
            split = ' with head_precision "float32"'
        raise ValueError(f"input must have fewer than {most} columns on this GPU{split}, got {hidden}")
    if key.stage == "saved_rows" and (unsaved := why_unsaved(key.implementation, x.dtype, key.label_smoothing)):
        raise ValueError(unsaved)
    if key.stage == "saved_rows" and not scaled_exp:
        raise ValueError(
            f"saved_budget must be 0 for {key.classes} classes, whose rows are too long for the kernels of this GPU: "
            "use implementation='chunked'"
        )
    if scaled_exp:
        # Triton's interpreter, which runs the kernels on other devices, cannot run those in Gluon.
        ampere = pointers and key.device.type == "cuda"
        ampere_tile = tile_config.choose_ampere_tile(tile, capability) if ampere else None
        tiling = None
        if (hopper or ampere) and not casts_head:
            tiling = tile_config.choose_d_input_tiling(
                key.device.multiprocessors, ampere_tile, splits_head=splits_in_place
            )
        float32_d_weight = key.grad_into or key.splits_head
        if float32_d_weight:
            d_weight_kernel = hopper and hidden % 4 == 0 and key.into_aligned
        else:
            d_weight_kernel = (hopper or ampere) and w.dtype == x.dtype and padded_hidden == hidden
        holds_rows = key.d_input and padded_hidden == hidden and not key.gathers
        fits_float16 = x.dtype == "float16" and key.stage != "losses"
        # Class weights are those of all shards.
        smoothing = (key.label_smoothing != 0) * (16 * hidden + 20 * key.classes * max(key.ranks, 1))
        if fits_float16:  # rows' numbers; a sample of the head, which is copied unless its rows can be read in place
            copies = casts_head + (w.strides[1] != 1 or padded_hidden != hidden)
            fit = 20 * tokens + 3072 + min(key.classes, tile.block_v) * (copies * x.itemsize * padded_hidden + 4)
            # Before the first rows are read, only the mean of the head and the class weights stay.
            smoothing = max(smoothing, fit + (key.label_smoothing != 0) * (8 * hidden + 4 * key.classes + 4 * tokens))
        copied = key.copied_bytes + smoothing + ((key.ranks > 0) * SHARD_ROW + key.gathers * GATHERED_ROW) * tokens
        # The rows of exponentials, in whole row blocks, that fit a row of a new d_weight, which the first chunk writes.
        room = 0
        in_kernels = d_weight_kernel and (tiling is not None or not key.d_input)
        writes = key.stage == "loss_and_gradients" and key.d_weight and not (key.grad_into or key.batch_invariant)
        # d_weight of float16 has the terms of label smoothing before its first chunk: MATH.md (51).
        begun = fits_float16 and key.label_smoothing != 0
        if in_kernels and writes and not begun and not key.ranks:  # shards may differ in size, and so in room
            room = hidden * w.itemsize // x.itemsize // ROW_BLOCK * ROW_BLOCK
        call, coefficients = None, COEFFICIENTS[gpu, "torch"]
        if ampere and d_weight_kernel:
            coefficients = coefficients._replace(exposed=tile_config.AMPERE_EXPOSED)
        if key.d_input or key.d_weight:
            call = chunk_cost.Call(
                tokens=max(tokens, 1),
                hidden=padded_hidden * (1 + splits_in_place),
                classes=key.classes,
                d_input=key.d_input,
                d_weight=key.d_weight and key.stage != "saved_rows",
                d_weight_kernel=d_weight_kernel,
                d_weight_itemsize=4 if d_weight_kernel and float32_d_weight else 2,
                parts=1 + key.splits_head,
                adds_in_l2=d_weight_kernel and hopper,
                block_v=tile.block_v,
                # Two programs of a multiprocessor share its matrix units, so for 8.x their tiles count one by one.
                class_block=tile_config.CLASS_BLOCK if ampere_tile is None else ampere_tile.block_v,
                row_step=tile_config.D_WEIGHT_STEP if ampere_tile is None else ampere_tile.block_d,
                programs=key.device.multiprocessors,
                cast_bytes=casts_head * COPIES * key.classes * (w.itemsize * hidden + x.itemsize * width),
                gpu=gpu,
                coefficients=coefficients,
                piece_ns=tile_config.PIECE_NS,
            )
        chunks = tile_config.choose_scaled_exp(
            tokens=tokens,
            hidden=padded_hidden,
            classes=key.classes,
            itemsize=x.itemsize,
            block_v=tile.block_v,
            class_block=tile_config.SPLIT_CLASS_BLOCK if splits_in_place else tile.block_v,
            stores=needs_grad,
            saves=key.stage == "saved_rows" and (key.d_weight or key.d_bias),
            d_input=key.d_input,
            scales_d_weight=fits_float16 and key.d_weight and not d_weight_kernel,
            holds=holds_rows,
            needs_cast=casts_head,
            # Both passes have the chunks of saved rows, and the second does not know what the first computed.
            statistics=(1 if key.stage == "saved_rows" else key.statistics) + (fits_float16 and needs_grad),
            tiling=tiling,
            splits_head=key.splits_head and not splits_in_place,
            programs=key.device.multiprocessors * (key.splits_head and hopper),
            copied=copied,
            exchanged=exchanged,
            gathering_ranks=key.gathers * key.ranks,
            batch_invariant=key.batch_invariant,
            room=room,
            call=call,
            budget=key.memory_budget,
        )
        return ExecutionPlan(
            key.implementation,
            "scaled_exp",
            chunks,
            gpu,
            **of_call,
            **of_kernels,
            ampere_tile=ampere_tile,
            d_input_tiling=tiling,
            d_weight_kernel=d_weight_kernel,
            holds_rows=holds_rows,
            smooths=key.label_smoothing != 0,
            fits_float16=fits_float16,
            reads_split_head=key.splits_head and readable,
            splits_in_place=splits_in_place,
            gathering_ranks=key.gathers * key.ranks,
        )
    chunks = tile_config.choose_recomputed(
        tokens=tokens,
        hidden=padded_hidden,
        classes=key.classes,
        itemsize=x.itemsize,
        block_v=tile.block_v,
        statistics=2 + (key.label_smoothing != 0) + max(key.statistics, key.entropy),
        float16=x.dtype == "float16",
        d_input=key.d_input,
        d_weight=key.d_weight,
        splits_head=key.splits_head,
        head_copies=casts_head + (w.dtype != x.dtype and padded_hidden != width),
        needs_row_cast=padded_hidden != width or not x.tma_compatible(by_row=True, pointers=pointers),
        copied=key.copied_bytes,
        exchanged=exchanged,
        budget=key.memory_budget,
    )
    return ExecutionPlan(key.implementation, "recompute", chunks, gpu, **of_call, **of_kernels)


def _of_call(key: PlanKey) -> dict[str, Any]:
    """Returns what every plan of a call has, by the names of `ExecutionPlan`."""
    return {"tokens": key.input.shape[0], "memory_budget": key.memory_budget, "matmuls": matmuls_of(key)}


def _exchanged(key: PlanKey) -> int:
    """Returns the bytes of a row that the ranks of a vocabulary exchange: of this rank, of all ranks, and merged."""
    return 8 * EXCHANGED * (key.ranks + 1) if key.ranks else 0


def _chunked_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a call without kernels."""
    (tokens, hidden), x, w = key.input.shape, key.input, key.linear_weight
    chunks = choose_chunked(
        tokens=tokens,
        hidden=hidden,
        classes=key.classes,
        itemsize=x.itemsize,
        weight_itemsize=w.itemsize,
        gradients_in_forward=key.stage in ("loss_and_gradients", "saved_rows"),
        saves=key.stage == "saved_rows",
        float16=x.dtype == "float16",
        softcap=key.softcap,
        entropy=key.entropy,
        d_input=key.d_input,
        d_weight=key.d_weight and key.stage != "saved_rows",
        upcasts=x.dtype != "float32" and key.device.type != "cuda",
        grad_into=key.grad_into,
        splits_head=key.splits_head,
        exchanged=_exchanged(key),
        budget=key.memory_budget,
    )
    return ExecutionPlan("chunked", "chunked", chunks, key.device.gpu, casts_head=w.dtype != x.dtype, **_of_call(key))


def _stored_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a float32 call, whose logits are stored, and kernels make two passes over them."""
    (tokens, hidden), x, w = key.input.shape, key.input, key.linear_weight
    allowed = key.device.capability == float32_tiles.CAPABILITY and key.float32_kernel
    chunks, programs, waves = choose_stored(
        tokens=tokens,
        hidden=hidden,
        classes=key.classes,
        stores=key.stage in ("loss_and_gradients", "saved_rows"),
        d_input=key.d_input,
        second=key.d_input or key.d_weight or key.d_bias,
        copies_head=not w.gemm_compatible(),
        copies_rows=not x.gemm_compatible(),
        copied=key.copied_bytes,
        exchanged=_exchanged(key),
        programs=key.device.multiprocessors if allowed else 0,
        budget=key.memory_budget,
    )
    of_call = {"float32_programs": programs, "float32_waves": waves, **_of_call(key)}
    return ExecutionPlan(key.implementation, "stored_logits", chunks, key.device.gpu, **of_call)


def why_unsaved(implementation: str, dtype: str, label_smoothing: float) -> str | None:
    """Returns why kernels save no rows of a call with this input's dtype and label smoothing, a sentence, or None."""
    if implementation == "chunked" or dtype == "float32" or not label_smoothing:
        return None
    return (
        f"saved_budget must be 0 with label_smoothing {label_smoothing} and a {dtype} input, of which the kernels save "
        "nothing: use implementation='chunked'"
    )


def _plan_a_again(key: PlanKey) -> ExecutionPlan | None:
    """Returns plan A with scaled exponentials for the gradients of losses of rows. None if it cannot run, or if its
    chunks have so few rows that recomputing the logits is faster. With batch_invariant it must run."""
    if key.batch_invariant:
        return make_plan(key._replace(stage="loss_and_gradients"))
    try:
        plan = make_plan(key._replace(stage="loss_and_gradients"))
    except ValueError:  # recomputing takes less memory
        return None
    tokens = key.input.shape[0]
    enough = min(tokens, LEAST_ROW_GRADIENTS) if key.d_weight else 0
    return plan if plan.path == "scaled_exp" and plan.scaled_exp_config.usual_rows(tokens) >= enough else None
