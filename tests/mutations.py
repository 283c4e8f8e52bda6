"""Breaks the code in one place at a time and reports whether the quick tests notice. Run by `make test-mutations`.

Each mutation changes one line of kernels, row math, plans, launches or `benchmarks.same_launches`. The command copies
the tree to a separate folder, makes the change there, runs those of the mutation's tests that are quick, and prints
"caught" or "SURVIVED". It exits with 1 if a mutation survives, or if the text to change does not occur exactly once in
its file. In that case the code has changed, and the table below must be updated. `python tests/mutations.py TEXT...`
runs the mutations whose file or text contains one of the arguments.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("core_triton", "jax_pallas", "linear_ce", "parity", "benchmarks", "flax_models", "tests", "pyproject.toml")
WORKERS = 2


class Mutation(NamedTuple):
    """A change, and the tests that must notice it.

    Args:
        file: path relative to the root.
        old: text that occurs exactly once in the file.
        new: its replacement.
        tests: arguments of pytest.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def tests(file: str, chosen: str) -> tuple[str, ...]:
    """Returns the pytest arguments for the tests of a file that a -k expression selects."""
    return (f"tests/test_{file}.py", "-k", chosen)


TABLE = tests("core_triton_interpreted", "pairwise")
TORCH = tests("core_triton_numeric", "test_case")
COMPILED = tests("core_triton_kernels", "compiles_fits and 90-bf16")
COMPILED_SM80 = tests("core_triton_kernels", "compiles_fits and 80-bf16")
AMPERE = tests("core_triton_kernels", "two_programs and 80")
INPUT_GRAD = tests("core_triton_input_grad", "d_input")
REPAIR_BLOCKS = tests("core_triton_interpreted", "several_class_blocks")
D_WEIGHT = tests("core_triton_input_grad", "d_weight")
LARGE = tests("core_triton_input_grad", "large_matrix")
TORCH_RANKS = ("tests/test_core_triton_scale.py", "-m", "not slow")
PALLAS = tests("jax_pallas_kernels", "test_exponentials")

