"""The plan of a call: which path runs, with which kernels, in which chunks.

`make_plan` is a pure function of shapes, dtypes, device and options, and all these decisions are made here. A plan
determines speed and memory. It changes results only by rounding.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

from jax_pallas import launch, tile_config
from jax_pallas.chunk_config import choose_chunked, choose_stored
from jax_pallas.launch import DeviceInfo
from jax_pallas.tile_config import ScaledExpConfig, TileConfig
from linear_ce import chunk_cost, float32_tiles
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
from linear_ce.gpus import gpu_named

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
    itemsize: int
    dtype: str  # "bfloat16", ...


class PlanKey(NamedTuple):
    """Everything that a plan depends on."""

    stage: Stage
    input: MatrixLayout  # (N, D), of the tokens of all devices that divide them
    linear_weight: MatrixLayout  # (V, D), or (D, V) where `vocab_axis` is 1, or a shard of it
    vocab_axis: int
    classes: int  # rows of linear_weight that are no padding
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
    grad_into: bool = False  # d_weight is added to a float32 array of the caller
    splits_head: bool = False  # into two matrices of the input's dtype
    batch_invariant: bool = False
    shards: int = 0  # devices among which the vocabulary is divided; 0: it is not
    pads_shards: bool = False  # the last rows of the last shards are no classes
    token_parts: int = 1  # of the input, which each device has one of
    float32_kernel: bool = True  # may compute matmuls


@dataclass(frozen=True)
class ExecutionPlan:
    """How a call runs.

    Args:
        implementation: "mosaic", "pallas_triton" or "chunked".
        path: "scaled_exp" stores scaled exponentials: 3 matmuls with gradients, 1 without. "recompute" recomputes the
            logits for the gradients: 4 matmuls. "stored_logits" is for float32 on a GPU: the logits of a chunk are one
            matmul, and stay in memory until its gradients are done. It and "chunked" use XLA operators, apart from the
            matmuls of `float32_programs`.
        chunks: the rows of a chunk, and what depends on them.
        gpu: name in `linear_ce.gpus.GPUS` of the GPU, or of the one that stands for it.
        tokens: N.
        memory_budget: bytes.
        matmuls: which of "logits", "d_input" and "d_weight" are computed: `matmuls_of`. For the gradients of losses of
            rows, and of token losses of the entropies, the logits of the losses, which have another plan, come first.
            `explain` also lists logits that a scalar loss computes again for its gradients.
        casts_head: whether the head is copied to the input's dtype, one vocabulary chunk at a time. A copy of a split
            head has both parts side by side.
        hopper: whether the matmul kernels are those for sm_90, in Mosaic, or those of Pallas' Triton backend.
        tile: the tile of logits; None if no kernel runs.
        vocab_chunks_in_place: whether kernels read vocabulary chunks of the head in place, or from a copy of each.
        d_input_kernel: whether our kernel computes d_input, or XLA's GEMM.
        d_weight_kernel: whether our kernel computes d_weight, or XLA's GEMM.
        d_weight_starts: whether the kernel that adds to d_weight also writes it first. That saves compiling another
            kernel, 1.5 s.
        splits_in_place: whether the kernels of the logits and of d_input split a float32 head in registers. Otherwise
            the former takes a copy of both parts of each vocabulary chunk.
        fits_float16: whether scaled exponentials of float16 are fitted to its range (`float16.py`). Where no gradient
            follows, now or from a token loss, they are sums in float32 only and need not be.
        saved: which rows of the call the forward pass saves for the backward pass; None if no row.
        others: how the gradients of the other rows are computed, where a part is saved and `explain` asks; None else.
        batch_invariant: whether log_prob, lse and d_input of a row do not depend on the other rows, bit for bit.
        float32_programs: number of programs of `float32_matmuls.py` that the GPU runs at a time. 0: XLA computes the
            matmuls of float32.
        why_chunked: why a call with a shard of the vocabulary runs "chunked" and not the kernels, a sentence.
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
    tile: TileConfig | None = None
    vocab_chunks_in_place: bool = False
    d_input_kernel: bool = False
    d_weight_kernel: bool = False
    d_weight_starts: bool = False
    splits_in_place: bool = False
    fits_float16: bool = False
    saved: SavedRowCount | None = None
    others: "ExecutionPlan | None" = None
    batch_invariant: bool = False
    float32_programs: int = 0
    why_chunked: str | None = None

    def check_named(self, implementation: str | None) -> None:
        """Raises ValueError if a call names an implementation that cannot serve its shard of the vocabulary."""
        if implementation is not None and self.why_chunked is not None:
            raise ValueError(f"implementation {implementation!r} cannot serve this call: {self.why_chunked}")

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
    def has_kernels(self) -> bool:
        """Whether the loss runs in kernels. A plan with `float32_programs` has a kernel only for its matmuls."""
        return self.path in ("scaled_exp", "recompute")

    @property
    def class_block(self) -> int:
        """Classes of a class block, of which the kernel of the logits writes one number for each row."""
        assert self.tile is not None
        return tile_config.SPLIT_CLASS_BLOCK if self.splits_in_place else self.tile.block_v

    @property
    def keeps_logits(self) -> bool:
        """Whether the logits of a chunk, or their exponentials, stay in memory until its gradients are computed."""
        return self.path == "scaled_exp" or self.chunk_config.keeps_logits

    def with_logits_again(self) -> "ExecutionPlan":
        """This plan of a scalar loss, which lists its logits twice where the gradients compute them again."""
        return self if self.keeps_logits else replace(self, matmuls=logits_again(self.matmuls))

    def __str__(self) -> str:
        others = self.others
        family = None
        if self.has_kernels:
            family = "Hopper's, in Mosaic" if self.hopper else "Pallas' Triton backend's"
        elif self.float32_programs:
            family = "Pallas' Triton backend's, for the matmuls"
        float32 = self.float32_programs > 0
        ours = {
            "logits": float32 or self.has_kernels,
            "d_input": float32 or self.d_input_kernel,
            "d_weight": float32 or self.d_weight_kernel,
        }
        return describe_plan(
            path=self.path,
            kernels=family,
            tile=None if self.tile is None else (self.tile.block_n, self.tile.block_v),
            chunks=self.describe_chunks(),
            tokens=self.tokens,
            casts_head=self.casts_head,
            matmuls={name: ours[name.split()[0]] for name in self.matmuls},
            library="XLA",
            workspace=max(plan.chunks.bytes for plan in (self, others) if plan is not None),
            budget=self.memory_budget,
            saved=self.saved,
            saves_logits=self.keeps_logits,
            others=None if others is None else (others.path, others.describe_chunks()),
            fixed_rows=tile_config.FIXED_ROWS if self.batch_invariant else None,
        )

    def describe_chunks(self) -> str:
        """Returns the chunks in words."""
        first_rows = self.scaled_exp_config.first_rows if self.path == "scaled_exp" else 0
        return describe_chunks(self.tokens, self.chunks.rows, first_rows)