TRITON_KERNELS = (
    Mutation("core_triton/kernels.py", "softcap * tanh(logits * (1.0", "softcap * tanh(logits * (2.0", TABLE),
    Mutation("core_triton/kernels.py", "return 1.0 - ratio * ratio", "return 1.0 + ratio * ratio", TABLE),
    Mutation(
        "core_triton/kernels.py",
        "first + within % size, within // size",
        "first + within // size, within % size",
        TABLE,
    ),
    Mutation(
        "core_triton/kernels.py",
        "\n        exponentials = tl.exp2(logits * LOG2_E - ref_exponent[:, None])",
        "\n        exponentials = tl.exp2(logits * LOG2_E + ref_exponent[:, None])",
        TABLE,
    ),
    Mutation(
        "core_triton/kernels.py",
        "tl.sum(logits * class_weight[None, :], 1)",
        "tl.sum(logits, 1)",
        TABLE,
    ),
    Mutation("core_triton/kernels.py", "d_logits - tau, d_logits", "d_logits + tau, d_logits", TABLE),
    Mutation(
        "core_triton/kernels.py", "for k in range(0, hidden, BLOCK_D)", "for k in range(0, BLOCK_D, BLOCK_D)", TABLE
    ),
    Mutation(
        "core_triton/kernels.py",
        "~(total < SUM_LIMIT)",
        "(total < 0)",
        tests("core_triton_interpreted", "repaired"),
    ),
    Mutation("core_triton/row_kernels.py", "rank, count + row - rank)", "rank, row)", TABLE),
    Mutation(
        "core_triton/row_kernels.py",
        "row < first, counts",
        "row <= first, counts",
        tests("core_triton_interpreted", "rows"),
    ),
    Mutation(
        "core_triton/kernels.py",
        "tl.floor(top * LOG2_E)",
        "-tl.floor(top * LOG2_E)",
        tests("core_triton_interpreted", "repaired"),
    ),
    Mutation(
        "core_triton/kernels.py",
        "number >= end - tiles",
        "number > end - tiles",
        tests("core_triton_interpreted", "repaired"),
    ),
    Mutation("core_triton/row_kernels.py", "picked = tl.load(row_ptr + row)", "picked = row", TABLE),
    Mutation("core_triton/row_kernels.py", "* prob - kept * other_prob", "* prob + kept * other_prob", TABLE),
    Mutation(
        "core_triton/row_kernels.py",
        "total += tl.load(sum_ptr + columns",
        "total -= tl.load(sum_ptr + columns",
        tests("core_triton_interpreted", "chunks"),
    ),
    Mutation("core_triton/target_grad.py", "tl.where(member, tl.load", "tl.where(within, tl.load", TABLE),
    Mutation(
        "core_triton/target_grad.py",
        "others[None, :] < row_ids[:, None]",
        "others[None, :] <= row_ids[:, None]",
        TABLE,
    ),
    # The kernels for compute capability 8.x.
    Mutation(
        "core_triton/kernels.py",
        "tl.cdiv(columns, UNIT) * UNIT",
        "columns // UNIT * UNIT",
        tests("core_triton_interpreted", "sm80-edges"),
    ),
    Mutation(
        "core_triton/kernels.py",
        "logits = tl.where((columns < classes)[None, :], logits, 0.0)",
        "logits = tl.where((columns <= classes)[None, :], logits, 0.0)",
        tests("core_triton_interpreted", "weighted_views"),
    ),
    Mutation("core_triton/kernels.py", "stride // UNIT * UNIT\n    start", "stride\n    start", COMPILED_SM80),
    Mutation(
        "core_triton/kernels.py", "8 if crowded and plan.pointers", "4 if crowded and plan.pointers", COMPILED_SM80
    ),
    Mutation("core_triton/tile_config.py", "block_d=64, num_stages=2", "block_d=64, num_stages=3", AMPERE),
    Mutation(
        "core_triton/tile_config.py",
        "return 89 if capability >= 120 else capability",
        "return 89 if capability > 120 else capability",
        tests("core_triton_errors", "explain_of_a_gpu"),
    ),
    Mutation("core_triton/ampere_common.py", "wait_group(STAGES - 2)", "wait_group(STAGES - 1)", INPUT_GRAD),
    Mutation(
        "core_triton/ampere_common.py",
        "columns_of(b_matrix, b_stride, column",
        "columns_of(b_matrix, b_stride, row",
        INPUT_GRAD,
    ),
    Mutation("core_triton/ampere_common.py", "a_end = steps.last if", "a_end = end if", D_WEIGHT),
    Mutation(
        "core_triton/ampere_common.py", "row.to(gl.int64) * row_stride + column\n", "row * row_stride + column\n", LARGE
    ),
    Mutation("core_triton/ampere_gradients.py", "total += old[i]", "total = old[i]", D_WEIGHT),
    Mutation("core_triton/ampere_gradients.py", "Steps(0, active)", "Steps(0, rows)", D_WEIGHT),
    Mutation("core_triton/ampere_gradients.py", "classes // UNIT * UNIT", "classes", INPUT_GRAD),
    Mutation("core_triton/ampere_gradients.py", "columns * BLOCK_N, 0) +", "columns + BLOCK_N, 0) +", INPUT_GRAD),
    Mutation("core_triton/input_grad.py", "slot = parts + piece", "slot = piece", INPUT_GRAD),
    # Tests run the Hopper kernels of the gradients in NumPy. The others run only on a GPU: tests compile them and read
    # their code.
    Mutation(
        "core_triton/gluon_common.py",
        "gl.where(top > stored,",
        "gl.where(top >= stored,",
        tests("core_triton_split_logits", "statistics"),
    ),
    Mutation(
        "core_triton/smoothing.py",
        "plan_of(problem).splits_in_place",
        "False",
        tests("core_triton_head_precision", "smoothing"),
    ),
    Mutation("core_triton/kernels.py", "redone &= tl.max(logits, 1) < float", "redone &= 0 < float", REPAIR_BLOCKS),
    Mutation(
        "core_triton/kernels.py",
        "column, classes, planes(STATISTICS)",
        "row, classes, planes(STATISTICS)",
        REPAIR_BLOCKS,
    ),
    Mutation(
        "core_triton/tile_config.py",
        "-(-head_rows // class_block) -",
        "-(-head_rows // block_v) -",
        tests("core_triton_head_precision", "in_place"),
    ),
    *(
        Mutation(f"core_triton/{file}.py", old, new, tests("core_triton_first_chunk", "class_blocks_of_the_plan"))
        for file, old, new in (
            ("packed_rows", "class_blocks = cdiv(problem.classes, plan.class_block)", "class_blocks = 0"),
            ("packed_rows", "* cdiv(problem.classes, plan.class_block)", "* cdiv(problem.classes, plan.tile.block_v)"),
            ("packed_rows", "class_block=plan.class_block", "class_block=plan.tile.block_v"),
            ("scaled_exp", "head_rows, plan.class_block)", "head_rows, plan.tile.block_v)"),
            ("scaled_exp", "vocab_chunk.start, plan.class_block)", "vocab_chunk.start, plan.tile.block_v)"),
        )
    ),
    Mutation("core_triton/hopper_split_head.py", "exact - high.to(gl.float32)", "exact - exact", INPUT_GRAD),
    Mutation(
        "core_triton/hopper_split_head.py", "of_other = other.slice(i * PIECE", "of_other = other.slice(0", INPUT_GRAD
    ),
    Mutation("core_triton/hopper_split_head.py", "wait(0, deps=(acc,)", "wait(1, deps=(acc,)", INPUT_GRAD),
    *(
        Mutation("core_triton/hopper_split_logits.py", old, new, tests("core_triton_split_logits", "test_"))
        for old, new in (
            ("gl.where(row < sizes.rows, row, OUTSIDE)", "row"),
            (">> (2 * half)) & 3", ") & 3"),
            ("total += sums_of_rows(exponentials)", "total = sums_of_rows(exponentials)"),
            ("column - half * CLASSES, switches", "column, switches"),
            ("(2 * block * CLASSES < sizes.classes)", "(2 * block * CLASSES >= 0)"),
            ("active_rows(count_ptr, start, least, rows), hidden", "rows, hidden"),
            ("added = inside & (half > 0)", "added = inside & (half < 0)"),
            ("exponentials * slope(logits, head.softcap)", "exponentials"),
            ("+ which * 2 * HALF, k], bar", "+ which * HALF, k], bar"),
            ("lost = inside & ~(total < SUM_LIMIT)", "lost = inside & (total > SUM_LIMIT)"),
        )
    ),
    Mutation("core_triton/hopper_gradients.py", "128 * ITEMSIZE", "128 * 2", INPUT_GRAD),
    Mutation("core_triton/hopper_gradients.py", "FIRST + part - 1, ADDS", "FIRST, ADDS", D_WEIGHT),
    Mutation("core_triton/hopper_gradients.py", "first, tile, d_blocks", "first, done_tile, d_blocks", D_WEIGHT),
    Mutation("core_triton/hopper_gradients.py", "tma.store_wait(1)", "tma.store_wait(3)", D_WEIGHT),
    Mutation("core_triton/hopper_gradients.py", "* rank_rows + first + row", "* rank_rows + row", D_WEIGHT),
    Mutation("core_triton/hopper_gradients.py", "LOADED=0 if first or float32", "LOADED=0 if first", D_WEIGHT),
    Mutation(
        "core_triton/ops.py",
        "layout_of(problem.grad_into).aligned",
        "True",
        tests("core_triton_grad_into", "is_aligned"),
    ),
    Mutation(
        "core_triton/plan.py",
        "hidden % 4 == 0 and key.into",
        "key.into",
        tests("core_triton_head_precision", "explain"),
    ),
    Mutation(
        "core_triton/plan.py",
        "key.splits_head and readable and hopper",
        "key.splits_head and hopper",
        tests("core_triton_head_precision", "explain"),
    ),
    Mutation(
        "core_triton/scaled_exp.py",
        "first and not d_weight.started",
        "first",
        tests("core_triton_kernels", "all_chunks_add"),
    ),
    Mutation(
        "core_triton/hopper_common.py",
        "warpgroup_mma_wait(1, deps=[acc])  # this matmul",
        "warpgroup_mma_wait(0, deps=[acc])  # this matmul",
        COMPILED,
    ),
    Mutation(
        "core_triton/hopper_gradients.py",
        "WHICH, part, ADDS and part >= LOADED",
        "WHICH, part, ADDS",
        tests("core_triton_kernels", "added_in_l2"),
    ),
    Mutation(
        "core_triton/hopper_gradients.py",
        "share_added_in_l2(n, plan_of(problem).gpu)",
        "0",
        tests("core_triton_kernels", "loaded_of_d_weight"),
    ),
    Mutation("core_triton/hopper_gradients.py", "ring.b.index(stage).permute((1, 0))", "ring.b.index(stage)", COMPILED),
    Mutation("core_triton/tile_config.py", "D_INPUT_STAGES = 64, 4", "D_INPUT_STAGES = 64, 8", COMPILED),
    Mutation(
        "core_triton/tile_config.py",
        "divmod(tiles, programs)",
        "divmod(tiles, programs + 1)",
        tests("chunking", "schedules"),
    ),
)
TORCH_ROWS = (
    Mutation("core_triton/row_math.py", "a.target_logit + b.target_logit", "a.target_logit - b.target_logit", TORCH),
    Mutation("core_triton/row_math.py", "* statistics.lse.square()", "* statistics.lse.abs()", TORCH),
    Mutation(
        "core_triton/row_math.py",
        "upstream * (spec.label_smoothing / classes)",
        "upstream * spec.label_smoothing",
        TORCH,
    ),
    Mutation(
        "core_triton/row_math.py", "lambda c: torch.ldexp(c, -exponent)", "lambda c: torch.ldexp(c, exponent)", TORCH
    ),
    Mutation(
        "core_triton/chunked.py",
        "summed is not None:\n            sums.d_bias.put(vocab_chunk, summed, first=first)",
        "summed is not None:\n            sums.d_bias.put(vocab_chunk, summed, first=True)",
        TORCH,
    ),
    Mutation("core_triton/chunked.py", "top - FLOAT16_HEADROOM", "top", TORCH),
)
CONTRACT = (
    Mutation(
        "linear_ce/chunk_cost.py",
        "of_rows(rows, cdiv(rows, call.row_step) * call.row_step)",
        "of_rows(rows, rows)",
        tests("chunk_cost", "padded"),
    ),
    Mutation(
        "linear_ce/chunk_cost.py",
        "1.0 - c.unlimited / least_ms(self, 1)",
        "least_ms(self, 1) / c.unlimited - 1.0",
        tests("chunk_cost", "power_limit"),
    ),
    Mutation("linear_ce/chunk_cost.py", "(1.0 - self.idle) *", "self.idle *", tests("chunk_cost", "power_limit")),
    Mutation(
        "linear_ce/chunk_cost.py",
        "classes *= counted.of_rows(rows, blocks",
        "classes *= counted.of_rows(rows, 1.1 * blocks",
        tests("chunk_cost", "power_limit"),
    ),
    Mutation(
        "linear_ce/chunk_cost.py",
        "if config.bytes > most:",
        "if config.bytes > 2 * most:",
        tests("chunk_cost", "any_budget"),
    ),
    Mutation("linear_ce/gpus.py", "if rows >= fewest", "if rows > fewest", tests("chunk_cost", "added_in_l2")),
    Mutation(
        "linear_ce/chunk_cost.py", "(1 + adds) * call.d_weight", "call.head", tests("chunk_cost", "bytes_of_d_weight")
    ),
    Mutation(
        "linear_ce/chunking.py",
        "(budget - self.fixed - vocab_chunk",
        "(budget - vocab_chunk",
        tests("chunking", "rows_within"),
    ),
    Mutation(
        "linear_ce/chunking.py",
        "if whole.rows >= tokens or",
        "if whole.rows > tokens or",
        tests("chunking", "problem_that_fits"),
    ),
    Mutation(
        "linear_ce/chunking.py",
        "if kept.rows >= min(tokens, LEAST_FLOAT32_ROWS",
        "if kept.rows > min(tokens, LEAST_FLOAT32_ROWS",
        tests("chunking", "problem_that_fits"),
    ),
    Mutation(
        "linear_ce/chunking.py",
        "(chunks * ROW_MULTIPLE)) * ROW",
        "(chunks * ROW_MULTIPLE) + 1) * ROW",
        tests("chunking", "choice"),
    ),
    Mutation(
        "linear_ce/spec.py",
        "if self.vocab_size > rows:",
        "if self.vocab_size >= rows:",
        tests("spec", "bounds_are_admitted"),
    ),
    Mutation(
        "linear_ce/spec.py",
        "if not 0.0 <= smoothing <= 1.0:",
        "if not 0.0 <= smoothing < 1.0:",
        tests("spec", "bounds_are_admitted"),
    ),
)
JAX_ROWS = (
    Mutation(
        "jax_pallas/row_math.py",
        "d_log_prob - d_entropy * entropy",
        "d_log_prob + d_entropy * entropy",
        tests("jax_pallas_transforms", "test_jit and None-log_probs"),
    ),
    Mutation(
        "jax_pallas/row_math.py",
        "row_weight / denominator",
        "row_weight * denominator",
        tests("jax_pallas_edges", "normalizer_of_any_type"),
    ),
    Mutation(
        "jax_pallas/chunked.py",
        "d_logits - jnp.where(_at_target",
        "d_logits + jnp.where(_at_target",
        tests("jax_pallas_transforms", "test_jit and None-mean"),
    ),
    Mutation(
        "jax_pallas/chunked.py",
        "summed is not None:\n            d_bias = vocab_chunk.put(d_bias, vocab_chunk.of(d_bias) + summed)",
        "summed is not None:\n            d_bias = vocab_chunk.put(d_bias, summed)",
        tests("jax_pallas_transforms", "test_jit and 65536-mean"),
    ),
)
PALLAS_KERNELS = (
    Mutation(
        "jax_pallas/kernels.py",
        "lax.rem(within, size), lax.div(within, size)",
        "lax.div(within, size), lax.rem(within, size)",
        PALLAS,
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "1.0 - lax.square(logits * (1.0 / softcap))",
        "1.0 + lax.square(logits * (1.0 / softcap))",
        PALLAS,
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "\n    exponentials = part.only_seen(exponential(part.logits, reference[:, None]))",
        "\n    exponentials = exponential(part.logits, reference[:, None])",
        PALLAS,
    ),
    Mutation(
        "jax_pallas/hopper_logits.py",
        "LOG2_E - lax.broadcast_in_dim(ref_exponent",
        "LOG2_E + lax.broadcast_in_dim(ref_exponent",
        tests("jax_pallas_hopper_logits", "test_exponentials"),
    ),
    Mutation(
        "jax_pallas/hopper_logits.py",
        'values - row["tau"], values',
        'values + row["tau"], values',
        tests("jax_pallas_hopper_logits", "test_d_logits"),
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "steps = cdiv(rows or len(e), STEP)",
        "steps = (rows or len(e)) // STEP",
        tests("jax_pallas_hopper_gradients", "test_d_weight and transposed-1"),
    ),
    Mutation("jax_pallas/tile_config.py", "partial += shifts * blocks", "", tests("jax_pallas_plan", "shifts_of")),
    Mutation(
        "jax_pallas/tile_config.py",
        "partial += shifts * blocks",
        "partial += shifts * (blocks + 3 * again)",
        tests("jax_pallas_plan", "shifts_of"),
    ),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "share_added_in_l2(chunk.size, plan.gpu)",
        "0.0",
        tests("jax_pallas_hopper_gradients", "both_plans"),
    ),
    Mutation(
        "jax_pallas/recompute.py",
        "share_added_in_l2(len(d_logits), plan.gpu)",
        "0.0",
        tests("jax_pallas_hopper_gradients", "both_plans"),
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "if loaded or not own.kernel.adds",
        "if not own.kernel.adds",
        tests("jax_pallas_hopper_gradients", "test_d_weight and steps-0"),
    ),
    Mutation(
        "jax_pallas/input_grad.py",
        "0.0, factor * term.astype",
        "0.0, term.astype",
        tests("jax_pallas_hopper_gradients", "test_d_input and whole"),
    ),
    Mutation(
        "jax_pallas/tile_config.py",
        "min(programs // split_tiles, iters_per_tile)",
        "programs // split_tiles",
        tests("jax_pallas_hopper_gradients", "schedules_cover"),
    ),
    Mutation(
        "jax_pallas/target_grad.py",
        "(other[None, :] < row[:, None])",
        "(other[None, :] <= row[:, None])",
        tests("jax_pallas_kernels", "test_sort_by_target"),
    ),
)
TORCH_TOKENS = tests("core_triton_numeric", "test_case and token_loss")
KERNEL_TOKENS = tests("core_triton_interpreted", "token_losses")
JAX_TOKENS = tests("jax_pallas_numeric", "token_loss")
TOKEN_LOSSES = (
    Mutation("core_triton/token_hook.py", "kept * -d_log_prob", "kept * d_log_prob", TORCH_TOKENS),
    Mutation("core_triton/token_kernels.py", "rest + difference, -rest", "rest + difference, rest", KERNEL_TOKENS),
    Mutation(
        "core_triton/token_kernels.py",
        "tl.where(factor == 0, 0.0, factor * value)",
        "factor * value",
        KERNEL_TOKENS,
    ),
    Mutation(
        "core_triton/token_kernels.py",
        "log_prob, -bound * first, -bound",
        "log_prob, -ratio * first, -bound",
        KERNEL_TOKENS,
    ),
    Mutation(
        "core_triton/token_kernels.py",
        "tl.load(ptr + row.to(tl.int64) * stride",
        "tl.load(ptr + row.to(tl.int64)",
        KERNEL_TOKENS,
    ),
    Mutation(
        "core_triton/token_hook.py",
        "torch.where(log_prob.isnan(), torch.nan, row_weight)",
        "row_weight",
        tests("core_triton_token_loss", "not_a_class or nan_logit"),
    ),
    Mutation("core_triton/token_ops.py", "(one * d_loss).to(dtype)", "one.to(dtype)", TORCH_TOKENS),
    Mutation(
        "core_triton/token_hook.py",
        "token_loss.__call__(log_prob, *values)",
        "token_loss(log_prob, *values)",
        tests("core_triton_token_loss", "made_in_a_compiled"),
    ),
    Mutation("core_triton/token_ops.py", "torch.where(contributes, one.float(), 0.0)", "one.float()", TORCH_TOKENS),
    Mutation("core_triton/chunked.py", "hook.gradient_weight[chunk]", "problem.row_weight[chunk]", TORCH_TOKENS),
    Mutation(
        "core_triton/scaled_exp.py", "hook.process(rows.order[chunk.slice],", "hook.process(chunk.slice,", KERNEL_TOKENS
    ),
    Mutation(
        "core_triton/operators.py",
        "tuple(field) if isinstance(field, list) else field",
        "field",
        tests("core_triton_token_loss", "named_loss_compiles"),
    ),
    *(
        Mutation("core_triton/token_ops.py", part, "", tests("core_triton_token_loss", "recorded_apart"))
        for part in ("call.token_loss, call.needs_grad, ", "*call.d_per_token, ", "*call.stats, ")
    ),
    Mutation(
        "core_triton/replay.py",
        "if not recorder.whole:  #",
        "if False:  #",
        tests("core_triton_replay", "share_memory"),
    ),
    Mutation("core_triton/token_kernels.py", "(row if OF_CALL else index)", "index", KERNEL_TOKENS),
    Mutation("core_triton/token_kernels.py", "tl.where(row_weight == 0, 0.0, log_prob)", "log_prob", KERNEL_TOKENS),
    Mutation(
        "core_triton/token_ops.py",
        'if wanted["is_top1"]:',
        "if found.max is not None:",
        tests("core_triton_replay", "only_launch"),
    ),
    Mutation(
        "core_triton/scaled_exp.py",
        "    assert weight is not None",
        "    weight = hook.gradient_weight[chunk.slice] if hook.gradient_weight is not None else weight",
        KERNEL_TOKENS,
    ),
    Mutation(
        "core_triton/token_kernels.py", "store_rows(found_ptr, index,", "store_rows(found_ptr, row,", KERNEL_TOKENS
    ),
    Mutation("jax_pallas/token_hook.py", "jnp.nan, -weighted(d_log_prob)", "jnp.nan, weighted(d_log_prob)", JAX_TOKENS),
    Mutation(
        "jax_pallas/token_hook.py",
        "jnp.where(jnp.isnan(log_prob), jnp.nan, row_weight * loss)",
        "row_weight * loss",
        tests("jax_pallas_token_loss", "makes_the_row_nan and chunked"),
    ),
    Mutation(
        "jax_pallas/elementwise.py",
        "keeps = not others and (elementwise or name in SAME_SHAPE)",
        "keeps = not others",
        tests("jax_pallas_token_loss", "what_mixes_tokens"),
    ),
    Mutation(
        "jax_pallas/elementwise.py",
        "if _has_constants(program.jaxpr):",
        "if False:",
        tests("jax_pallas_token_loss", "jitted_function_that_changed and within"),
    ),
    Mutation(
        "jax_pallas/elementwise.py",
        'if equation.primitive.name == "jit":',
        'if equation.primitive.name == "jit" and not called.consts:',
        tests("jax_pallas_token_loss", "compile_once"),
    ),
    Mutation(
        "jax_pallas/elementwise.py",
        'if "{V:" in str(traced.jaxpr):',
        "if False:",
        tests("jax_pallas_sharding", "refused"),
    ),
    Mutation(
        "jax_pallas/token_ops.py", "(gradient * d_loss).astype(like.dtype)", "gradient.astype(like.dtype)", JAX_TOKENS
    ),
    Mutation(
        "jax_pallas/token_ops.py",
        "row_weight * dense(cotangents[0]), 0.0)",
        "dense(cotangents[0]), 0.0)",
        JAX_TOKENS,
    ),
)
TORCH_STATS = tests("core_triton_numeric", "test_case and token_loss-stats")
KERNEL_STATS = tests("core_triton_interpreted", "error_budget and edges and not sm80")
JAX_STATS = tests("jax_pallas_numeric", "token_loss-stats")
BIT_FOR_BIT = tests("core_triton_interpreted", "bit_for_bit")
KEPT_ROWS = tests("core_triton_interpreted", "repairs_no_rows")
TOKEN_STATS = (
    Mutation("core_triton/chunked.py", "exponentials.square_().sum(1)", "exponentials.sum(1)", TORCH_STATS),
    Mutation("core_triton/chunked.py", "argmax += problem.vocab_offset + vocab_chunk.start", "pass", TORCH_STATS),
    Mutation(
        "core_triton/row_math.py",
        "a.argmax.minimum(b.argmax)",
        "b.argmax",
        tests("core_triton_token_loss", "lowest_of_equal"),
    ),
    Mutation(
        "core_triton/row_math.py",
        "torch.where(lse.isfinite(), partial.argmax, -1)",
        "partial.argmax",
        tests("core_triton_token_loss", "no_argmax"),
    ),
    Mutation(
        "core_triton/kernels.py",
        "exponentials * (logits * LOG2_E - ref_exponent[:, None])",
        "exponentials * (logits * LOG2_E)",
        KERNEL_STATS,
    ),
    Mutation("core_triton/row_statistics.py", "squares / total / total", "squares / total", KERNEL_STATS),
    Mutation(
        "core_triton/row_statistics.py",
        "rows, stride, class_blocks, BLOCK_N, BLOCK_T) / classes",
        "rows, stride, class_blocks, BLOCK_N, BLOCK_T)",
        KERNEL_STATS,
    ),
    Mutation(
        "core_triton/row_statistics.py",
        "squares += factor * factor",
        "squares += factor",
        tests("core_triton_interpreted", "rows_of_several"),
    ),
    Mutation("core_triton/row_statistics.py", "(tl.max(lost, 0) == 0)", "(tl.max(lost, 0) != 0)", KEPT_ROWS),
    Mutation("core_triton/scaled_exp.py", "by_row=self.by_row,", "by_row=False,", KEPT_ROWS),
    Mutation("core_triton/scaled_exp.py", '"lse_out": unused', '"lse_out": self.rows.lse_out', KERNEL_STATS),
    Mutation(
        "core_triton/plan.py",
        '("loss_and_gradients", "saved_rows", "statistics")',
        '("loss_and_gradients", "saved_rows")',
        BIT_FOR_BIT,
    ),
    Mutation("core_triton/ops.py", '"statistics" if statistics & BY_ROW else "losses"', '"losses"', BIT_FOR_BIT),
    Mutation("jax_pallas/chunked.py", "jnp.square(jnp.exp(shifted)).sum(1)", "jnp.exp(shifted).sum(1)", JAX_STATS),
    Mutation(
        "jax_pallas/row_math.py",
        "equal = jnp.minimum(a.argmax, b.argmax)",
        "equal = jnp.maximum(a.argmax, b.argmax)",
        tests("jax_pallas_token_loss", "lowest_of_equal"),
    ),
    Mutation(
        "jax_pallas/row_kernels.py",
        "repaired = repaired & leaves_range(total, of_row)",
        "pass",
        tests("jax_pallas_token_loss", "bit_for_bit"),
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "exponentials * (part.logits - reference[:, None])",
        "exponentials * part.logits",
        tests("jax_pallas_kernels", "test_repair"),
    ),
    Mutation(
        "jax_pallas/hopper_logits.py",
        "column = piece * PIECE - jnp.where",
        "column = -jnp.where",
        tests("jax_pallas_hopper_logits", "test_exponentials"),
    ),
)
REPLAY = tests("core_triton_replay", "driver or recording")
LAUNCHES = (
    Mutation(
        "core_triton/replay.c", "addresses[i] = bases[words[0]] + words[1]", "addresses[i] = bases[words[0]]", REPLAY
    ),
    Mutation("core_triton/replay.c", "shape[] = {words[5], words[4]}", "shape[] = {words[4], words[5]}", REPLAY),
    Mutation("core_triton/replay.c", "words = numbers + words[6]", "words = numbers", REPLAY),
    Mutation("core_triton/replay.py", "tma.itemsize * value.strides[0]", "value.strides[0]", REPLAY),
    Mutation(
        "core_triton/replay.py",
        "if other.born < one.died and one.born < other.died:",
        "if other.born < one.died and one.born > other.died:",
        tests("core_triton_replay", "side_by_side"),
    ),
)
EDGES = tests("core_triton_interpreted", "error_budget and (pairwise or edges) and not sm80")
FLOAT32_MATMULS = tests("core_triton_interpreted", "of_float32")
SHARED_TILES = tests("chunking", "share_tiles")
JAX_FLOAT32_MATMULS = tests("jax_pallas_float32_matmuls", "")
JAX_SMOOTHING = tests("jax_pallas_recompute", "every_plan and smoothing")
ROW_GRADIENTS = (
    Mutation("core_triton/ops.py", "row_weight != 0, -d_log_prob, 0.0)", "row_weight != 0, d_log_prob, 0.0)", TORCH),
    Mutation(
        "core_triton/ops.py",
        "if d_entropy is None and d_lse is None:",
        "if d_entropy is None:",
        tests("core_triton_autograd", "log_probabilities_alone"),
    ),
    Mutation(
        "core_triton/plan.py",
        "min(tokens, LEAST_ROW_GRADIENTS) if key.d_weight else 0",
        "0",
        tests("core_triton_errors", "path_of_losses_of_rows"),
    ),
    Mutation(
        "jax_pallas/ops.py",
        "all(isinstance(one, SymbolicZero) for one in others)",
        "any(isinstance(one, SymbolicZero) for one in others)",
        tests("jax_pallas_transforms", "log_probabilities_alone"),
    ),
    Mutation(
        "jax_pallas/ops.py",
        "row_weight = jnp.where(used,",
        "row_weight = jnp.where(True,",
        tests("jax_pallas_edges", "upstream_gradient_is_0"),
    ),
)
JAX_SCALE = tests("jax_pallas_scale", "refused")
JAX_TOKEN_AXES = tests("jax_pallas_scale", "tokens")
RANKS_BY_KERNELS = tests("core_triton_scale", "by_the_kernels")
JAX_SHARDS = tests("jax_pallas_scale", "vocabulary")
JAX_SUMS = tests("jax_pallas_sharded", "sums")
JAX_SHARDED = tests("jax_pallas_sharded", "fsdp or rule")
JAX_TOKEN_SLICES = tests("jax_pallas_shard_rows", "tokens")
JAX_SHARDS_BY_KERNELS = tests("jax_pallas_shard_rows", "by_the_kernels")
JAX_SENT_HEADS = tests("jax_pallas_shard_rows", "head")
JAX_FLOAT16_SHARDS = tests("jax_pallas_shard_rows", "float16")
JAX_GATHERED_FLOAT16 = tests("jax_pallas_shard_rows", "small and probabilities")
JAX_SMOOTHED_SHARDS = tests("jax_pallas_shard_rows", "smoothing")
SCALE = (
    Mutation("core_triton/vocab_shard.py", "return rank * most, most, classes", "return 0, most, classes", TORCH_RANKS),
    Mutation("core_triton/vocab_shard.py", "d_input.to(shard.dtype)", "d_input", TORCH_RANKS),
    Mutation("core_triton/shard_rows.py", "factor = tl.exp2(shift)", "factor = tl.exp2(0 * shift)", RANKS_BY_KERNELS),
    Mutation("core_triton/smoothing.py", "if problem.shard is not None:", "if False:", RANKS_BY_KERNELS),
    Mutation(
        "core_triton/shard_rows.py", "planes_of(numbers.statistics) * n", "planes_of(statistics) * n", RANKS_BY_KERNELS
    ),
    Mutation("core_triton/shard_rows.py", "(exp_log + shift * total)", "(exp_log)", RANKS_BY_KERNELS),
    Mutation("core_triton/shard_rows.py", "classes=1, grad_into", "classes=0, grad_into", RANKS_BY_KERNELS),
    Mutation(
        "core_triton/shard_rows.py",
        "(of_shard=(numbers.of_shard[0], numbers.ref_exponent))",
        "()",
        RANKS_BY_KERNELS,
    ),
    Mutation("core_triton/shard_rows.py", "self.rows.rho[chunk.slice] *= ", "", RANKS_BY_KERNELS),
    Mutation(
        "core_triton/shard_rows.py",
        "if self.sums is not None and not self.waits:",
        "if self.sums is not None:",
        RANKS_BY_KERNELS,
    ),
    Mutation(
        "core_triton/arguments.py",
        "            found.saved_budget,\n            found.imp",
        "            0,\n            found.imp",
        TORCH_RANKS,
    ),
    Mutation("core_triton/target_grad.py", "(len(target), 1) if", "(len(x), 1) if", RANKS_BY_KERNELS),
    Mutation("core_triton/token_slices.py", "tl.where(other < rank, of_other, 0)", "0", RANKS_BY_KERNELS),
    Mutation("core_triton/d_weight_parts.py", "[:, None]) & counted", "[:, None])", RANKS_BY_KERNELS),
    Mutation("core_triton/d_weight_parts.py", "sizes[-1], scatter.step)", "scatter.step, sizes[-1])", RANKS_BY_KERNELS),
    Mutation(
        "core_triton/scaled_exp.py", "d_input_first = in_pieces or sends", "d_input_first = in_pieces", RANKS_BY_KERNELS
    ),
    Mutation("core_triton/token_slices.py", "min(2 * self.slice_rows, tokens)", "tokens", RANKS_BY_KERNELS),
    Mutation("core_triton/token_slices.py", "ranks * begin + count, mask", "ranks * begin, mask", RANKS_BY_KERNELS),
    Mutation("core_triton/smoothing.py", "vocab_shard.all_sum(own, shard.group)", "own", RANKS_BY_KERNELS),
    Mutation("core_triton/ops.py", "ctx.options.own_tokens(len(d_input))", "slice(0, len(d_input))", RANKS_BY_KERNELS),
    Mutation("core_triton/shard_rows.py", "vocab_shard.all_sum(logit, self.shard.group)", "pass", RANKS_BY_KERNELS),
    Mutation(
        "core_triton/row_kernels.py",
        "mask=inside, other=0.0) - ref_exponent)",
        "mask=inside, other=0.0) * 0)",
        RANKS_BY_KERNELS,
    ),
    Mutation("core_triton/vocab_shard.py", "normalizer.float() / ranks", "normalizer.float()", TORCH_RANKS),
    Mutation("core_triton/vocab_shard.py", "own += received", "own -= received", RANKS_BY_KERNELS),
    Mutation("core_triton/shard_rows.py", "plan_of(self.problem).batch_invariant", "False", RANKS_BY_KERNELS),
    Mutation("core_triton/plan.py", " or key.batch_invariant):", "):", RANKS_BY_KERNELS),
    Mutation("core_triton/vocab_shard.py", "if other.get(argument) != value:", "if False:", TORCH_RANKS),
    Mutation("core_triton/arguments.py", "            groups.check_agreement,\n", "            True,\n", TORCH_RANKS),
    Mutation(
        "core_triton/dtensors.py", "_Summed.apply(one / ranks, groups)", "_Summed.apply(one, groups)", TORCH_RANKS
    ),
    Mutation("core_triton/dtensors.py", "(correct / count.clamp(min=1))", "found.accuracy", TORCH_RANKS),
    Mutation("core_triton/head_scatter.py", "self.result[part]", "self.result[: part.stop]", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", "in groups) if self.mean", "in groups) if False", TORCH_RANKS),
    Mutation(
        "core_triton/dtensors.py", "for name in OF_HEAD if classes < rows else ():", "for name in ():", TORCH_RANKS
    ),
    Mutation("core_triton/dtensors.py", "if kind == ARRIVING:", "if False:", TORCH_RANKS),
    Mutation("core_triton/parallel.py", "continue  # it may", "pass  # it may", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", "if list(local.shape) != sizes:", "if False:", TORCH_RANKS),
    Mutation("core_triton/arguments.py", "* (1 + torch.arange(", "* (0 * torch.arange(", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", "return _Local.apply(one)", "return one.to_local()", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", "(autocast_dtype(x.device) or x.dtype) ==", "None ==", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", 'given["target"] = class_indices(target, ignore_index)', "pass", TORCH_RANKS),
    Mutation("core_triton/dtensors.py", "(*form.token_groups, of_caller)", "form.token_groups", TORCH_RANKS),
    Mutation(
        "core_triton/chunked.py",
        "d_input = vocab_shard.sum_of_d_input(problem.shard, d_input)",
        "pass",
        TORCH_RANKS,
    ),
    Mutation(
        "jax_pallas/shard_rows.py",
        '(merged["exp_logs"] + shift * LN_2 * totals)',
        'merged["exp_logs"]',
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation(
        "jax_pallas/row_kernels.py",
        "mask=inside) - ref_exponent)",
        "mask=inside) * 0)",
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation(
        "jax_pallas/row_kernels.py",
        "theta = jnp.where(is_class, theta, 0.0)",
        "pass",
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation(
        "jax_pallas/row_kernels.py",
        "least = jnp.where(ref_exponent == 0, LEAST_SUM, -1.0)",
        "pass",
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation(
        "jax_pallas/shard_rows.py",
        "total = vocab_shard.sum_of_d_input(devices, part, ordered=plan_of(self.problem).batch_invariant)",
        "total = part",
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation("jax_pallas/shard_rows.py", "if not keeps_rows:", "if True:", JAX_SHARDS_BY_KERNELS),
    Mutation(
        "jax_pallas/kernels.py",
        "of_row = None if ref_exponent_ref is None else",
        "of_row = None and",
        JAX_SHARDS_BY_KERNELS,
    ),
    Mutation("jax_pallas/shard_rows.py", "shifts=found.shifts,", "shifts=0 * found.sums,", JAX_FLOAT16_SHARDS),
    Mutation(
        "jax_pallas/head_scatter.py",
        "self.devices * start + device * size + row",
        "device * size + row",
        JAX_SENT_HEADS,
    ),
    Mutation("jax_pallas/head_scatter.py", "device * self.shard_rows % STEP", "0", JAX_SENT_HEADS),
    Mutation("jax_pallas/d_weight_parts.py", "None if chunk.first else old", "None", JAX_SENT_HEADS),
    Mutation("jax_pallas/smoothing.py", "at[classes].get(", "at[: len(classes)].get(", JAX_SENT_HEADS),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "STEP + first + lax.rem",
        "STEP + lax.rem",
        tests("jax_pallas_hopper_gradients", "part_of_d_weight"),
    ),
    Mutation(
        "jax_pallas/float16.py",
        "jnp.abs(upstream) * rest, jnp.abs(theta))",
        "jnp.abs(upstream) * rest, jnp.abs(chunk.of(rows.theta)))",
        JAX_FLOAT16_SHARDS,
    ),
    Mutation(
        "linear_ce/collectives.py",
        "tiles // (programs - late)",
        "tiles",
        tests("chunk_cost", "begin_late"),
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "late.programs * jnp.minimum(number, late.rounds)",
        "late.programs * number",
        tests("jax_pallas_hopper_gradients", "begin_late"),
    ),
    Mutation(
        "core_triton/hopper_gradients.py",
        "gl.where(first < gl.num_programs(0) - LATE, 0, ROUNDS * gl.num_programs(0))",
        "ROUNDS * gl.num_programs(0)",
        tests("core_triton_input_grad", "test_d_weight"),
    ),
    Mutation(
        "core_triton/dtensors.py",
        'check_memory_budget(local.get("memory_budget"))',
        'local.get("memory_budget")',
        tests("core_triton_scale", "sent_head_by_the_default"),
    ),
    Mutation(
        "core_triton/scaled_exp.py",
        "1), None if first else d_weight.sum",
        "1), (d_weight.sum, None)[first]",
        ("tests/test_core_triton_scale.py", "-k", "sent_head and ranks_by_the_kernels"),
    ),
    Mutation("jax_pallas/scaled_exp.py", "where(part.of(rows.target) >= 0,", "where(True,", JAX_SMOOTHED_SHARDS),
    Mutation("jax_pallas/smoothing.py", "vocab_shard.all_sum(devices, ", "(", JAX_SMOOTHED_SHARDS),
    Mutation("jax_pallas/smoothing.py", "(devices.token_parts / devices.shards)", "0.5", JAX_SMOOTHED_SHARDS),
    Mutation("jax_pallas/vocab_shard.py", "lax.axis_index(devices.vocab_axes) * rows", "0 * rows", JAX_SHARDS),
    Mutation(
        "jax_pallas/vocab_shard.py",
        "lax.all_to_all(rows, axes, 0, 0, tiled=True)",
        "rows",
        tests("jax_pallas_shard_rows", "invariant"),
    ),
    Mutation(
        "jax_pallas/vocab_shard.py",
        "(operand, cuda=wait,",
        "(operand, cuda=lambda operand: operand,",
        tests("jax_pallas_kernels", "begins_first"),
    ),
    Mutation(
        "jax_pallas/token_slices.py",
        "chunk.start + lax.axis_index(self.devices.gather_axes) * own.size",
        "chunk.start",
        JAX_TOKEN_SLICES,
    ),
    Mutation("jax_pallas/token_slices.py", "_to_tokens(problem, numbers)", "numbers", JAX_TOKEN_SLICES),
    Mutation(
        "jax_pallas/token_slices.py",
        "_to_chunks(problem, one) for one in hook",
        "one for one in hook",
        JAX_TOKEN_SLICES,
    ),
    Mutation("jax_pallas/token_slices.py", "jnp.where(piece.fresh, row_weight, 0.0)", "row_weight", JAX_TOKEN_SLICES),
    Mutation(
        "jax_pallas/token_slices.py",
        "(x, float16.place(self.problem, rows, x, chunk))",
        "(x, rows)",
        JAX_GATHERED_FLOAT16,
    ),
    Mutation(
        "jax_pallas/float16.py",
        "largest_x = part.put(rows.largest_x, largest_x)",
        "largest_x = 0 * rows.largest_x",
        JAX_GATHERED_FLOAT16,
    ),
    Mutation(
        "jax_pallas/gathering.py",
        "scales is not None and problem.grad_into is not None",
        "False",
        tests("jax_pallas_sharded", "normalizer"),
    ),
    Mutation(
        "jax_pallas/vocab_shard.py",
        "sums(devices, d_input.astype(devices.reduce_dtype))",
        "sums(devices, d_input)",
        JAX_SHARDS,
    ),
    Mutation(
        "jax_pallas/problem.py",
        "        if self.masks_classes and vocab_chunk.fresh",
        "        if False and vocab_chunk.fresh",
        JAX_SHARDS,
    ),
    Mutation("jax_pallas/problem.py", "        if not self.masks_classes:", "        if True:", JAX_SHARDS),
    Mutation("jax_pallas/arguments.py", "jnp.pad(class_weight, (0, rows - classes))", "class_weight", JAX_SHARDS),
    Mutation(
        "jax_pallas/devices.py",
        'bool(self.token_axes) or self.gather == "tokens"',
        "bool(self.token_axes)",
        tests("jax_pallas_sharded", "fsdp and tokens"),
    ),
    Mutation("jax_pallas/devices.py", "tokens * number < classes", "tokens < classes", JAX_SHARDED),
    Mutation("jax_pallas/gathering.py", "lax.axis_index(devices.gather_axes) * size", "0 * size", JAX_SHARDED),
    Mutation("jax_pallas/gathering.py", "[0, 2, 3]", "[2, 3]", tests("jax_pallas_sharded", "saved")),
    Mutation(
        "jax_pallas/saved_ops.py",
        "summed_over_devices(options, gradients, None, arrays)[0]",
        "gradients",
        tests("jax_pallas_sharded", "saved"),
    ),
    Mutation("jax_pallas/float16.py", "chunk.of(target)", "chunk.of(rows.target)", JAX_FLOAT16_SHARDS),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "if problem.devices.vocab_axes:\n        problem",
        "if False:\n        problem",
        JAX_FLOAT16_SHARDS,
    ),
    Mutation(
        "jax_pallas/gathering.py",
        "found[place] = total(static, found[place], into)",
        "pass",
        JAX_SUMS,
    ),
    Mutation("jax_pallas/sharded.py", "into + lax.psum(total, into_axes)", "into + total", JAX_SUMS),
    Mutation("jax_pallas/sharded.py", "into + lax.psum(of_devices, axes)", "lax.psum(of_devices, axes)", JAX_SUMS),
    Mutation("jax_pallas/gathering.py", "grad_into + lax.psum_scatter(", "lax.psum_scatter(", JAX_SUMS),
    Mutation(
        "jax_pallas/sharded.py",
        'if isinstance(arguments["target"], np.ndarray):',
        "if False:",
        tests("jax_pallas_sharded", "wrapped"),
    ),
    Mutation("jax_pallas/sharded.py", "if name not in tokens)", "if name)", tests("jax_pallas_sharded", "explicit")),
    Mutation("jax_pallas/primitives.py", "axes.varying - names", "axes.varying", JAX_SHARDS),
    Mutation("jax_pallas/row_math.py", "devices.sum(valid.sum())", "valid.sum()", JAX_TOKEN_AXES),
    Mutation("jax_pallas/row_math.py", "devices.sum(denominator)", "denominator", JAX_TOKEN_AXES),
    Mutation(
        "jax_pallas/row_math.py",
        "devices.max(jnp.abs(row_weight).max(initial=0.0))",
        "jnp.abs(row_weight).max(initial=0.0)",
        JAX_TOKEN_AXES,
    ),
    Mutation(
        "jax_pallas/scaling.py",
        "gradient if scale is None else gradient / scale, named",
        "gradient, named",
        JAX_TOKEN_AXES,
    ),
    Mutation(
        "jax_pallas/token_ops.py", "token.devices.sum_of_shared(d, array)", "d", tests("jax_pallas_sharded", "closure")
    ),
    Mutation("jax_pallas/gathering.py", "if needs_grad.d_weight and into is None:", "if False:", JAX_TOKEN_AXES),
    Mutation("jax_pallas/devices.py", " if axis not in varying(shared))", ")", JAX_TOKEN_AXES),
    Mutation("jax_pallas/problem.py", "return chunks.rows >= problem.tokens and min", "return min", JAX_SCALE),
    Mutation("jax_pallas/problem.py", 'if plan.path != "chunked" or ', "if ", JAX_SCALE),
    Mutation("jax_pallas/primitives.py", "    return context.num_devices\n", "    return 1\n", JAX_SCALE),
    Mutation("jax_pallas/primitives.py", " if name not in context.manual_axes)", ")", JAX_SCALE),
)
STORED_LOGITS = (
    Mutation(
        "core_triton/stored_logits.py",
        "factor * (sum_exp_log + moved * total)",
        "factor * sum_exp_log",
        tests("core_triton_interpreted", "stored"),
    ),
    Mutation(
        "core_triton/stored_logits.py",
        "columns == tl.load(target_ptr + row) - first_class",
        "columns == tl.load(target_ptr + row)",
        tests("core_triton_interpreted", "shards-float32"),
    ),
    Mutation("core_triton/stored_logits.py", "tl.where(contributes, d_logits, 0.0)", "d_logits", EDGES),
    Mutation("core_triton/float32_matmuls.py", "min(first + part_inner, inner)", "first + part_inner", FLOAT32_MATMULS),
    Mutation("core_triton/float32_matmuls.py", "EVEN=inner % float32_tiles.BLOCK_K == 0", "EVEN=True", FLOAT32_MATMULS),
    Mutation("core_triton/float32_matmuls.py", "ADDS=parts == 1 and not first", "ADDS=not first", FLOAT32_MATMULS),
    Mutation("core_triton/float32_matmuls.py", "written[0] += total", "written[0] -= total", FLOAT32_MATMULS),
    Mutation("linear_ce/float32_tiles.py", "-(-tiles * parts // programs)", "tiles * parts // programs", SHARED_TILES),
    Mutation("linear_ce/float32_tiles.py", "2 * tiles * parts < programs", "tiles * parts < programs", SHARED_TILES),
    Mutation("linear_ce/float32_tiles.py", "waves * programs // tiles, ", "", SHARED_TILES),
    Mutation("jax_pallas/float32_matmuls.py", "- first, jnp.int32(steps)", ", jnp.int32(steps)", JAX_FLOAT32_MATMULS),
    Mutation("jax_pallas/float32_matmuls.py", "if added_ref is not None", "if added_ref is None", JAX_FLOAT32_MATMULS),
    Mutation("jax_pallas/float32_matmuls.py", "(1, 1), (1, 0), (0, 1)", "(1, 1), (1, 0)", JAX_FLOAT32_MATMULS),
    Mutation("jax_pallas/float32_matmuls.py", "jnp.where(total == total, total, 0.0)", "total", JAX_FLOAT32_MATMULS),
    Mutation("jax_pallas/float32_matmuls.py", "else total + written", "else written", JAX_FLOAT32_MATMULS),
    Mutation("core_triton/stored_logits.py", "kept.append(logits)", "kept.append(logits.clone().mul_(1.01))", EDGES),
    Mutation(
        "linear_ce/chunking.py",
        "LEAST_FLOAT32_ROWS if float32 else tokens",
        "LEAST_FLOAT32_ROWS",
        tests("chunking", "kept"),
    ),
    Mutation(
        "jax_pallas/chunk_config.py",
        "return chunks * (rows + D_WEIGHT_ROWS)",
        "return chunks",
        tests("chunking", "of_jax"),
    ),
    Mutation(
        "jax_pallas/stored_logits.py",
        "rows.put_fresh(stored, function(rows.of(stored), rows))",
        "rows.put(stored, function(rows.of(stored), rows))",
        tests("jax_pallas_numeric", "stored"),
    ),
    Mutation(
        "jax_pallas/plan.py",
        "padded = key.pads_shards or w.shape[key.vocab_axis] != key.classes",
        "padded = key.pads_shards",
        tests("jax_pallas_plan", "stored"),
    ),
    Mutation("jax_pallas/plan.py", "stored = None if one_tile else", "stored =", tests("jax_pallas_plan", "stored")),
    Mutation(
        "jax_pallas/ops.py",
        "return STORED_TILES",
        "return STORED_TILES._replace(partial=chunked.XLA_TILES.d_logits)",
        tests("jax_pallas_numeric", "stored"),
    ),
)
SMOOTHING = (
    Mutation("core_triton/smoothing.py", "theta + scale * factor * mean_weight", "theta", EDGES),
    Mutation("core_triton/smoothing.py", "mean_weight * target_logit - mean_logit", "target_logit - mean_logit", EDGES),
    Mutation("core_triton/smoothing.py", "self.class_weight, row, self", "None, row, self", EDGES),
    Mutation("core_triton/smoothing.py", "(factor * row_factor)[:, None]", "row_factor[:, None]", EDGES),
    Mutation("jax_pallas/smoothing.py", "loss + term, loss)", "loss, loss)", JAX_SMOOTHING),
    Mutation("jax_pallas/smoothing.py", "theta + term, theta)", "theta, theta)", JAX_SMOOTHING),
    Mutation("jax_pallas/smoothing.py", "summed = d_input.astype", "summed = 0 * d_input.astype", JAX_SMOOTHING),
    Mutation("jax_pallas/smoothing.py", "self._factor() / classes * w", "self._factor() * w", JAX_SMOOTHING),
)
INTO, JAX_INTO = ("tests/test_core_triton_grad_into.py",), ("tests/test_jax_pallas_grad_into.py",)
SPLIT, JAX_SPLIT = ("tests/test_core_triton_head_precision.py",), ("tests/test_jax_pallas_head_precision.py",)
JAX_FLOAT32_SUMS = tests("jax_pallas_hopper_gradients", "sums_of_a_float32_head")
JAX_SPLIT_SHARDS = tests("jax_pallas_shard_rows", "split and head or errors")
SPLIT_TILES = tests("jax_pallas_hopper_logits", "test_exponentials and split")
IN_PLACE = tests("jax_pallas_hopper_logits", "test_exponentials and place")
JAX_SPLIT_CALL = tests("jax_pallas_scaled_exp", "split_head")
IN_FIRST_CHUNK = tests("jax_pallas_first_chunk", "test_exponentials and place")
WAVES = tests("core_triton_head_precision", "whole_waves")
HEAD_COPY = tests("core_triton_interpreted", "copies_of_a_head")
SPLIT_CASES = tests("core_triton_interpreted", "edges-bfloat16 and not sm80")
HEAD_FLOAT32 = (
    Mutation("core_triton/problem.py", "if self.started or not first:", "if not first:", INTO),
    Mutation("core_triton/problem.py", "first=first and not self.started)", "first=first)", INTO),
    Mutation("core_triton/grad_into.py", "        self.done = True\n", "        self.done = False\n", INTO),
    Mutation("core_triton/grad_into.py", "            one == 1,\n", "            one == one,\n", INTO),
    Mutation("core_triton/grad_into.py", "grad_into is not None and hooks(True)", "False", INTO),
    Mutation("core_triton/ops.py", "torch.float16 and grad_into is None", "torch.float16", INTO),
    Mutation(
        "core_triton/grad_into.py", "    if explains or not torch.is_grad_enabled():\n        return None", "", INTO
    ),
    Mutation("core_triton/grad_into.py", "not torch.compiler.is_compiling() and _overlap", "False and _overlap", INTO),
    Mutation("core_triton/chunk_config.py", "weight_itemsize < 4 and not grad_into", "weight_itemsize < 4", INTO),
    Mutation("jax_pallas/problem.py", "return HeadSums(problem.grad_into, d_bias)", "pass", JAX_INTO),
    Mutation("jax_pallas/chunked.py", "head_scale if problem.grad_into is not None else ", "", JAX_INTO),
    Mutation("jax_pallas/linear_ce.py", "jax.lax.stop_gradient(total)", "total", JAX_INTO),
    Mutation("jax_pallas/chunk_config.py", "weight_itemsize < 4 and not grad_into", "weight_itemsize < 4", JAX_INTO),
    Mutation("jax_pallas/options.py", "d_weight = self.has_grad_into or named", "d_weight = named", JAX_INTO),
    Mutation("jax_pallas/options.py", 'and not named["grad_into"].perturbed', "and False", JAX_INTO),
    Mutation("jax_pallas/options.py", "None if self.has_grad_into else d_weight", "d_weight", JAX_INTO),
    Mutation("jax_pallas/ops.py", "lambda grad_into, _: (grad_into,)", "lambda grad_into, _: (None,)", JAX_INTO),
    Mutation(
        "jax_pallas/batching.py",
        "            if options.has_grad_into:\n                raise",
        "            if False:\n                raise",
        JAX_INTO,
    ),
    Mutation(
        "jax_pallas/batching.py", 'adds_in_backward) or axis_of["grad_into"] is not None', "adds_in_backward)", JAX_INTO
    ),
    Mutation("jax_pallas/ops.py", "arrays = options.replaced(arrays, grad_into=None)", "pass", JAX_INTO),
    Mutation(
        "jax_pallas/explanation.py", "grad_into=grad_into if any(needs_grad) else None", "grad_into=grad_into", JAX_INTO
    ),
    Mutation(
        "jax_pallas/arguments.py", "    if missing and", "    if False and", tests("jax_pallas_sharding", "grad_into")
    ),
    Mutation("jax_pallas/arguments.py", "    if more:\n", "    if False:\n", tests("jax_pallas_sharding", "grad_into")),
    Mutation("jax_pallas/plan.py", "vocab % 8 == 0)", "True)", JAX_INTO),
    Mutation("jax_pallas/plan.py", "&= not key.grad_into and not begun", "&= not begun", JAX_INTO),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "if adds and not float32 else 0",
        "if adds else 0",
        tests("jax_pallas_hopper_gradients", "added_to_float32"),
    ),
    Mutation("core_triton/problem.py", "torch.sub(w, both[:, :hidden]", "torch.sub(w, w", SPLIT),
    Mutation("core_triton/chunked.py", "+ d_input[:, problem.input.shape[1] :]", "", SPLIT),
    Mutation("core_triton/scaled_exp.py", "x[:, hidden : 2 * hidden] = x[:, :hidden]", "pass", SPLIT_CASES),
    Mutation("core_triton/scaled_exp.py", "first=vocab_chunk.start == first == 0)", "first=first == 0)", SPLIT_CASES),
    Mutation("core_triton/head_copy.py", "x.new_empty if width == columns else x.new_zeros", "x.new_empty", HEAD_COPY),
    Mutation(
        "core_triton/tile_config.py",
        "head_rows = whole_waves(first_rows if first_rows == tokens else rows, head_rows)",
        "pass",
        WAVES,
    ),
    Mutation("core_triton/tile_config.py", "if head_rows == classes:", "if False:", WAVES),
    Mutation("core_triton/head_copy.py", "low = (w - high.to(tl.float32))", "low = (w - w)", HEAD_COPY),
    Mutation("core_triton/head_copy.py", "place + hidden, low", "place, low", HEAD_COPY),
    Mutation("core_triton/head_copy.py", "flagged(flag_ptr, row_blocks) != 0", "flag_ptr is None", HEAD_COPY),
    Mutation("core_triton/head_copy.py", "2 * flag.tensor.shape[1]", "1", HEAD_COPY),
    Mutation("core_triton/smoothing.py", "sums.view(-1, len(mean_row)).sum(0)", "sums[len(mean_row) :]", SPLIT_CASES),
    Mutation("core_triton/row_kernels.py", "if not SPLITS_HEAD:", "if True:", HEAD_COPY),
    Mutation(
        "jax_pallas/problem.py",
        "lax.reduce_precision(w, finfo.nexp, finfo.nmant)",
        "w.astype(dtype).astype(w.dtype)",
        JAX_SPLIT,
    ),
    Mutation(
        "jax_pallas/chunked.py", "d_rows.reshape(len(d_rows), 2, -1).sum(1)", "d_rows[:, : x.shape[1] // 2]", JAX_SPLIT
    ),
    Mutation(
        "jax_pallas/hopper_logits.py",
        "half.masked(jnp.maximum(exponents, NO_PROBABILITY), piece, 0.0)",
        "jnp.maximum(exponents, NO_PROBABILITY)",
        tests("jax_pallas_hopper_logits", "without_stored"),
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "halves_of(w) if matmul.head_parts == 2 else ",
        "",
        tests("jax_pallas_token_loss", "linear_log_probs_bit_for_bit"),
    ),
    Mutation("jax_pallas/kernels.py", "jnp.where(w == w, halves", "jnp.where(True, halves", JAX_SPLIT),
    Mutation("jax_pallas/kernels.py", "full_like(bits, 16)) & 1)", "full_like(bits, 16)) & 0)", JAX_SPLIT),
    Mutation("jax_pallas/head_rows.py", "part = jnp.where(vocab_chunk.fresh, part, 0)", "pass", JAX_SPLIT),
    Mutation(
        "jax_pallas/head_rows.py",
        "return total + float32_matmul(part, low, (1, axis)), None",
        "return total, None",
        JAX_SPLIT,
    ),
    Mutation("jax_pallas/head_rows.py", "picked if problem.spec.splits_head else", "", JAX_SPLIT),
    Mutation("jax_pallas/tile_config.py", "* block_v)\n\n    def config", ")\n\n    def config", JAX_SPLIT),
    Mutation("jax_pallas/hopper_tiles.py", "STEP) if repeats else k", "STEP) if False else k", SPLIT_TILES),
    Mutation(
        "jax_pallas/hopper_registers.py",
        "(high, whole - high.astype(jnp.float32))",
        "(high, whole - whole)",
        tests("jax_pallas_hopper_gradients", "d_input_of_a_float32_head and split"),
    ),
    Mutation(
        "jax_pallas/hopper_split_head.py",
        "when(last)(lambda: clear_after(w, kernel.kept, layout))",
        "pass",
        tests("jax_pallas_hopper_gradients", "d_input_of_a_float32_head and split"),
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "two_views((2, 2, *kernel.piece_shape), dtype,",
        "two_views((2, 2, *kernel.piece_shape), e.dtype,",
        tests("jax_pallas_hopper_gradients", "float32_d_weight_that_is_written"),
    ),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "jnp.split(halves(picked, held.dtype, 1), 2, 1)",
        "picked.astype(held.dtype), jnp.zeros_like(picked, held.dtype)",
        tests("jax_pallas_head_precision", "adds_both_halves"),
    ),
    Mutation("jax_pallas/hopper_tiles.py", "class_block += own.offsets()[3]", "pass", SPLIT_TILES),
    Mutation("jax_pallas/hopper_logits.py", "*([] if count is None else [count])", "", SPLIT_TILES),
    Mutation(
        "jax_pallas/hopper_split_head.py",
        "when(kept < STEP)(lambda: clear_after(w, kept, layout))",
        "pass",
        JAX_FLOAT32_SUMS,
    ),
    Mutation(
        "jax_pallas/plan.py",
        'elif w.dtype != x.dtype and x.dtype != "bfloat16":',
        "elif w.dtype != x.dtype:",
        JAX_SPLIT_SHARDS,
    ),
    Mutation("jax_pallas/problem.py", "rounded(w, self.input.dtype) if", "w if", JAX_SPLIT),
    Mutation("jax_pallas/hopper_split_head.py", "    if kernel.rounds:", "    if False:", JAX_FLOAT32_SUMS),
    Mutation(
        "jax_pallas/hopper_split_logits.py",
        "jnp.where(self.ids() < self.classes - self.first_class, values, other)",
        "values",
        IN_PLACE,
    ),
    Mutation(
        "jax_pallas/hopper_split_logits.py",
        "jnp.where(class_block == inside, place, -1)",
        "place",
        IN_FIRST_CHUNK,
    ),
    Mutation("jax_pallas/hopper_split_logits.py", "(column < first.piece) |", "", IN_FIRST_CHUNK),
    Mutation(
        "jax_pallas/hopper_split_logits.py",
        "classes if others is None else cdiv(classes, CLASS_BLOCK) * CLASS_BLOCK",
        "classes",
        IN_FIRST_CHUNK,
    ),
    Mutation("jax_pallas/row_kernels.py", "if places is None else block_width", "", JAX_SPLIT_CALL),
    Mutation("jax_pallas/plan.py", "vocab % (32 if key.vocab_axis else 8) == 0", "True", JAX_SPLIT),
    Mutation("jax_pallas/head_rows.py", "jnp.where(is_class, w, 0), part", "w, part", JAX_SPLIT_SHARDS),
)
SAVED = tests("core_triton_saved", "not compile and not opcheck")
SAVED_KERNELS = tests("core_triton_interpreted", "saved_rows")
JAX_SAVED = tests("jax_pallas_saved", "rows_that_do or part_of")
JAX_SAVED_FLOAT16 = tests("jax_pallas_shard_rows", "saved and confident")
JAX_BUDGETS = tests("jax_pallas_saved", "smallest_budget")
JAX_EXPLAINED = tests("jax_pallas_plan", "calls_without_gradients")
SAVED_ROWS = (
    Mutation("core_triton/chunked.py", "torch.where(lost, torch.nan, 1.0)", "torch.where(lost, 0.0, 1.0)", SAVED),
    Mutation(
        "core_triton/chunked.py", "torch.full_like(lse, 2.0**-FLOAT16", "torch.full_like(lse, 2.0**FLOAT16", SAVED
    ),
    Mutation("core_triton/chunked.py", "chunk.start == 0 and not started", "chunk.start == 0", SAVED),
    Mutation("core_triton/saved_ops.py", "factor * row_weight, 0.0)[others]", "factor, 0.0)[others]", SAVED),
    Mutation("core_triton/saved_ops.py", "torch.where(row_weight != 0, d_loss, 0.0)", "d_loss", SAVED),
    Mutation("core_triton/saved_ops.py", "not (in_place and rows == tokens)", "not (rows == tokens)", SAVED),
    Mutation(
        "core_triton/saved_ops.py", "if d_entropy is not None or d_lse is not None", "if d_lse is not None", SAVED
    ),
    Mutation(
        "linear_ce/chunking.py",
        "rows -= rows % SAVED_ROWS_MULTIPLE",
        "rows -= 0",
        tests("chunking", "saved_rows"),
    ),
    Mutation("core_triton/row_statistics.py", "- shift[None, :] * part", "", SAVED_KERNELS),
    Mutation("core_triton/row_statistics.py", "total * tl.exp2(-shift)", "total", SAVED_KERNELS),
    Mutation(
        "core_triton/scaled_exp.py",
        "if self.hook is None:\n            packed_rows.finish",
        "if False:\n            packed_rows.finish",
        SAVED_KERNELS,
    ),
    Mutation("core_triton/saved_kernels.py", "if rho != rho", "if rho == 1", SAVED_KERNELS),
    Mutation("core_triton/saved_kernels.py", "tl.where(theta == 0, -1, target)", "target", SAVED_KERNELS),
    Mutation("core_triton/saved_kernels.py", "tl.where(factor == 0, 0.0, rho * factor)", "rho * factor", SAVED_KERNELS),
    Mutation(
        "core_triton/saved_kernels.py",
        "tl.maximum(total - tl.exp2(target_logit * LOG2_E - ref_exponent), total * 2.0**-24)",
        "total",
        SAVED_KERNELS,
    ),
    Mutation(
        "core_triton/saved_ops.py",
        "factor if saved.unit_scale is None else factor * saved.unit_scale",
        "factor",
        SAVED_KERNELS,
    ),
    Mutation(
        "core_triton/scaled_exp.py",
        "plan.fits_float16 and (any(needs_grad) or saved_e is not None)",
        "plan.fits_float16 and any(needs_grad)",
        SAVED_KERNELS,
    ),
    Mutation("core_triton/scaled_exp.py", "_replace(largest_x=saved.largest_x)", "", SAVED_KERNELS),
    Mutation("core_triton/scaled_exp.py", "factor = (rows.rho != 0).float()", "pass", SAVED_KERNELS),
    Mutation(
        "core_triton/scaled_exp.py",
        "if not plan.d_weight_kernel:\n                scratch",
        "if True:\n                scratch",
        tests("core_triton_kernels", "saved_rows_of_float16"),
    ),
    Mutation(
        "core_triton/saved_ops.py",
        "[packed and float16 and needed for needed in (d_input, head)]",
        "[packed and float16 and head] * 2",
        SAVED_KERNELS,
    ),
    Mutation(
        "jax_pallas/float16.py",
        "jnp.maximum(-jnp.expm1(target_logit - lse), 2.0**-24)",
        "1.0",
        tests("jax_pallas_float16", "largest_factor"),
    ),
    Mutation(
        "jax_pallas/saved_ops.py",
        "factor if saved.unit_scale is None else factor * saved.unit_scale",
        "factor",
        JAX_SAVED_FLOAT16,
    ),
    Mutation(
        "jax_pallas/float16.py",
        "chunk_exponent(jnp.where(largest < jnp.inf, largest, 0.0))",
        "jnp.int32(0)",
        tests("jax_pallas_float16", "times_rho"),
    ),
    Mutation("jax_pallas/chunked.py", "jnp.where(lost, jnp.nan, 1.0)", "jnp.where(lost, 0.0, 1.0)", JAX_SAVED),
    Mutation(
        "jax_pallas/chunked.py",
        "if vocab_chunk.fresh is not None:\n                e = ",
        "if False:\n                e = ",
        JAX_SAVED,
    ),
    Mutation(
        "jax_pallas/saved_ops.py",
        "factor = jnp.where(options.row_weight(arrays) != 0, d_loss, 0.0)",
        "factor = d_loss",
        JAX_SAVED,
    ),
    Mutation(
        "jax_pallas/saved_kernels.py",
        "lost = rho != rho",
        "lost = rho == 1",
        JAX_SAVED,
    ),
    Mutation(
        "jax_pallas/row_statistics.py",
        "exp_logs[:, :n] - shift * sums[:, :n]",
        "exp_logs[:, :n]",
        tests("jax_pallas_saved", "rows_that_do or part_of"),
    ),
    Mutation(
        "jax_pallas/hopper_logits.py",
        "terms.sum(1)",
        "exponents.sum(1)",
        tests("jax_pallas_hopper_logits", "test_exponentials"),
    ),
    Mutation(
        "jax_pallas/saved_ops.py",
        "if lowered_as != options.saved_as:",
        "if False:",
        tests("jax_pallas_export", "what_is_saved"),
    ),
    Mutation(
        "jax_pallas/batching.py",
        "saved_budget=batch * options.saved_budget",
        "saved_budget=options.saved_budget",
        tests("jax_pallas_saved", "batch_of_losses"),
    ),
    Mutation("jax_pallas/saved_ops.py", "plan_passes(*passes, *others)", "plan_passes(*passes)", JAX_BUDGETS),
    Mutation(
        "jax_pallas/ops.py",
        "plan_passes(backward, partial(forward_problem, options, arrays))",
        "backward()",
        JAX_BUDGETS,
    ),
    Mutation("jax_pallas/ops.py", "        partial(forward_problem, options, arrays),\n", "", JAX_BUDGETS),
    Mutation("linear_ce/chunking.py", "max(refusals, key=lambda refusal: refusal.least)", "refusals[0]", JAX_BUDGETS),
    Mutation(
        "jax_pallas/explanation.py",
        'gradients or (into and reduction != "none"), False',
        "gradients, False",
        JAX_EXPLAINED,
    ),
    Mutation("jax_pallas/explanation.py", "batch_invariant or with_entropy", "batch_invariant", JAX_EXPLAINED),
    Mutation(
        "jax_pallas/plan.py",
        'self.path == "scaled_exp" or self.chunk_config.keeps_logits',
        'self.path != "recompute"',
        tests("jax_pallas_plan", "computed_again"),
    ),
    Mutation(
        "core_triton/plan.py",
        'self.path == "scaled_exp" or self.chunk_config.keeps_logits',
        'self.path != "recompute"',
        tests("core_triton_errors", "computed_again"),
    ),
)
TORCH_ENTROPY = tests("core_triton_token_loss", "custom-entropy and (budget or options)")
TORCH_BONUS = tests("core_triton_token_loss", "bonus_of_the_entropy_alone")
KERNEL_ENTROPY = tests("core_triton_interpreted", "token_losses_in_several_chunks and float16")
JAX_ENTROPY = tests("jax_pallas_token_loss", "focal-entropy")
JAX_KERNELS_OF_ENTROPY = tests("jax_pallas_token_loss", "kernels_of_a_loss_of_the_entropy")
ENTROPY_LOSSES = (
    Mutation("core_triton/row_math.py", "alpha - d_entropy * entropy, beta", "alpha, beta", TORCH_ENTROPY),
    Mutation("core_triton/token_hook.py", "(weight != 0) | (self.d_entropy[rows] != 0)", "(weight != 0)", TORCH_BONUS),
    Mutation(
        "core_triton/token_hook.py",
        "torch.where(contributes, -entropy_weight * kept, 0.0)",
        "torch.where(contributes, -entropy_weight * self.row_weight[rows], 0.0)",
        tests("core_triton_interpreted", "named_token_losses_in_one_kernel"),
    ),
    Mutation("core_triton/ops.py", "None if upstream is None else -upstream", "upstream", TORCH_ENTROPY),
    Mutation(
        "core_triton/ops.py",
        "found and not statistics & D_ENTROPY",
        "found",
        tests("core_triton_token_loss", "fewer_matmuls_with_a_frozen_head"),
    ),
    Mutation("core_triton/ops.py", "coefficients, needs_grad, scales=pair", "coefficients, needs_grad", KERNEL_ENTROPY),
    Mutation(
        "core_triton/plan.py",
        "None if key.entropy else _plan_a_again(key)",
        "_plan_a_again(key)",
        tests("core_triton_errors", "matmuls_of_a_loss_of_the_entropy"),
    ),
    Mutation("jax_pallas/row_math.py", "alpha - d_entropy * entropy, beta", "alpha, beta", JAX_ENTROPY),
    Mutation("jax_pallas/ops.py", "of_rows = -upstream, d_entropy", "of_rows = upstream, d_entropy", JAX_ENTROPY),
    Mutation(
        "jax_pallas/token_ops.py",
        "coefficients, needs_grad, scales\n",
        "coefficients, needs_grad\n",
        JAX_KERNELS_OF_ENTROPY,
    ),
    Mutation(
        "jax_pallas/chunked.py",
        "found.gradient_weight, rows.row_weight, None",
        "rows.row_weight, rows.row_weight, None",
        JAX_KERNELS_OF_ENTROPY,
    ),
)

INVARIANT = tests("core_triton_interpreted", "batch_invariant")
INVARIANT_PLAN = tests("core_triton_batch_invariant", "order_of_sums")
INVARIANT_CODE = tests("core_triton_batch_invariant", "machine_code")
INVARIANT_ERRORS = tests("core_triton_batch_invariant", "refused")
PALLAS_INVARIANT = tests("jax_pallas_shard_rows", "tokens and invariant")
PALLAS_INVARIANT_ERRORS = tests("jax_pallas_batch_invariant", "refused")
BATCH_INVARIANT = (
    # In core_triton: a repair writes the rows that need it only.
    Mutation(
        "core_triton/kernels.py",
        "tl.where(stored[:, None], values.to(matrix.dtype), before)",
        "values.to(matrix.dtype)",
        INVARIANT,
    ),
    Mutation("core_triton/ops.py", "by_row = BY_ROW if options.batch_invariant else 0", "by_row = 0", INVARIANT),
    Mutation(
        "core_triton/linear_ce.py", "statistics |= BY_ROW if call.options.batch_invariant else 0", "pass", INVARIANT
    ),
    # One order of sums for any number of rows.
    Mutation(
        "core_triton/row_kernels.py",
        'triton.jit(do_not_specialize=["rows"])(finish_rows_kernel.fn)',
        "triton.jit(finish_rows_kernel.fn)",
        INVARIANT_CODE,
    ),
    Mutation(
        "core_triton/scaled_exp.py",
        '"by_row": self.by_row}',
        '"by_row": False}',
        INVARIANT_CODE,
    ),
    Mutation("core_triton/tile_config.py", "narrow[-1:], tiles[-1:]", "narrow[-1:], tiles", INVARIANT_PLAN),
    Mutation("core_triton/tile_config.py", "narrow[-1:], tiles[-1:]", "narrow, tiles[-1:]", INVARIANT_PLAN),
    Mutation(
        "core_triton/tile_config.py",
        "(block_v if batch_invariant else MIN_VOCAB_CHUNK)",
        "MIN_VOCAB_CHUNK",
        INVARIANT_PLAN,
    ),
    Mutation("core_triton/plan.py", "if key.batch_invariant:", "if False:", INVARIANT_PLAN),
    # What cannot hold is refused.
    Mutation(
        "core_triton/plan.py",
        "if not key.d_input or (plan.d_input_tiling is not None and not key.splits_head):",
        "if True:",
        INVARIANT_ERRORS,
    ),
    Mutation("core_triton/plan.py", 'if key.stage == "gradients":', "if False:", INVARIANT_ERRORS),
    Mutation("core_triton/plan.py", 'if x.dtype != "bfloat16":', "if False:", INVARIANT_ERRORS),
    Mutation("linear_ce/spec.py", 'if batch_invariant and implementation == "chunked":', "if False:", INVARIANT_ERRORS),
    Mutation("linear_ce/spec.py", "if batch_invariant and label_smoothing:", "if False:", INVARIANT_ERRORS),
    Mutation("linear_ce/spec.py", "if batch_invariant and saved_budget:", "if False:", INVARIANT_ERRORS),
    # The same in jax_pallas.
    Mutation(
        "jax_pallas/kernels.py",
        "part.inside & leaves_range(load(total_ref",
        "part.inside | leaves_range(load(total_ref",
        PALLAS_INVARIANT,
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "pl.cdiv(rows, ROW_BLOCK) * ROW_BLOCK if statistics & BY_ROW else rows",
        "rows",
        tests("jax_pallas_kernels", "repair_recomputes"),
    ),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "any(needs_grad) or saves, statistics & BY_ROW != 0",
        "any(needs_grad) or saves, False",
        PALLAS_INVARIANT,
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "*sizes, batch_invariant=batch_invariant",
        "*sizes",
        tests("jax_pallas_batch_invariant", "splits_no_sum"),
    ),
    Mutation(
        "jax_pallas/tile_config.py",
        "classes, FIXED_ROWS, False, programs",
        "classes, FIXED_ROWS, True, programs",
        tests("jax_pallas_batch_invariant", "order_of_sums"),
    ),
    Mutation("jax_pallas/plan.py", "if key.d_input and not mosaic:", "if False:", PALLAS_INVARIANT_ERRORS),
    Mutation("jax_pallas/plan.py", 'if key.stage == "gradients":', "if False:", PALLAS_INVARIANT_ERRORS),
    Mutation("jax_pallas/plan.py", "\n    if w.dtype != x.dtype:", "\n    if False:", PALLAS_INVARIANT_ERRORS),
)

IN_PIECES = tests("core_triton_interpreted", "pieces")
SM80_PIECES = tests("core_triton_interpreted", "sm80-pieces")
COMPILED_PIECES = tests("core_triton_kernels", "pieces_for_compute_capability_8 and 80-80")
COMPILED_D_WEIGHT = tests("core_triton_kernels", "d_weight_for_compute_capability_8 and 80")
SM80_PLANS = tests("chunk_cost", "first_chunk_for_compute_capability_8")
D_INPUT_OF_PIECES = tests("core_triton_input_grad", "test_d_input and (256 or 384)")
TILES_OF_PIECES = tests("core_triton_first_chunk", "each_tile")
LAUNCHES_OF_PIECES = tests("core_triton_first_chunk", "one_launch")
ALL_STATISTICS = tests("jax_pallas_hopper_logits", "test_exponentials")
STATISTICS_OF_TILES = tests("core_triton_first_chunk", "all_statistics")
FIRST_CHUNKS = tests("chunk_cost", "pieces_of_a_first_chunk or explain_shows")
FIRST_CHUNK_COST = tests("chunk_cost", "whole_row_blocks or few_pieces or one_launch or any_of_the_best")
OF_FLOAT16 = tests("chunk_cost", "first_chunk_of_float16")
FIRST_CHUNK = (
    Mutation(
        "core_triton/scaled_exp.py", "in reversed(e.pieces(self.classes))", "in e.pieces(self.classes)", IN_PIECES
    ),
    Mutation("core_triton/scaled_exp.py", "if self.d_input is not None and d_input_first:", "if False:", IN_PIECES),
    Mutation(
        "core_triton/scaled_exp.py",
        "if not self.plan.holds_rows or d_input_first:",
        "if not self.plan.holds_rows:",
        IN_PIECES,
    ),
    Mutation(
        "core_triton/first_chunk.py", "self.others[place - 1, :n, within]", "self.others[0, :n, within]", IN_PIECES
    ),
    Mutation("core_triton/row_kernels.py", "target < piece, place, later", "target < piece, place, place", IN_PIECES),
    Mutation("core_triton/row_kernels.py", "(target // piece - 1)", "(target // piece)", IN_PIECES),
    Mutation("core_triton/kernels.py", "(column // piece - 1) * piece_rows", "0", IN_PIECES),
    Mutation("core_triton/float16.py", "columns < piece, place, later", "columns < piece, place, place", IN_PIECES),
    Mutation("core_triton/float16.py", "(columns // piece - 1).to", "(columns // piece).to", IN_PIECES),
    Mutation("core_triton/scaled_exp.py", "slice(vocab_chunk.start + start,", "slice(start,", IN_PIECES),
    Mutation("core_triton/plan.py", "fits_float16 and key.label_smoothing != 0", "fits_float16", OF_FLOAT16),
    Mutation("core_triton/plan.py", "begun = fits_float16 and key.label_smoothing != 0", "begun = False", OF_FLOAT16),
    Mutation("jax_pallas/plan.py", "and by_class and not begun", "and by_class", OF_FLOAT16),
    Mutation("jax_pallas/plan.py", "fits_float16 and key.label_smoothing != 0", "fits_float16", OF_FLOAT16),
    Mutation("core_triton/kernels.py", "column += first_class", "column += 0", IN_PIECES),
    Mutation("core_triton/kernels.py", "(number - 1) * piece_rows - number", "(number - 1) * piece_rows", SM80_PIECES),
    Mutation("core_triton/kernels.py", "number == 0, matrix, others", "number <= 1, matrix, others", SM80_PIECES),
    Mutation("core_triton/kernels.py", "first_class // BLOCK_V * BLOCK_V", "first_class", COMPILED_PIECES),
    Mutation("core_triton/ampere_logits.py", "piece_rows, first + column)", "piece_rows, column)", TILES_OF_PIECES),
    Mutation("core_triton/ampere_common.py", "others + start, stride", "others, stride", D_INPUT_OF_PIECES),
    Mutation(
        "core_triton/ampere_gradients.py",
        "e_stride, piece, piece_rows, steps.first)",
        "e_stride, piece, piece_rows, 0)",
        D_INPUT_OF_PIECES,
    ),
    Mutation("core_triton/plan.py", 'capability, gpu = 80, "a100"', "capability = 80", SM80_PLANS),
    Mutation("core_triton/ampere_common.py", "if len(read_later) > 0:", "if False:", COMPILED_D_WEIGHT),
    Mutation("core_triton/plan.py", "if ampere and d_weight_kernel:", "if False:", SM80_PLANS),
    Mutation("core_triton/hopper_gradients.py", "if k < piece:", "if k <= piece:", D_INPUT_OF_PIECES),
    Mutation("core_triton/hopper_gradients.py", "(k // piece - 1) * piece_rows", "0", D_INPUT_OF_PIECES),
    Mutation(
        "core_triton/gluon_common.py",
        "quarters(left, layout) + quarters(right, layout)",
        "quarters(right, layout) + quarters(left, layout)",
        INPUT_GRAD,
    ),
    Mutation(
        "core_triton/kernels.py",
        '"arch": plan.arch} if plan.arch',
        '"arch": plan.arch} if False',
        tests("core_triton_kernels", "compiled_for_it_on_hopper"),
    ),
    Mutation("core_triton/gluon_common.py", "squares += to_rows(", "squares = to_rows(", STATISTICS_OF_TILES),
    Mutation("core_triton/gluon_common.py", "logit += to_rows(", "logit = to_rows(", STATISTICS_OF_TILES),
    Mutation("jax_pallas/hopper_logits.py", "0.0, 0.0, values * exponents", "0.0, 0.0, values", ALL_STATISTICS),
    Mutation("core_triton/ampere_logits.py", "place, _ = targets_of", "_, place = targets_of", STATISTICS_OF_TILES),
    Mutation("core_triton/hopper_common.py", "in range(BLOCK_D, hidden, BLOCK_D)", "in range(0)", TILES_OF_PIECES),
    Mutation("core_triton/hopper_common.py", "use_acc=ADDS", "use_acc=False", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "gl.maximum(part * part_steps, 1)", "part * part_steps", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "if head.scale is not None", "if head.scale is None", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "(number - 1) * piece_rows", "number * piece_rows", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "column += sizes.first_class", "column += 0", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "first_row += OUTSIDE", "first_row += 0", TILES_OF_PIECES),
    Mutation("core_triton/hopper_logits.py", "WHICH, i, 2)", "WHICH, i, 4)", TILES_OF_PIECES),
    Mutation(
        "core_triton/packed_rows.py",
        "config.rows if start < len(rows.order) - config.first_rows else config.first_rows",
        "config.rows",
        LAUNCHES_OF_PIECES,
    ),
    Mutation("core_triton/plan.py", "x.itemsize // ROW_BLOCK * ROW_BLOCK", "x.itemsize", FIRST_CHUNK_COST),
    Mutation("core_triton/tile_config.py", "{one.rows for one in equal}", "{equal[0].rows}", FIRST_CHUNK_COST),
    Mutation("jax_pallas/tile_config.py", "{one.rows for one in equal}", "{equal[0].rows}", FIRST_CHUNK_COST),
    Mutation("linear_ce/chunk_cost.py", "+ call.piece_ns * (pieces.total() - 1)", "", FIRST_CHUNK_COST),
    Mutation("jax_pallas/tile_config.py", "tuple(end - first for", "tuple(end for", tests("chunk_cost", "launched")),
    Mutation("core_triton/tile_config.py", "one.piece < least_piece(one.first_rows), ", "", FIRST_CHUNK_COST),
    Mutation(
        "jax_pallas/tile_config.py",
        "(cdiv(tokens - one.first_rows, one.rows), one.bytes)",
        "one.bytes",
        FIRST_CHUNK_COST,
    ),
    Mutation(
        "linear_ce/chunk_cost.py",
        "    if call.d_weight:\n        pieces",
        "    if True:\n        pieces",
        FIRST_CHUNK_COST,
    ),
    Mutation("core_triton/tile_config.py", "max(0, -(-(tokens - room) // one))", "0", FIRST_CHUNKS),
    Mutation(
        "core_triton/plan.py",
        "plan.scaled_exp_config.usual_rows(tokens) >= enough",
        "plan.chunks.rows >= enough",
        tests("chunk_cost", "needs_no_other_logits"),
    ),
    Mutation(
        "core_triton/tile_config.py", "// first_rows // block_v * block_v", "// rows // block_v * block_v", FIRST_CHUNKS
    ),
    Mutation("core_triton/tile_config.py", "one.first_rows and one.bytes <= enough", "one.first_rows", FIRST_CHUNKS),
    Mutation("core_triton/tile_config.py", "if one.piece >= one.first_rows and", "if one.piece > 0 and", FIRST_CHUNKS),
)

JAX_FIRST_CHUNK = tests("jax_pallas_first_chunk", "scaled_exp")
JAX_OF_PIECES = tests("jax_pallas_first_chunk", "not scaled")
JAX_FIRST_PLANS = tests("chunk_cost", "first_chunk_of_jax or explain_shows")
JAX_FIRST_SPLIT = tests("jax_pallas_head_precision", "explain_names")
JAX_FIRST = (
    Mutation(
        "jax_pallas/first_chunk.py", "number * self.rows, later - number", "number * 64, later - number", JAX_OF_PIECES
    ),
    Mutation("jax_pallas/tile_config.py", "cdiv(groups * rows, CLASS_BLOCK)", "cdiv(0, CLASS_BLOCK)", JAX_OF_PIECES),
    Mutation("jax_pallas/tile_config.py", "groups * rows, CLASS", "groups * rows - 64, CLASS", JAX_OF_PIECES),
    Mutation("jax_pallas/first_chunk.py", "[:, :n]", "[:, -n:]", JAX_FIRST_CHUNK),
    Mutation(
        "jax_pallas/hopper_tiles.py",
        "(column < first.piece) | (row >= first.rows)",
        "column < first.piece",
        JAX_OF_PIECES,
    ),
    Mutation(
        "jax_pallas/hopper_tiles.py", "start + row, HALF), pl.ds(within", "start, HALF), pl.ds(within", JAX_OF_PIECES
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "(v < first.piece) | (v >= own.kernel.classes)",
        "v < first.piece",
        JAX_OF_PIECES,
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py", "either(column < first.piece,", "either(column <= first.piece,", JAX_OF_PIECES
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "load(others_ref, start + row, within)",
        "load(others_ref, start, within)",
        JAX_OF_PIECES,
    ),
    Mutation(
        "jax_pallas/hopper_gradients.py", "in first.pieces(classes)", "in first.pieces(classes)[::-1]", JAX_OF_PIECES
    ),
    Mutation("jax_pallas/hopper_gradients.py", "(vocab if end == classes else end)", "end", JAX_OF_PIECES),
    Mutation(
        "jax_pallas/row_kernels.py",
        "mask=mask & (column >= first.piece))",
        "mask=mask & (column < first.piece))",
        JAX_FIRST_CHUNK,
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "*of_targets, *statistics, others_ref=others_ref)",
        "*of_targets, *statistics)",
        JAX_FIRST_CHUNK,
    ),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "e, held, rho, d_weight)",
        "e, held, rho, d_weight * 0)",
        JAX_FIRST_CHUNK,
    ),
    Mutation("jax_pallas/tile_config.py", "max(0, cdiv(tokens - room, one))", "0", JAX_FIRST_PLANS),
    Mutation("jax_pallas/tile_config.py", "found.piece < FIRST_CHUNK_PIECE * rows", "False", JAX_FIRST_PLANS),
    Mutation("jax_pallas/tile_config.py", "one.bytes <= enough and ", "", JAX_FIRST_PLANS),
    # A float32 d_weight.
    Mutation("jax_pallas/tile_config.py", "2 * hidden // ROW_BLOCK", "hidden // ROW_BLOCK", JAX_FIRST_SPLIT),
    Mutation("jax_pallas/hopper_gradients.py", "1 + (self.float32 and self.first is not None)", "1", JAX_FIRST_CHUNK),
    Mutation("jax_pallas/hopper_gradients.py", "pl.ds(2 * d, 2 * HALF)", "pl.ds(d, 2 * HALF)", JAX_FIRST_CHUNK),
    Mutation("jax_pallas/hopper_gradients.py", "n, others.shape[1])", "n, hidden)", JAX_FIRST_CHUNK),
    Mutation(
        "jax_pallas/hopper_logits.py",
        "first = None if others is None else FirstChunk.of(piece",
        "first = None if True else FirstChunk.of(piece",
        JAX_OF_PIECES,
    ),
)

FITS = tests("core_triton_interpreted", "fit_in_float16")
JAX_FITS = ("tests/test_jax_pallas_float16.py",)
JAX_FITS_PARTS = tests("jax_pallas_plan", "float16")
JAX_FITS_XLA = tests("jax_pallas_recompute", "exponentials-fp16 and not cap")
FLOAT16 = (
    Mutation("core_triton/kernels.py", "return exponentials * tl.exp2(-shift)[:, None]", "return exponentials", FITS),
    Mutation("core_triton/float16.py", "rho *= power_of_two(shift)", "pass", FITS),
    Mutation("core_triton/float16.py", "tl.exp2(shift.to(tl.float32) - row_shift)", "1.0", FITS),
    Mutation("core_triton/float16.py", "rho * power_of_two(-power)", "rho * power_of_two(1 - power)", FITS),
    Mutation("core_triton/float16.py", "total += tl.where(top > none", "total += 0 * tl.where(top > none", FITS),
    Mutation("core_triton/float16.py", "of_head += exponent_of", "0 + exponent_of", FITS),
    Mutation("core_triton/float16.py", "scale_ptr + 1) / tl.load(scale_ptr)", "scale_ptr + 1)", FITS),
    Mutation("core_triton/ranges.py", "(shift[: int(count)] > 0)", "(shift[: int(count)] >= 0)", FITS),
    Mutation(
        "core_triton/gluon_common.py",
        "gl.load(count_ptr + 1)",
        "gl.load(count_ptr)",
        tests("core_triton_input_grad", "test_d_weight"),
    ),
    Mutation("jax_pallas/row_kernels.py", ">> 23) - 127", ">> 23) - 128", JAX_FITS),
    Mutation("jax_pallas/float16.py", "rho *= jnp.exp2(shift) * scale", "rho *= scale", JAX_FITS),
    Mutation(
        "jax_pallas/float16.py",
        "load(theta_ref, at, mask=inside) * scale",
        "load(theta_ref, at, mask=inside)",
        JAX_FITS,
    ),
    Mutation("jax_pallas/float16.py", "load(largest_x_ref, at,", "load(largest_x_ref, row,", JAX_FITS),
    Mutation("jax_pallas/float16.py", "again | (rho == 0)", "rho == 0", JAX_FITS),
    Mutation("jax_pallas/float16.py", "(jnp.abs(top) < jnp.inf, top *", "(jnp.abs(top) < jnp.inf, top[0] *", JAX_FITS),
    Mutation("jax_pallas/float16.py", "jnp.exp2(own.astype(jnp.float32) - shift)", "jnp.exp2(-shift)", JAX_FITS),
    Mutation("jax_pallas/float16.py", "jnp.arange(size) * count // size", "jnp.arange(size)", JAX_FITS),
    Mutation("jax_pallas/float16.py", "piece < IN_A_NUMBER", "piece <= IN_A_NUMBER", JAX_FITS),
    Mutation("jax_pallas/float16.py", "(start + row, within)", "(row, within)", JAX_FITS),
    Mutation("jax_pallas/float16.py", "end = low_ref.shape[0] * pieces.block", "end = piece_end", JAX_FITS),
    Mutation("jax_pallas/float16.py", "arange(piece_end + index", "arange(index", JAX_FITS),
    Mutation(
        "jax_pallas/hopper_gradients.py",
        "has_power=power is not None, interpret=interpret, first=first",
        "has_power=False, interpret=interpret, first=first",
        JAX_OF_PIECES,
    ),
    Mutation("jax_pallas/float16.py", "power_of_two(exponent) * head", "power_of_two(exponent)", JAX_FITS),
    Mutation("jax_pallas/plan.py", "fits_float16 and key.d_weight and not multiplies", "False", JAX_FITS_PARTS),
    Mutation("jax_pallas/plan.py", "0 if multiplies or fits_float16 or", "0 if multiplies or", JAX_FITS_PARTS),
    Mutation(
        "jax_pallas/tile_config.py", "max(sums, of_d_input, of_d_weight)", "max(sums, of_d_input)", JAX_FITS_PARTS
    ),
    Mutation(
        "jax_pallas/float16.py", "if high_ref is not None else (low_ref,)", "if high_ref is not None else ()", JAX_FITS
    ),
    Mutation("jax_pallas/float16.py", "TRITON_CLASS_BLOCK, TRITON_CLASS_BLOCK)", "TRITON_CLASS_BLOCK, 64)", JAX_FITS),
    Mutation(
        "jax_pallas/float16.py",
        "(column, jnp.int32(pieces.block)), jnp.int32(low",
        "(column, jnp.int32(CLASS_BLOCK)), jnp.int32(low",
        JAX_FITS,
    ),
    Mutation(
        "jax_pallas/kernels.py",
        "exponentials = exponentials * jnp.exp2(-shift)[:, None]",
        "pass",
        tests("jax_pallas_kernels", "float16_are_shifted"),
    ),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "matmul(part.of(e, 1), jnp.float32) * power",
        "matmul(part.of(e, 1), jnp.float32)",
        JAX_FITS_XLA,
    ),
    Mutation("jax_pallas/scaled_exp.py", "update = update + part.of(total, axis)", "pass", JAX_FITS_XLA),
    Mutation(
        "jax_pallas/scaled_exp.py",
        "jnp.where(jnp.expand_dims(part.fresh, 1 - axis), update, 0.0)",
        "update",
        JAX_FITS_XLA,
    ),
    # With label smoothing.
    Mutation("core_triton/smoothing.py", "else of_head * self.scales[1]", "else of_head", FITS),
    Mutation("core_triton/smoothing.py", "row_weight * self.scales[0]", "row_weight", FITS),
    Mutation("core_triton/smoothing.py", "        d_weight.started = True", "", FITS),
    Mutation("core_triton/smoothing.py", "writes=not d_weight.started", "writes=False", FITS),
    Mutation("core_triton/smoothing.py", "weights = weights.ldexp(-power)", "power = None", FITS),
    Mutation("core_triton/row_kernels.py", "result += tl.load(factor_ptr + row)", "result += 0 * row", FITS),
    Mutation("core_triton/input_grad.py", "result += factor[:, None] * mean_row[None, :]", "pass", INPUT_GRAD),
    Mutation("core_triton/input_grad.py", "if len(io.smooth) > 0:", "if len(io.smooth) > 2:", INPUT_GRAD),
    Mutation("core_triton/hopper_gradients.py", "if in_l2 else 1\n", "\n", D_WEIGHT),
    Mutation("jax_pallas/smoothing.py", "else of_head * self.scales[1]", "else of_head", JAX_FITS),
    Mutation("jax_pallas/smoothing.py", "row_weight * self.scales[0]", "row_weight", JAX_FITS),
    Mutation("jax_pallas/smoothing.py", "scales = scales[0], jnp.float32(1.0)", "pass", JAX_FITS),
    Mutation("jax_pallas/smoothing.py", "else grad_into + terms", "else terms", JAX_FITS),
    Mutation("jax_pallas/plan.py", "grad_into and not begun", "grad_into", tests("jax_pallas_plan", "starts")),
    Mutation(
        "jax_pallas/input_grad.py",
        "if io.smooth is not None:",
        "if False:",
        tests("jax_pallas_hopper_gradients", "test_d_input and tails"),
    ),
)

BUDGET = ("tests/test_core_triton_budget.py",)
PASSES = (
    # The error names a budget with which all passes of a call run.
    Mutation("linear_ce/chunking.py", "raise max(refusals", "raise min(refusals", BUDGET),
    Mutation("core_triton/ops.py", "\n        *other_passes,\n", "\n", BUDGET),
    Mutation(
        "core_triton/saved_ops.py",
        "ops.stage_of_plan_b(statistics), NO_GRADIENTS, statistics=statistics)",
        '"losses", NO_GRADIENTS)',
        BUDGET,
    ),
    Mutation("core_triton/saved_ops.py", "if not packed:  # for d_weight", "if False:", BUDGET),
    Mutation(
        "core_triton/saved_ops.py",
        "if saved.rows < saved.tokens:\n        forward",
        "if True:\n        forward",
        BUDGET,
    ),
    Mutation(
        "core_triton/saved_ops.py",
        "if saved.rows < saved.tokens:\n        forward",
        "if False:\n        forward",
        BUDGET,
    ),
    Mutation("core_triton/saved_ops.py", "if statistics & ENTROPY:", "if False:", BUDGET),
    # Options that cannot be hashed are named, and reports within reports count for both.
    Mutation(
        "core_triton/arguments.py",
        "        return function(*arguments)\n",
        '        raise TypeError("unhashable type")\n',
        tests("core_triton_errors", "list"),
    ),
    Mutation("core_triton/ranges.py", "before.add_all(report)", "pass", ("tests/test_core_triton_ranges.py",)),
)

SAME_LAUNCHES = (
    Mutation(
        "benchmarks/jax_launches.py", 'CANONICAL = "canonicalize"', 'CANONICAL = ""',
        ("tests/test_benchmarks_same_launches.py", "-k", "constant_is"),
    ),
    Mutation(
        "benchmarks/same_launches.py", " and difference(*without) is None:", ":",
        ("tests/test_benchmarks_same_launches.py", "-k", "mosaic"),
    ),
    Mutation(
        "benchmarks/jax_ptx.py", "{OUTLINING})", "canonicalize)",
        ("tests/test_benchmarks_same_launches.py", "-k", "mosaic"),
    ),
)  # fmt: skip

SCALE_OUT = (
    Mutation(
        "benchmarks/scale_model.py", '        and "method" not in row\n', "", tests("benchmarks_scale_out", "predicted")
    ),
    Mutation(
        "benchmarks/scale_out.py", "if form in scale.METHODS[method]\n", "",
        tests("benchmarks_scale_out", "two_cpus and torch"),
    ),
    Mutation(
        "benchmarks/scale_peers.py", '(("verl", ""), ("verl.utils", "/utils"))', '(("verl", ""),)',
        tests("benchmarks_scale_out", "verl"),
    ),
)  # fmt: skip

DOCTOR = (
    Mutation("linear_ce/doctor.py", "if not launch.is_direct():", "if False:", tests("doctor", "takes_longer")),
    Mutation("linear_ce/doctor.py", "(0, 12) <= jax", "(0, 11) <= jax", tests("doctor", "may_spill")),
    Mutation("linear_ce/doctor.py", "= 300, 128, 1088, 0", "= 300, 128, 1003, 0", tests("doctor", "kernels_of_the")),
)
HOSTS = tests("hosts_transformers", "not report")
HOSTS_TRANSFORMERS = (
    Mutation("core_triton/hosts/deferred.py", "else self._scale * softcap,", "else self._scale,", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "return self.mul(1.0 / other)", "return self.mul(other)", HOSTS),
    Mutation("core_triton/hosts/deferred.py", '"ignore_index": ignore_index,', "", HOSTS),
    Mutation("core_triton/hosts/deferred.py", '"reduction": reduction,', "", HOSTS),
    Mutation("core_triton/hosts/deferred.py", '"vocab_size": None if', '"vocab_size": None if True or', HOSTS),
    Mutation("core_triton/hosts/deferred.py", "linear_bias=self.bias, ", "", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "if kept.start != 0 or kept.step != 1", "if kept.step != 1", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "if sizes[-1] != self._classes:", "if False:", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "if math.prod(sizes[:-1]) != ", "if 0 > ", HOSTS),
    Mutation("core_triton/hosts/deferred.py", " = __eq__ = __ne__", "", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "source.hidden = None", "pass", HOSTS),
    Mutation("core_triton/hosts/deferred.py", "if weight is None or weight.ndim != 2 else", "if True else", HOSTS),
    Mutation("core_triton/hosts/interface.py", "if not in_place and", "if", HOSTS),
    Mutation("core_triton/hosts/interface.py", " | value.isnan()", "", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "    del fused.__wrapped__", "    pass", HOSTS),
    Mutation("core_triton/hosts/transformers.py", '"__reduce_ex__": reduce, ', "", HOSTS),
    Mutation(
        "core_triton/hosts/transformers.py",
        'if name == "forward":',
        "if False:",
        tests("hosts_liger", "not gpu"),
    ),
    Mutation("core_triton/hosts/transformers.py", "or not self.training or", "or", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "if call.losses == 0:", "if False:", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "            head.forward_call = None\n", "", HOSTS),
    Mutation("core_triton/hosts/transformers.py", 'if hasattr(head, "modules_to_save"):', "if False:", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "if head is None:", "if False:", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "    installed.heads.add(head)\n", "", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "if head.forward_call.patch is installed:", "if False:", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "        self.on = False\n", "", HOSTS),
    Mutation(
        "core_triton/hosts/transformers.py",
        "dict.fromkeys(losses, False)",
        "dict.fromkeys(losses, True)",
        tests("hosts_liger", "not gpu"),
    ),
    Mutation("core_triton/hosts/transformers.py", "if liger and (", "if False and (", tests("hosts_liger", "not gpu")),
    Mutation("core_triton/hosts/transformers.py", "isinstance(model, self.model_class)", "True", HOSTS),
    Mutation("core_triton/hosts/transformers.py", "args[place] if len(args) > place else ", "", HOSTS),
)

OF_PLAN = tests("benchmarks_sweep", "plan_of_its_rows")
OF_HF = tests("benchmarks_train", "transformers or another_process or other_devices")
BENCHMARKS_TRAIN = (
    Mutation(
        "benchmarks/sweep.py",
        "    if not choices:\n        return []\n    planned",
        "    planned",
        tests("benchmarks_sweep", "after_until"),
    ),
    Mutation(
        "benchmarks/sweep.py", "except Exception as error:  # other", "except OSError as error:  # other",
        tests("benchmarks_sweep", "does_not_end_the_run"),
    ),
    Mutation("benchmarks/jax_programs.py", "preferring(method.rows)", "preferring(method.rows, traces=False)", OF_PLAN),
    Mutation("benchmarks/chunk_rows.py", "forget_traces()\n        try", "pass\n        try", OF_PLAN),
    Mutation("benchmarks/chunk_rows.py", "                forget_traces()\n", "                pass\n", OF_PLAN),
    Mutation(
        "benchmarks/fit_chunk_cost.py", 'if row.get("floor") == PLAN:', "if False:",
        tests("benchmarks_sweep", "relative_to_the_choice"),
    ),
    Mutation(
        "benchmarks/jax_bench.py", "            self.stop()\n", "", tests("benchmarks_compile_ahead", "interrupt")
    ),
    Mutation("benchmarks/jax_bench.py", "process.terminate()", "pass", tests("benchmarks_compile_ahead", "stop_ends")),
    Mutation(
        "benchmarks/linear_ce.py", "for index, of_item in listed if of_item)", "for index, of_item in listed)",
        tests("benchmarks_compile_ahead", "in_batches"),
    ),
    Mutation("benchmarks/plot.py", "max([row, *same]", "max([row]", tests("benchmarks", "newest_row")),
    Mutation("benchmarks/plot.py", "same_measurement(row, other)", "True", tests("benchmarks", "newest_row")),
    Mutation(
        "benchmarks/objectives_table.py", 'row["ratio"] > bar', 'round(row["ratio"], 2) > bar',
        tests("benchmarks_objectives", "above_their_bar"),
    ),
    Mutation(
        "benchmarks/objectives_table.py", "self.other_bars.get(head, self.bar)", "self.bar",
        tests("benchmarks_objectives", "above_their_bar"),
    ),
    Mutation(
        "benchmarks/timing.py",
        "agreed(block(step, 1) / 1000)",
        "block(step, 1) / 1000",
        tests("benchmarks_timing", "agree"),
    ),
    Mutation(
        "benchmarks/timing.py",
        "in pair_order(len(steps), number)",
        "in range(len(steps))",
        tests("benchmarks_timing", "alternate"),
    ),
    Mutation("benchmarks/train_process.py", '"status": "ok", **figures}', '**figures, "status": "ok"}', OF_HF),
    Mutation("benchmarks/train_torch.py", "< FIRST_LOSS:", "< math.inf:", OF_HF),
    Mutation("benchmarks/train_torch.py", "min(values[1:]) < values[0]", "True", OF_HF),
    Mutation("benchmarks/train_torch.py", "there < row.gpus", "False", OF_HF),
    Mutation("benchmarks/train_torch.py", 'row.gpus != mesh_sizes(row.mesh)["fsdp"]', "False", OF_HF),
)  # fmt: skip

OF_ROWS = tests("benchmarks_hosts", "not page")
BENCHMARKS_HOSTS = (
    Mutation("benchmarks/hosts_process.py", "if not error <= limit:", "if error > limit:", OF_ROWS),
    Mutation("benchmarks/hosts_process.py", "if request.until is not None and", "if False and", OF_ROWS),
    Mutation("benchmarks/hosts.py", "waiting, failed = list(process)", "waiting, failed = [*process][:1]", OF_ROWS),
    Mutation("benchmarks/hosts.py", 'if process.result()["status"] == "failed":', "if False:", OF_ROWS),
    Mutation("benchmarks/hosts_jax.py", 'ours=variant == "ours"', "ours=False", OF_ROWS),
    Mutation("benchmarks/hosts_trl.py", ".patch(trainer)", ".patch", OF_ROWS),
    Mutation("benchmarks/hosts_trl.py", "            trainer.log({})\n", "            pass\n", OF_ROWS),
    Mutation("benchmarks/hosts_trl.py", "allocated() - before", "0", OF_ROWS),
    Mutation("benchmarks/hosts_rows.py", "if HOSTS[row.host].in_turns else row", "if False else row", OF_ROWS),
    Mutation("benchmarks/hosts_times.py", "if len(rows) == 2 else {}", "if False else {}", OF_ROWS),
    Mutation("benchmarks/hosts_jax.py", "last[0] = call.run()", "call.run()", OF_ROWS),
    Mutation("benchmarks/hosts_table.py", 'return "ratio" in row and', "return False and", OF_ROWS),
    Mutation("benchmarks/hosts_table.py", ' and row["ratio"] == other.get("ratio")', "", OF_ROWS),
    Mutation("benchmarks/hosts_table.py", "memory > bar.memory or (bar.less and", "(bar.less and", OF_ROWS),
    Mutation("benchmarks/hosts_table.py", "(bar.less and memory == bar.memory)", "False", OF_ROWS),
    Mutation("benchmarks/hosts_table.py", 'if row["config"] != "smoke"', "", OF_ROWS),
    Mutation(
        "benchmarks/mesh_table.py",
        'row.get("kind", "speed") == "speed" and',
        "",
        tests("benchmarks_train", "table_of_meshes_is"),
    ),
    Mutation("benchmarks/hosts_rows.py", "key=lambda row: row.variant in PERMANENT", "key=lambda row: 0", OF_ROWS),
)  # fmt: skip

OF_TRL, OF_VERL = tests("hosts_trl", "not twenty"), tests("hosts_verl", "not two_ranks")
HOSTS_TRL = (
    Mutation("core_triton/hosts/interface.py", "if not any(parts[", "if False and any(parts[", OF_TRL),
    Mutation("core_triton/hosts/interface.py", "        self._unpatch()\n", "        pass\n", OF_TRL),
    Mutation("core_triton/hosts/interface.py", "    check_later_options(options, IMPLEMENTATIONS)\n", "", OF_TRL),
    Mutation(
        "core_triton/hosts/trl.py", '"logit_scale": logit_scale / temperature', '"logit_scale": logit_scale', OF_TRL
    ),
    Mutation("core_triton/hosts/trl.py", "else softcap / temperature", "else softcap", OF_TRL),
    Mutation("core_triton/hosts/trl.py", '"linear_bias": bias,', '"linear_bias": None,', OF_TRL),
    Mutation("core_triton/hosts/trl.py", '"is_top1": "argmax"', '"is_top1": "is_top1"', OF_TRL),
    Mutation("core_triton/hosts/trl.py", "of_tokens.sum_squared_probs.log()", "of_tokens.sum_squared_probs", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "-loss if differentiated else", "loss if differentiated else", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "saved_budget=self.saved_budget, ", "", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "weight, bias = weight.to(hidden.dtype), None if", "bias = None if", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "return bool(_called.get()) or ", "return ", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "            hook.remove()\n", "            pass\n", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "            del self.trainer._compute_loss\n", "            pass\n", OF_TRL),
    Mutation("core_triton/hosts/trl.py", 'get("_compute_loss") == self._compute_loss', "get('_compute_loss')", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "if differentiated and entropy is not None:", "if False:", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "        if gradients[0] is not None:\n", "        if False:\n", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "            _called.set(_called.get()[:-1])\n", "            pass\n", OF_TRL),
    Mutation("core_triton/hosts/trl.py", ", with_kwargs=True, always_call=True", ", with_kwargs=True", OF_TRL),
    Mutation("core_triton/hosts/trl.py", ' and _is_of_trl(trainer, "compute_loss")', "", OF_TRL),
    Mutation("core_triton/hosts/trl.py", ' and _is_of_trl(trainer, "_compute_loss")', "", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "        installed.remove()\n\n\ndef", "        pass\n\n\ndef", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "if patched.of_all]", "]", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "rest.amax() > TOLERANCE", "rest.amax() < TOLERANCE", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "return factor.float(), None", "return gradient.sum(), None", OF_TRL),
    Mutation(
        "core_triton/hosts/trl.py",
        "checked = not self.metrics.waiting or not",
        "checked = not self.metrics.waiting and not",
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl.py", "checked = not self.metrics.waiting or ", "checked = ", OF_TRL),
    Mutation("core_triton/hosts/trl.py", "if _patch_of(self.trainer) is not self or not", "if not", OF_TRL),
    Mutation(
        "core_triton/hosts/trl.py", "                self.trainer.log = self.logs\n", "                pass\n", OF_TRL
    ),
    Mutation("core_triton/hosts/trl.py", "log = self.logs or partial", "log = partial", OF_TRL),
    Mutation(
        "core_triton/hosts/trl.py",
        "_trainers.discard(self)\n        self.metrics.read()\n",
        "_trainers.discard(self)\n",
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl_losses.py", "self.rounding = 0.01 * trainer.beta", "self.rounding = 0.0", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "and trainer.off_policy_mask_threshold is None", "", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "        and not trainer._entropy_bonus_enabled\n", "", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "        and trainer.top_entropy_quantile == 1.0\n", "", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", 'trainer.importance_sampling_level == "token"', "True", OF_TRL),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "        if trainer.loss_type in MEAN_OF_SEQUENCES:\n",
        "        if False:\n",
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl_losses.py", "(self.weighted_kl and self.beta)", "self.weighted_kl", OF_TRL),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        'loss_type == "cispo" and self.epsilon_high >= 1',
        'loss_type == "cispo"',
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl_losses.py", "ratio if self.delta is None else", "ratio if True else", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "kl * unbounded if self.weighted_kl", "kl if self.weighted_kl", OF_TRL),
    Mutation(
        "core_triton/hosts/trl_losses.py", "return loss * rest.pop(0) if with_mask else loss", "return loss", OF_TRL
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "(log_prob.detach() if old is None else old)",
        "(log_prob if old is None else old)",
        OF_TRL,
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py", "        if tokens != int(self.count):\n", "        if False:\n", OF_TRL
    ),
    Mutation("core_triton/hosts/trl_losses.py", "if len(self.waiting) == MOST_WAITING:", "if False:", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "* steps / trainer.args.steps_per_generation", "* steps", OF_TRL),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        ".clamp(min=1.0) / trainer.accelerator.num_processes",
        ".clamp(min=1.0)",
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl_losses.py", "terms.loss * self.mask, mode", "terms.loss, mode", OF_TRL),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        'accumulation_steps if mode == "train" else 1.0',
        "accumulation_steps",
        OF_TRL,
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "trainer.router_aux_loss_coef * aux_loss / steps",
        "trainer.router_aux_loss_coef * aux_loss",
        OF_TRL,
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "log_probs, self.factors, self.old",
        "log_probs, self.advantages, self.old",
        OF_TRL,
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "(ratio < 1 - trainer.epsilon_low) & (self.advantages < 0)",
        "ratio < 1 - trainer.epsilon_low",
        OF_TRL,
    ),
    Mutation(
        "core_triton/hosts/trl_losses.py",
        "(ratio > 1 + trainer.epsilon_high) & (self",
        "(ratio > trainer.epsilon_high) & (self",
        OF_TRL,
    ),
    Mutation("core_triton/hosts/trl_losses.py", "totals[-1].clamp(min=1.0)", "totals[-1]", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "nan_to_num(nan=torch.inf)", "nan_to_num(nan=0.0)", OF_TRL),
    Mutation("core_triton/hosts/trl_losses.py", "least.masked_fill(least.isinf(), torch.nan)", "least", OF_TRL),
    Mutation("core_triton/hosts/verl.py", "lambda gradient: gradient / ranks", "lambda gradient: gradient", OF_VERL),
    Mutation("core_triton/hosts/verl.py", "or dist_process_group.size() == 1", "", OF_VERL),
    Mutation("core_triton/hosts/verl.py", "logit_scale=1 / temperature", "logit_scale=temperature", OF_VERL),
    Mutation("core_triton/hosts/verl.py", "or not temperature > 0:", "or False:", OF_VERL),
    Mutation("core_triton/hosts/verl.py", "    _options.clear()\n", "", OF_VERL),
    Mutation("core_triton/hosts/verl.py", 'if reduction != "none":', "if False:", OF_VERL),
)

OF_JAX_HOSTS = tests("hosts_jax", "not tunix and not levanter and not maxtext and not devices or another_interface")
TUNIX, LEVANTER, MAXTEXT = (tests("hosts_jax", f"{host} and not devices") for host in ("tunix", "levanter", "maxtext"))
MAXTEXT_DEVICES = tests("hosts_jax", "devices and MaxText")
HOSTS_JAX = (
    Mutation("jax_pallas/hosts/heads.py", '_DENSE = Layer("kernel", 1,', '_DENSE = Layer("kernel", 0,', OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", 'if head_precision != "float32":', "if True:", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", "dtype = of_layer if dtype is None else dtype", "pass", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", " or present - {layer.weight, layer.bias}", "", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", 'if set(head.variables) - {"params"}:', "if False:", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", "is not getattr(base, layer.method)", "is None", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", "if promote is not None and", "if False and", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/heads.py", ", _value(linear_bias)", ", linear_bias", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/interface.py", "if found != tuple(names):", "if False:", OF_JAX_HOSTS),
    Mutation("jax_pallas/hosts/interface.py", "    check_later_options(options, IMPLEMENTATIONS)\n", "", TUNIX),
    Mutation(
        "jax_pallas/hosts/tunix.py", "attention_mask, **inputs)[:, :-1]", "attention_mask, **inputs)[:, 1:]", TUNIX
    ),
    Mutation("jax_pallas/hosts/tunix.py", 'arguments["softcap"] / temperature', 'arguments["softcap"]', TUNIX),
    Mutation("jax_pallas/hosts/tunix.py", '.get("logit_scale", 1.0) / temp', '.get("logit_scale", 1.0) * temp', TUNIX),
    Mutation("jax_pallas/hosts/tunix.py", "    common.compute_per_token_logps.clear_cache()\n", "", TUNIX),
    Mutation(
        "jax_pallas/hosts/tunix.py", 'normalizer=jnp.sum(arguments["token_weight"]) + 1e-8', "normalizer=1.0", TUNIX
    ),
    Mutation("jax_pallas/hosts/tunix.py", 'of_model["softcap"] = getattr(', 'of_model["z"] = getattr(', TUNIX),
    Mutation("jax_pallas/hosts/tunix.py", "        check_no_adapter(layer)\n", "        pass\n", TUNIX),
    Mutation(
        "jax_pallas/hosts/levanter.py", "return -found.log_prob, found.lse\n", "return -found.log_prob, 0\n", LEVANTER
    ),
    Mutation("jax_pallas/hosts/levanter.py", "    if default:\n", "    if False:\n", LEVANTER),
    Mutation(
        "jax_pallas/hosts/levanter.py", 'api._default_implementations = _replaced.pop("choice")', "pass", LEVANTER
    ),
    Mutation("jax_pallas/hosts/maxtext.py", "hidden.shape[-1] ** -0.5", "hidden.shape[-1] ** 0.5", MAXTEXT),
    Mutation(
        "jax_pallas/hosts/maxtext.py", 'data["targets_segmentation"] != 0', 'data["targets_segmentation"] != 1', MAXTEXT
    ),
    Mutation(
        "jax_pallas/hosts/maxtext.py", '"z_loss_weight": config.z_loss_multiplier', '"z_loss_weight": 0.0', MAXTEXT
    ),
    Mutation("jax_pallas/hosts/maxtext.py", "config.final_logits_soft_cap or None", "None", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", "rounded(weight, jnp.bfloat16).astype(hidden.dtype)", "weight", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", "jnp.float32 if config.logits_dot_in_fp32 else", "", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", "        classes = fsdp = ()\n", "        pass\n", MAXTEXT_DEVICES),
    Mutation("jax_pallas/hosts/maxtext.py", "    setattr(train, name, function)", "    pass", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", 'getattr(layer, "kernel_scale", None) is not None', "False", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", 'not hasattr(train, "vocab_tiling_linen_loss")', "True", MAXTEXT),
    Mutation("jax_pallas/hosts/maxtext.py", 'not hasattr(train, "vocab_tiling_linen_loss")', "False", MAXTEXT),
)
OF_TITAN, OF_MEGATRON = tests("hosts_torchtitan", "not installed"), tests("hosts_megatron", "not installed")
TITAN_RANKS, MEGATRON_RANKS = (tests("hosts_parallel", host) for host in ("titan", "megatron"))
HOSTS_PARALLEL = (
    Mutation("core_triton/hosts/interface.py", "parts[: len(one)] == one", "True", OF_TITAN),
    Mutation("core_triton/hosts/interface.py", 'found.split("+")[0]', "found", OF_TITAN),
    Mutation("core_triton/hosts/interface.py", "output = module(*args)\n", "output = recorded(*args)\n", OF_TITAN),
    Mutation("core_triton/hosts/interface.py", "        check_hooks(module,", "        (module,", OF_TITAN),
    Mutation(
        "core_triton/hosts/interface.py", '            vars(module)["forward"] = own\n', "            pass\n", OF_TITAN
    ),
    Mutation("core_triton/hosts/torchtitan.py", "if backend not in BACKENDS:", "if False:", OF_TITAN),
    Mutation("core_triton/hosts/torchtitan.py", '"sum" if global_valid_tokens is None else "mean"', '"mean"', OF_TITAN),
    Mutation("core_triton/hosts/torchtitan.py", "self.options |= _head_options(lm_head)", "pass", OF_TITAN),
    Mutation("core_triton/hosts/torchtitan.py", "src=spmd.R, dst=spmd.I)", "src=spmd.R, dst=spmd.R)", TITAN_RANKS),
    Mutation("core_triton/hosts/torchtitan.py", "loss.to_local() if is_dtensor(loss) else loss", "loss", TITAN_RANKS),
    Mutation("core_triton/hosts/megatron.py", "if loss_mask is None else torch.where(", "if True else (", OF_MEGATRON),
    Mutation("core_triton/hosts/megatron.py", "config.mup_output_mult if config.use_mup else 1.0", "1.0", OF_MEGATRON),
    Mutation("core_triton/hosts/megatron.py", "None if output_layer.skip_bias_add else", "", OF_MEGATRON),
    Mutation("core_triton/hosts/megatron.py", "weight.grad_added_to_main_grad = True", "pass", OF_MEGATRON),
    Mutation("core_triton/hosts/megatron.py", "torch.zeros_like(weight) if", "torch.ones_like(weight) if", OF_MEGATRON),
    Mutation(
        "core_triton/hosts/megatron.py",
        "needs_grad = weight.requires_grad and torch.is_grad_enabled()",
        "needs_grad = True",
        OF_MEGATRON,
    ),
    Mutation("core_triton/hosts/megatron.py", "if output_layer.sequence_parallel:", "if False:", MEGATRON_RANKS),
    Mutation("core_triton/hosts/megatron.py", "if found != needed:", "if False:", OF_MEGATRON),
)
OF_MESH = ("tests/test_flax_mesh.py",)
MESH = (
    Mutation("flax_models/model/decoder.py", "elif gathers() and config.scan_layers:", "elif gathers():", OF_MESH),
    Mutation("flax_models/model/sharding.py", "if not isinstance(placed, NamedSharding)", "if True", OF_MESH),
    Mutation("flax_models/train/accounting.py", 'sizes["fsdp"] > 1 and not again', "False", OF_MESH),
    Mutation(
        "flax_models/train/processes.py", "os.environ.get(name), LOCAL", "LOCAL,", tests("flax_processes", "proxy")
    ),
    Mutation(
        "flax_models/model/sharding.py", ' not in ("sharding_constraint", "convert_element_type")', ' != ""', OF_MESH
    ),
    Mutation("flax_models/model/sharding.py", 'lax.axis_index("tensor" if gathers_rows else CLASSES)', "0", OF_MESH),
    Mutation(
        "flax_models/model/sharding.py", "None if rows % math.prod", "None if False and rows % math.prod", OF_MESH
    ),
    Mutation("flax_models/model/sampling.py", "[:, :vocab_size]", "", tests("flax_generate", "padding")),
    Mutation("flax_models/train/mesh.py", "if shape == leaf.shape:", "if False:", OF_MESH),
    Mutation("flax_models/train/mesh.py", "or name in sizes or", "or", OF_MESH),
    Mutation("flax_models/train/mesh.py", "if count != len(devices):", "if count > 9:", OF_MESH),
    Mutation("flax_models/train/mesh.py", "    except ValueError as error:", "    except OSError as error:", OF_MESH),
    Mutation("flax_models/train/checkpoint.py", "sharding=leaf.sharding or device", "sharding=device", OF_MESH),
    Mutation("flax_models/hub/weights.py", "part.first_row + rows.start,", "part.first_row,", OF_MESH),
)
OF_LOCK = ("tests/test_flax_lock.py",)
OF_PROCESSES = ("tests/test_flax_processes.py",)
PROCESSES = (
    Mutation("flax_models/train/processes.py", "None if size is not None and", "None if False and", OF_PROCESSES),
    Mutation(
        "flax_models/train/processes.py",
        "if missing := [name for name in TORCHRUN",
        "if [name for name in ()",
        OF_PROCESSES,
    ),
    Mutation("flax_models/train/processes.py", 'if what == "end":', "if False:", OF_PROCESSES),
    Mutation("flax_models/train/processes.py", "(digests != digests[0])", "(digests != digests)", OF_PROCESSES),
    Mutation("flax_models/train/processes.py", "if is_first():\n        try", "if True:\n        try", OF_PROCESSES),
    Mutation("flax_models/train/processes.py", "if fault := from_first(fault):", "if fault:", OF_PROCESSES),
    Mutation("flax_models/train/relay.py", "        _copy(client, service)", "        back.join()", OF_PROCESSES),
    Mutation("flax_models/train/relay.py", "        service.shutdown(", "        back.join(", OF_PROCESSES),
    Mutation("flax_models/train/processes.py", "was lost; {self._advice()}", "was lost", OF_PROCESSES),
    Mutation("flax_models/train/main.py", "quiet=peers is not None and not is_first()", "quiet=False", OF_PROCESSES),
    Mutation("flax_models/train/main.py", "if first else NoMetrics()", "if True else NoMetrics()", OF_PROCESSES),
    Mutation(
        "flax_models/train/config.py",
        "asdict(config).items() if name not in OF_PROCESS",
        "asdict(config).items()",
        OF_PROCESSES,
    ),
)
OF_RANGE = tests("flax_weights", "too_large")
OF_ADAPTERS = tests("flax_peft", "too_large")
OF_SKIPPED = tests("flax_data", "skips_hidden")
OF_ASIDE, OF_CONFIG = tests("flax_resume", "aside"), tests("flax_hub_config", "unsupported or unknown")
TRAINER = (
    Mutation(
        "flax_models/train/optimizers.py",
        "optax.tree.norm(optax.tree.cast(gradients, jnp.float32))",
        "optax.tree.norm(gradients)",
        tests("flax_optimizers", "16_bit"),
    ),
    Mutation(
        "flax_models/train/optimizers.py",
        "inner.update(optax.tree.cast(updates, jnp.float32),",
        "inner.update(updates,",
        tests("flax_optimizers", "16_bit"),
    ),
    Mutation(
        "flax_models/train/arguments.py",
        'unused["batch_size"] =',
        "_ =",
        tests("flax_train", "wrong_together"),
    ),
    Mutation(
        "flax_models/train/main.py",
        "2 if isinstance(error, UsageError) else 1",
        "1",
        tests("flax_train", "wrong_together"),
    ),
    Mutation(
        "flax_models/command_line.py",
        "signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))",
        "pass",
        tests("wheel", "ctrl_c and export"),
    ),
    Mutation(
        "flax_models/command_line.py",
        "signal.getsignal(signal.SIGINT) is signal.default_int_handler",
        "True",
        tests("wheel", "leave_the_handler"),
    ),
    Mutation(
        "flax_models/train/config.py", "if self.mesh is None and", "if False and", tests("flax_train", "wrong_opt")
    ),
    Mutation("flax_models/train/run_folder.py", "            shutil.rmtree(part,", "            print(part,", OF_LOCK),
    Mutation("flax_models/hub/weights.py", "np.abs(values[lost]).max()", "values[lost].max()", OF_RANGE),
    Mutation("flax_models/hub/weights.py", "infinite & np.isfinite(values)", "infinite", OF_RANGE),
    Mutation("flax_models/hub/weights.py", "infinite = np.isinf(array)", "infinite = np.isnan(array)", OF_RANGE),
    Mutation("flax_models/hub/weights.py", 'if dtype == "float16":', "if False:", OF_RANGE),
    Mutation(
        "flax_models/hub/weights.py",
        'cast_into(array[place], block.T if part.transposed else block, f"{name} of {files.folder}")',
        "array[place] = block.T if part.transposed else block",
        OF_RANGE,
    ),
    Mutation(
        "flax_models/hub/adapter_folder.py",
        "cast_into(tensor, arrays[name], name)",
        "tensor[...] = arrays[name]",
        OF_ADAPTERS,
    ),
    Mutation(
        "flax_models/hub/adapter_folder.py",
        'cast_into(layer, tensor.T, f"{key} of {path}")',
        "layer[...] = tensor.T",
        OF_ADAPTERS,
    ),
    Mutation("flax_models/data/corpus.py", 'character")\n            skipped += 1', 'character")', OF_SKIPPED),
    Mutation(
        "flax_models/train/trained.py",
        "trainer.evaluated_part(trainer.initial)",
        "trainer.initial",
        tests("flax_resume", "optimizers_arrays"),
    ),
    Mutation("flax_models/data/atomic_file.py", "{socket.gethostname()}.", "", OF_LOCK),
    Mutation("flax_models/train/checkpoint.py", '{first_line(error)}", False', '{first_line(error)}", True', OF_ASIDE),
    Mutation("flax_models/train/checkpoint.py", "(folder / MANIFEST).exists() or", "", OF_ASIDE),
    Mutation("flax_models/train/checkpoint.py", "isinstance(error, OSError) or", "", OF_ASIDE),
    Mutation(
        "flax_models/train/checkpoint.py",
        "if not damaged and (self._writes or",
        "if not damaged and (True or",
        OF_ASIDE,
    ),
    Mutation(
        "flax_models/train/checkpoint.py",
        "    except FileNotFoundError:\n        return []",
        "    except OSError:\n        return []",
        tests("flax_resume", "taken_as_empty"),
    ),
    Mutation(
        "flax_models/train/metrics.py",
        "    except FileNotFoundError:\n        return []",
        "    except OSError:\n        return []",
        tests("flax_resume", "incomplete_line"),
    ),
    Mutation(
        "flax_models/data/corpus.py", "root.walk(on_error=fail)", "root.walk()", tests("flax_data", "not_left_out")
    ),
    Mutation(
        "flax_models/train/loop.py",
        "held_out_loss() if loss is None else loss",
        "held_out_loss()",
        tests("flax_resume", "extended"),
    ),
    Mutation(
        "flax_models/model/config.py",
        "if self.sliding_window is None and self.window_pattern != (True,):",
        "if False:",
        tests("flax_model", "invalid_shape"),
    ),
    Mutation("flax_models/hub/config.py", "if len(given) == 2 and", "if False and", OF_CONFIG),
    Mutation("flax_models/hub/config.py", "        if fields[name] != values[name]:", "        if False:", OF_CONFIG),
    Mutation("flax_models/hub/config.py", "1.0 if partial is None else partial", "partial or 1.0", OF_CONFIG),
    Mutation(
        "flax_models/hub/config.py",
        "    if window is None:\n        raise fields.refuse(",
        "    if window is None:\n        return (",
        OF_CONFIG,
    ),
    Mutation(
        "flax_models/hub/config.py",
        'residual_multiplier=fields.number("residual_multiplier")',
        "residual_multiplier=1.0",
        tests("flax_families", "every_field"),
    ),
    Mutation(
        "flax_models/hub/adapter_folder.py", "if trains and", "if False and", tests("flax_peft", "invalid_adapter")
    ),
    Mutation(
        "flax_models/hub/adapter_folder.py",
        "if values[name] or type(values[name]) is int:",
        "if values[name]:",
        tests("flax_peft", "every_field"),
    ),
    Mutation(
        "flax_models/data/vocabulary.py",
        "list(dict.fromkeys((self.end, *self.ends)))",
        "[self.end]",
        tests("flax_finetune", "end_token_is"),
    ),
    Mutation(
        "flax_models/data/vocabulary.py",
        " and encoding.special_tokens_mask[-1]",
        "",
        tests("flax_finetune", "templates_tokens"),
    ),
    Mutation(
        "flax_models/train/sample.py",
        "tokens or [vocabulary.needed_end()]",
        "tokens",
        tests("flax_dialogues", "sample"),
    ),
    Mutation(
        "flax_models/train/processes.py",
        '                except OSError:\n                    sent = ""',
        "                except KeyError:\n                    sent = token",
        tests("flax_processes", "other_programs"),
    ),
)

OF_PROMOTION = tests("jax_pallas_promotion", "test")
STRICT = 'with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):'
PROMOTION = (
    Mutation("jax_pallas/primitives.py", STRICT, "if True:", OF_PROMOTION),
    Mutation(
        "jax_pallas/primitives.py",
        "Primitive(name), usual_promotion(function)",
        "Primitive(name), function",
        OF_PROMOTION,
    ),
    Mutation("jax_pallas/devices.py", "    @usual_promotion\n    def call", "    def call", OF_PROMOTION),
    Mutation("jax_pallas/scaling.py", "@usual_promotion  # for", "# for", OF_PROMOTION),
    Mutation("jax_pallas/linear_ce.py", "@usual_promotion\n", "", OF_PROMOTION),
)

OF_OPTIONS = tests("spec", "test")
OPTIONS = (
    Mutation("linear_ce/spec.py", "if not -FLOAT32_MAX <= number <= FLOAT32_MAX:", "if False:", OF_OPTIONS),
    Mutation("linear_ce/spec.py", "if softcap is not None and softcap < FLOAT32_MIN:", "if False:", OF_OPTIONS),
    Mutation(
        "linear_ce/spec.py",
        "number > FLOAT32_MAX or 0 < number < FLOAT32_MIN",
        "False",
        tests("core_triton_errors", "normalizer"),
    ),
    Mutation(
        "core_triton/operators.py",
        "if torch.is_grad_enabled() and task != -1:",
        "if False:",
        tests("core_triton_compile", "second_derivative"),
    ),
    Mutation(
        "core_triton/ops.py",
        "is_dynamo_compiling() and _batched(d_outputs):",
        "is_dynamo_compiling() and False:",
        tests("core_triton_autograd", "several_upstream"),
    ),
    Mutation(
        "core_triton/ops.py",
        "        return call_between_graphs(backward, ctx, *d_outputs)",
        "        return backward(ctx, *d_outputs)",
        tests("core_triton_compile", "compiled_autograd"),
    ),
    Mutation(
        "core_triton/grad_into.py",
        "grad_into.is_inference() and not",
        "False and not",
        tests("core_triton_grad_into", "inference_mode"),
    ),
    Mutation(
        "core_triton/module.py",
        "            self._check_class_weight(weight)",
        "            pass",
        tests("core_triton_module", "class_weights"),
    ),
    Mutation(
        "core_triton/arguments.py",
        '        _check_kind("normalizer", normalizer)',
        "        pass",
        tests("core_triton_autograd", "normalizer"),
    ),
    Mutation(
        "jax_pallas/elementwise.py",
        "if name and getattr(token_losses, name, None) is token_loss:",
        "if name:",
        tests("jax_pallas_token_loss", "elementwise_runs"),
    ),
)

OF_FLOPS = tests("core_triton_flops", "test")
FLOPS = (
    Mutation("core_triton/flops.py", "isinstance(registry, dict)", "False", OF_FLOPS),
    Mutation(
        "core_triton/ops.py",
        "    flops.offer()\n    found = torch.ops.linear_ce.row_gradients",
        "    found = torch.ops.linear_ce.row_gradients",
        OF_FLOPS,
    ),
    Mutation(
        "core_triton/operators.py",
        "(1 + needs_grad.d_input + needs_grad.d_weight)",
        "(2 + needs_grad.d_weight)",
        OF_FLOPS,
    ),
    Mutation("core_triton/operators.py", "needs_grad.d_input * _matmul_flops(arrays, rows)", "0", OF_FLOPS),
    Mutation("core_triton/operators.py", "len(arrays.target) - saved_rows(", "0 * saved_rows(", OF_FLOPS),
)

OF_TRANSFORMS = tests("core_triton_transforms", "test")
TRANSFORMS = (
    Mutation("core_triton/transforms.py", "        if compiling:\n", "        if False:\n", OF_TRANSFORMS),
    Mutation("core_triton/transforms.py", "level.key() in DIFFERENTIATES", "True", OF_TRANSFORMS),
    Mutation("core_triton/transforms.py", "tensor.requires_grad and torch.is_grad_enabled()", "True", OF_TRANSFORMS),
    Mutation("core_triton/token_hook.py", '    check_levels("token_loss")\n', "", OF_TRANSFORMS),
    Mutation("core_triton/transforms.py", "if compiling or forward_ad", "if forward_ad", OF_TRANSFORMS),
    Mutation("core_triton/token_hook.py", 'check_transforms("the result', '("the result', OF_TRANSFORMS),
    Mutation(
        "core_triton/ops.py",
        "Losses(found.loss.sum(), *found[1:])",
        "found._replace(loss=found.loss.sum())",
        OF_TRANSFORMS,
    ),
    Mutation("core_triton/compiling.py", "if torch.compiler.is_compiling():", "if False:", OF_TRANSFORMS),
    Mutation("core_triton/arguments.py", "dtype not in DTYPE_NAMES or", "", OF_TRANSFORMS),
    Mutation("core_triton/arguments.py", "-1 if ignore_index != -1 else -2", "-1", OF_TRANSFORMS),
)

MUTATIONS = (
    *(*TRITON_KERNELS, *TORCH_ROWS, *LAUNCHES, *CONTRACT, *JAX_ROWS, *PALLAS_KERNELS, *TOKEN_LOSSES),
    *(*ROW_GRADIENTS, *STORED_LOGITS, *SMOOTHING, *HEAD_FLOAT32, *SAVED_ROWS, *TOKEN_STATS, *BATCH_INVARIANT, *SCALE),
    *(*ENTROPY_LOSSES, *FLOAT16, *FIRST_CHUNK, *JAX_FIRST, *PASSES, *SAME_LAUNCHES, *SCALE_OUT),
    *BENCHMARKS_TRAIN,
    *BENCHMARKS_HOSTS,
    *PROMOTION,
    *OPTIONS,
    *FLOPS,
    *TRANSFORMS,
    *HOSTS_TRANSFORMERS,
    *HOSTS_TRL,
    *HOSTS_JAX,
    *HOSTS_PARALLEL,
    *MESH,
    *PROCESSES,
    *TRAINER,
    *DOCTOR,
)
NOTHING_RAN = 5  # pytest's exit status if no test was selected


def outcome(mutation: Mutation) -> tuple[str, float]:
    """Returns "caught" or what is wrong, and the seconds that it took."""
    start = time.monotonic()
    text = (ROOT / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        return f"NOT FOUND: the file has this text {text.count(mutation.old)} times", 0.0
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in COPIED:
            source, place = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                shutil.copy(source, place)
        (Path(folder) / mutation.file).write_text(text.replace(mutation.old, mutation.new))
        options = ["-m", "not slow and not gpu", "-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/temporary"]
        variables = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": f"{folder}/triton"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *mutation.tests],
            cwd=folder,
            env=os.environ | variables | {"PYTHONPATH": folder},
            capture_output=True,
            text=True,
        )
    seconds = time.monotonic() - start
    if done.returncode == 1:
        return "caught", seconds
    if done.returncode == 0:
        return "SURVIVED", seconds
    result = "no test was chosen" if done.returncode == NOTHING_RAN else done.stdout[-500:] + done.stderr[-500:]
    return f"FAILED TO RUN: pytest ended with {done.returncode}: {result}", seconds


def main() -> int:
    texts = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not texts or any(text in m.file or text in m.old for text in texts)]
    wrong = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for mutation, (result, seconds) in zip(chosen, pool.map(outcome, chosen), strict=True):
            wrong += result != "caught"
            print(f"{result:<9} {seconds:4.0f} s  {mutation.file}: {mutation.old!r} -> {mutation.new!r}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} mutations are caught")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