MOST_SMOOTHING, LEAST_SMOOTHED_CLASSES = 0.3, 256  # of terms of rank one; beyond, they cancel too much of the rest


def smoothing_is_linear(key: PlanKey) -> bool:
    """Whether the terms of label smoothing are of rank one, and small enough to be added in the gradients' dtypes."""
    return not key.softcap and key.label_smoothing <= MOST_SMOOTHING and key.classes >= LEAST_SMOOTHED_CLASSES


def _why_shards_are_chunked(key: PlanKey) -> str | None:
    """Returns why no kernels run a call in which devices have shards of the vocabulary, a sentence, or None."""
    x, w = key.input, key.linear_weight
    of_smoothing = _why_smoothed_shards_are_chunked(key)
    if x.dtype == "float32":
        kind = f"with {x.dtype} input"
    elif w.dtype != x.dtype and x.dtype != "bfloat16":
        kind = f"with {w.dtype} linear_weight and {x.dtype} input"
    elif of_smoothing is not None:
        kind = f"with label_smoothing {key.label_smoothing}{of_smoothing}"
    elif key.entropy and key.stage in ("row_gradients", "entropy_loss_and_gradients", "gradients"):
        kind = "for a gradient of the entropy"
    else:
        return None
    return f"the kernels take no shard of the vocabulary (vocab_axis_name) {kind}"


def _why_smoothed_shards_are_chunked(key: PlanKey) -> str | None:
    """Returns what no kernels run with label smoothing and shards of the vocabulary, the end of a sentence, or None."""
    if not key.label_smoothing:
        return None
    if key.input.dtype != "bfloat16":
        return f" and {key.input.dtype} input"
    if smoothing_is_linear(key):
        return None
    if key.softcap:
        return " and softcap"
    few = f" and fewer than {LEAST_SMOOTHED_CLASSES} classes on a device"
    return few if key.classes < LEAST_SMOOTHED_CLASSES else f", which is above {MOST_SMOOTHING}"


EXCHANGED = 9  # numbers of a row that the devices of a vocabulary exchange, at most

SHARD_ROW = 24  # bytes of a row of the call beside those of `row_kernels.CallRows`, in `shard_rows.py`


COPIES = 2  # of a float32 head that a chunk makes: for the logits, and for XLA's matmuls of d_input


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
            batch-invariant and is not.
    """
    of_shard = key.shards > 0 and key.implementation != "chunked"
    chunked = _why_shards_are_chunked(key) if of_shard else None
    plan = _any_plan(key if chunked is None else key._replace(implementation="chunked"))
    if of_shard and plan.path != "scaled_exp":
        if chunked is None:
            into = " with grad_into" if key.grad_into else ""
            rows = key.linear_weight.shape[key.vocab_axis]
            chunked = f"{key.implementation!r} takes no shard of {rows} rows of the vocabulary (vocab_axis_name){into}"
            chunked = plan.why_chunked or chunked
            plan = make_plan(key._replace(implementation="chunked"))
        return replace(plan, why_chunked=chunked)
    why = why_variant(key, plan) if key.batch_invariant else None
    if why is not None:
        raise ValueError(f"batch_invariant=True {why}")
    return replace(plan, batch_invariant=key.batch_invariant)


def why_variant(key: PlanKey, plan: ExecutionPlan) -> str | None:
    """Returns why the results of a row depend on the other rows of a call, the rest of a sentence, or None.

    XLA chooses a GEMM, and with it the order of a sum, by the number of rows. So none of its matmuls may compute logits
    or d_input. `recompute` sums over class blocks in XLA, and over vocabulary chunks that depend on the number of rows.
    """
    x, w = key.input, key.linear_weight
    (hidden, vocab), mosaic = (x.shape[1], w.shape[key.vocab_axis]), key.implementation == "mosaic"
    if not plan.has_kernels:
        capability = divmod(key.device.capability, 10) if key.device.capability else None
        name, reason = launch.choose(key.device.type, capability, x.dtype, hidden, vocab, key.vocab_axis)
        why = f" ({reason})" if name == "chunked" else ""  # kernels of the device may take no shard of the head
        return f"needs the kernels, got implementation 'chunked'{why}"
    if key.stage == "gradients":
        return "has no gradients of entropy and lse: their matmuls are XLA's. Differentiate log_prob only"
    if key.stage in ("row_gradients", "entropy_loss_and_gradients") and key.entropy:
        return "has no gradient of the entropy (with_entropy, or an entropy_weight): its matmuls are XLA's"
    if x.dtype != "bfloat16":
        return f"needs a bfloat16 input, got {x.dtype}"
    if w.dtype != x.dtype:
        return f"needs a {x.dtype} linear_weight, got {w.dtype}"
    if key.d_input and not mosaic:
        return f"needs implementation 'mosaic' for the gradient of input, got {key.implementation!r}"
    if plan.path == "scaled_exp":
        return None
    limits = launch.hopper_gradient_limits(x.dtype, hidden, vocab) if mosaic else None
    if limits is not None:
        return f"cannot run here, because {limits}"
    if key.grad_into:
        return f"needs grad_into None here, with {vocab} rows of linear_weight in {key.implementation!r}"
    return f"needs {key.implementation!r} classes in multiples of 64, got {key.classes} in {vocab} rows"


def _any_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a call, whether or not it must be batch-invariant and is."""
    if key.stage == "entropy_loss_and_gradients" and key.implementation == "chunked":
        return make_plan(key._replace(stage="loss_and_gradients"))
    if key.stage in ("row_gradients", "entropy_loss_and_gradients"):
        # The exponentials in 16 bits have too few bits for the logarithms in the gradient of an entropy.
        plan = None if key.entropy else _plan_a_again(key)
        if plan is None:
            # `why_variant` has a message for this stage.
            keys = [key._replace(stage="gradients", batch_invariant=False)]
            if key.stage == "entropy_loss_and_gradients":  # the losses are part of the call
                no_gradient = {"d_input": False, "d_weight": False, "d_bias": False}
                keys.append(keys[0]._replace(stage="statistics", **no_gradient))
            plan = plan_passes(*(partial(make_plan, one) for one in keys))
        first = (f"{name} of the losses" for name in plan.matmuls if name.startswith("logits"))
        return replace(plan, matmuls=(*first, *plan.matmuls))
    if key.implementation == "chunked":
        return _chunked_plan(key)
    (tokens, hidden), x, w, of_call = key.input.shape, key.input, key.linear_weight, _of_call(key)
    vocab, casts_head = w.shape[key.vocab_axis], w.dtype != x.dtype
    hopper = key.implementation == "mosaic"
    # The kernels of scaled exponentials split a head, and round shards. `recompute` rounds other heads.
    takes_head = not casts_head or key.splits_head or (key.shards > 0 and x.dtype == "bfloat16")
    multiplies = hopper and takes_head and launch.hopper_gradient_limits(x.dtype, hidden, vocab) is None
    if (key.grad_into and (hopper or key.stage != "saved_rows")) or (hopper and casts_head):
        # XLA's GEMM of the first chunk would not add in place, and TMA adds to float32 rows in tiles of 8 rows.
        stores = multiplies and (key.vocab_axis == 1 or vocab % 8 == 0)
        multiplies = stores
    else:
        # XLA's GEMMs take whole arrays: nothing is padded.
        stores = multiplies or (not hopper and takes_head and vocab == key.classes == tile_config.padded(vocab))
    # The Hopper kernel reads the rows of x for each half of the head, in steps.
    takes_head &= not (hopper and casts_head) or hidden % tile_config.STEP == 0
    fits_float16 = x.dtype == "float16" and stores and key.stage != "losses"
    multiplies &= x.dtype == "bfloat16" or fits_float16
    scaled_exp = (
        takes_head
        and (not key.label_smoothing or smoothing_is_linear(key))
        # "statistics" runs what computes the gradients, so that both have the same sums, bit for bit.
        and (key.stage == "losses" or (key.stage in ("loss_and_gradients", "saved_rows", "statistics") and stores))
        and (key.stage == "losses" or x.dtype == "bfloat16" or fits_float16)
    )
    if key.stage == "saved_rows":
        of_head = key.vocab_axis, key.classes, key.label_smoothing
        unsaved = why_unsaved(key.implementation, x, w, *of_head, grad_into=key.grad_into)
        if unsaved is not None:
            raise ValueError(unsaved)
        assert scaled_exp
    # Vocabulary chunks are multiples of 64 classes, so in a (D, V) head they begin where TMA can read.
    vocab_chunks_in_place = not casts_head and (key.vocab_axis == 0 or key.classes % 64 == 0)
    needs_grad = key.d_input or key.d_weight or key.d_bias
    tile = tile_config.choose_tile(hopper=hopper)
    # TMA copies a float32 head in tiles of 8 rows of 32 columns.
    splits_in_place = hopper and key.splits_head and scaled_exp and x.dtype == "bfloat16"
    splits_in_place &= not key.shards and vocab % (32 if key.vocab_axis else 8) == 0
    if splits_in_place:
        tile = tile_config.SPLIT_TILE
    of_kernels: dict[str, Any] = {"hopper": hopper, "tile": tile, "vocab_chunks_in_place": vocab_chunks_in_place}
    if scaled_exp:
        shifts = (1 + hopper) * (fits_float16 and needs_grad)  # numbers

        def scratch(rows: int, most: int) -> int:
            shard = 0
            if not key.d_input:
                return 0
            if key.batch_invariant:
                return 0  # no partial tiles
            if key.shards:  # the matmul, and the part of this device, which is summed in place
                shard = 4 * rows * hidden + 4 * (rows + tile_config.TILE_ROWS[0]) * (hidden + tile_config.D_BLOCK)
                if key.pads_shards and not multiplies:  # a term of the sum, and a copy of some classes
                    copied = min(key.classes, tile_config.COUNTED_CLASSES) * (hidden + rows) * x.itemsize
                    shard += 4 * rows * hidden + copied
            if multiplies:
                size = tile_config.d_input_scratch(rows, hidden, key.classes, most, key.device.multiprocessors)
                low = key.splits_head * rows * hidden * x.itemsize  # halves of the targets' rows
                return size + low + shard
            return max(4 * rows * hidden, shard)  # of XLA's GEMM

        # The rows of exponentials that fit a row of a new d_weight, which the first chunk writes. TMA reads tiles of 8
        # rows.
        room = 0
        writes = key.stage == "loss_and_gradients" and key.d_weight and not (key.grad_into or key.batch_invariant)
        by_class = key.vocab_axis == 0 and vocab % 8 == 0
        # d_weight of float16 has the terms of label smoothing before its first chunk: MATH.md (51).
        begun = fits_float16 and key.label_smoothing != 0
        if multiplies and writes and by_class and not begun and not key.shards:  # a part of d_input comes first
            room = tile_config.first_chunk_room(hidden, w.itemsize)
        call, parts, copies_head = None, 1 + key.splits_head, casts_head and not splits_in_place
        if key.d_input or key.d_weight:
            call = chunk_cost.Call(
                tokens=max(tokens, 1),
                hidden=hidden * parts,
                classes=key.classes,
                d_input=key.d_input,
                d_weight=key.d_weight and key.stage != "saved_rows",
                d_weight_kernel=multiplies,
                adds_in_l2=multiplies,
                block_v=tile.block_n * tile.block_v // tile_config.ROW_BLOCK,
                class_block=tile_config.CLASS_BLOCK,
                row_step=tile_config.STEP,
                programs=key.device.multiprocessors or gpu_named(key.device.gpu).multiprocessors,
                cast_bytes=copies_head * (COPIES - hopper) * key.classes * hidden * (w.itemsize + parts * x.itemsize),
                gpu=key.device.gpu,
                coefficients=COEFFICIENTS[key.device.gpu, "jax"],
                d_weight_itemsize=4 if multiplies and casts_head else 2,
                parts=parts,
            )
        added_itemsize = 4 if key.grad_into else w.itemsize
        chunks = tile_config.choose_scaled_exp(
            tokens=tokens,
            hidden=hidden,
            classes=key.classes,
            itemsize=x.itemsize,
            stores=needs_grad,
            saves=key.stage == "saved_rows" and (key.d_weight or key.d_bias),
            holds=key.d_input or not needs_grad,
            d_bias=key.d_bias,
            # Both passes have the chunks of saved rows, and the second does not know what the first computed.
            statistics=1 if key.stage == "saved_rows" else key.statistics,
            shifts=shifts,
            block_v=tile_config.choose_tile(hopper=hopper).block_v,
            hopper=hopper,
            scratch=scratch,
            head_parts=casts_head * parts,
            splits_in_place=splits_in_place,
            programs=key.device.multiprocessors or 1,
            second_d_weight=0 if multiplies or fits_float16 or not key.d_weight else added_itemsize * hidden * vocab,
            scales_d_weight=fits_float16 and key.d_weight and not multiplies,
            # Numbers of the rows, and the sample of the head with its bias.
            copied=fits_float16 * (40 * tokens + tile_config.CLASS_BLOCK * (2 * x.itemsize * hidden + 8))
            + (key.shards > 0) * SHARD_ROW * tokens,
            # The numbers of this device, of all devices before and after they are summed, and merged. Rows of d_input
            # of the chunk before.
            exchanged=(key.shards > 0)
            * 4
            * (EXCHANGED * (3 * key.shards + 2) + hidden * (key.stage == "saved_rows" and key.d_input)),
            token_parts=key.token_parts,
            batch_invariant=key.batch_invariant,
            room=room,
            call=call,
            budget=key.memory_budget,
        )
        # All chunks have the same kernels, and no tile of d_weight lies past the classes, where it must become zeros.
        d_weight_starts = (
            key.stage != "saved_rows" and multiplies and key.d_weight and tokens > chunks.rows == chunks.last_rows
        )
        d_weight_starts &= not key.grad_into and not begun
        d_weight_starts &= tile_config.cdiv(key.classes, tile_config.CLASS_BLOCK) == tile_config.cdiv(
            vocab, tile_config.CLASS_BLOCK
        )
        return ExecutionPlan(
            key.implementation,
            "scaled_exp",
            chunks,
            key.device.gpu,
            **of_call,
            **of_kernels,
            casts_head=copies_head and (hopper or key.d_input),  # the other kernels of the logits cast the head
            d_input_kernel=multiplies,
            d_weight_kernel=multiplies,
            d_weight_starts=d_weight_starts,
            splits_in_place=splits_in_place,
            fits_float16=fits_float16,
        )
    d_weight_kernel = multiplies and vocab_chunks_in_place and not key.grad_into and not fits_float16
    chunks = tile_config.choose_recomputed(
        tokens=tokens,
        hidden=hidden,
        classes=key.classes,
        itemsize=x.itemsize,
        statistics=2 + (key.label_smoothing != 0) + max(key.statistics, key.entropy),
        float16=x.dtype == "float16",
        d_input=key.d_input,
        d_weight=key.d_weight,
        needs_cast=casts_head,
        splits_head=key.splits_head,
        in_place=d_weight_kernel,
        budget=key.memory_budget,
    )
    of_kernels |= {"casts_head": casts_head, "d_weight_kernel": d_weight_kernel}
    return ExecutionPlan(key.implementation, "recompute", chunks, key.device.gpu, **of_call, **of_kernels)


def _of_call(key: PlanKey) -> dict[str, Any]:
    """Returns what every plan of a call has, by the names of `ExecutionPlan`."""
    return {"tokens": key.input.shape[0], "memory_budget": key.memory_budget, "matmuls": matmuls_of(key)}


def _chunked_plan(key: PlanKey) -> ExecutionPlan:
    """Returns the plan of a call of "chunked"."""
    (tokens, hidden), x, w = key.input.shape, key.input, key.linear_weight
    chunks = choose_chunked(
        tokens=tokens,
        hidden=hidden,
        classes=key.classes,
        itemsize=x.itemsize,
        weight_itemsize=w.itemsize,
        gradients_in_forward=key.stage in ("loss_and_gradients", "saved_rows"),
        saves=key.stage == "saved_rows" and (key.d_weight or key.d_bias),
        float16=x.dtype == "float16",
        softcap=key.softcap,
        entropy=key.entropy,
        d_input=key.d_input,
        d_weight=key.d_weight and key.stage != "saved_rows",
        grad_into=key.grad_into,
        splits_head=key.splits_head,
        budget=key.memory_budget,
    )
    # A call in one tile has no loops, so XLA can divide it among devices (`problem.is_one_chunk`).
    one_tile = chunks.rows >= tokens and chunks.vocab_chunk >= key.classes
    stored = None if one_tile else _stored_plan(key)
    if stored is not None:
        return stored
    return ExecutionPlan("chunked", "chunked", chunks, key.device.gpu, casts_head=w.dtype != x.dtype, **_of_call(key))


def _stored_plan(key: PlanKey) -> ExecutionPlan | None:
    """Returns the plan of a float32 call on a GPU whose logits are stored for all classes; None for other calls.

    XLA would copy a head with padding: a matmul takes no part of an array.
    """
    (tokens, hidden), x, w = key.input.shape, key.input, key.linear_weight
    padded = key.pads_shards or w.shape[key.vocab_axis] != key.classes
    if key.device.type != "cuda" or not x.dtype == w.dtype == "float32" or padded:
        return None
    chunks = choose_stored(
        tokens=tokens,
        hidden=hidden,
        classes=key.classes,
        stores=key.stage in ("loss_and_gradients", "saved_rows"),
        d_input=key.d_input,
        budget=key.memory_budget,
    )
    if chunks is None:
        return None
    programs = 0
    few = chunks.rows < float32_tiles.BLOCK  # most of a tile would be empty
    if key.device.capability == float32_tiles.CAPABILITY and key.float32_kernel and not few:
        programs = key.device.multiprocessors or gpu_named(key.device.gpu).multiprocessors
    of_call = {"float32_programs": programs, **_of_call(key)}
    return ExecutionPlan("chunked", "stored_logits", chunks, key.device.gpu, **of_call)


def why_unsaved(
    implementation: str,
    x: MatrixLayout,
    w: MatrixLayout,
    vocab_axis: int,
    classes: int,
    label_smoothing: float,
    *,
    grad_into: bool,
) -> str | None:
    """Returns why kernels save no rows of a call, a sentence, or None. x is the input and w the head. `grad_into`:
    d_weight is summed in float32, because devices have different tokens."""
    vocab, hidden = w.shape[vocab_axis], x.shape[1]
    limits = None
    if implementation == "mosaic":
        limits = launch.hopper_gradient_limits(x.dtype, hidden, vocab)
    if implementation == "chunked":
        return None
    if x.dtype == "float32":
        kind = f"with a {x.dtype} input, of which the kernels save nothing"
    elif w.dtype != x.dtype:
        kind = f"with a {w.dtype} linear_weight, under which the kernels save nothing"
    elif label_smoothing:
        kind = f"with label_smoothing {label_smoothing}, of which the kernels save nothing"
    elif limits is not None:
        kind = f"here, because {limits}"
    elif implementation != "mosaic" and not vocab == classes == tile_config.padded(vocab):
        kind = f"with {classes} classes in {vocab} rows, because these kernels save rows of a multiple of 64 classes"
    elif implementation == "mosaic" and grad_into and vocab_axis == 0 and vocab % 8:
        kind = f"with token_axis_names and {vocab} rows of linear_weight, because these kernels add to multiples of 8"
    else:
        return None
    return f"saved_budget must be 0 {kind}: use implementation='chunked'"


def _plan_a_again(key: PlanKey) -> ExecutionPlan | None:
    """Returns plan A with scaled exponentials for the gradients of losses of rows. None if it cannot run, or if its
    chunks have so few rows that recomputing the logits is faster. With batch_invariant it must run."""
    if key.batch_invariant:
        return make_plan(key._replace(stage="loss_and_gradients"))
    try:
        plan = make_plan(key._replace(stage="loss_and_gradients"))
    except ValueError:  # recomputing takes less memory
        if key.shards:
            raise
        return None
    tokens = key.input.shape[0]
    enough = min(tokens, LEAST_ROW_GRADIENTS) if key.d_weight and not key.shards else 0
    return plan if plan.path == "scaled_exp" and plan.scaled_exp_config.usual_rows(tokens) >= enough else None
