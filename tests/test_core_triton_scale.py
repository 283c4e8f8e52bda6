"""core_triton on several ranks: a vocabulary that is split over a process group, and tokens that are."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gathered_checks import GATHERED_CHECKS
from head_checks import HEAD_CHECKS
from programs import Command, Printed, each, python
from torch_ranks import CHECKS, FORMS, KERNEL_CHECKS, KILLED, PLACEMENTS

from core_triton.vocab_shard import joint_normalizer, shard_of
from parity.cases import Case, cases


def requests(form: str) -> list[str]:
    """Returns what runs in a form. Token ranks have a scalar loss, and the sum of all tokens has no rows' weights. With
    DTensors all but `grad_into` runs."""

    def runs(case: Case) -> bool:
        if form in PLACEMENTS:
            return not case.grad_into
        scalar = case.function != "log_probs" and case.spec.reduction != "none"
        return form == "vocabulary" or scalar

    return [f"{form}:{case.name}" for case in cases() if runs(case)]


# All rows under upstream gradients from 1e-6 to 1e3, a part of the rows, and gradients of the entropy, which do not use
# what is saved.
SAVED = ("edge-saved-tight-fp16", "edge-log_probs-saved-part-fp16", "edge-log_probs-saved-entropy-bf16")


# "placements" has each placement with one of the functions. "dtensor_compiled" compiles calls on several ranks too.
SLOW_CHECKS = ("every_placement", "compile")


def programs() -> dict[str, tuple[Command, bool]]:
    """Returns, for each request, the program that runs it, and whether it is quick."""
    steps = dict(zip(FORMS, (24, 34, 34), strict=True)) | dict.fromkeys(PLACEMENTS, 158)
    # Each form begins elsewhere, so that they run other cases.
    starts = {"both": 8} | {form: 7 * number for number, form in enumerate(PLACEMENTS)}
    quick = [request for form in steps for request in requests(form)[starts.get(form, 0) :: steps[form]]]
    quick.append("tokens:mean-fp32-softcap-scale-weight-normalizer-axis1-tight-nostats-strided-n50")
    quick += [f"{form}:{name}" for form in ("vocabulary", "gathered_tokens") for name in SAVED]
    quick = [*dict.fromkeys(quick), *(f"check:{name}" for name in CHECKS if name not in SLOW_CHECKS), KILLED]
    slow = [request for form in steps for request in requests(form) if request not in quick]
    slow += [f"check:{name}" for name in SLOW_CHECKS]
    found: dict[str, tuple[Command, bool]] = dict.fromkeys(
        quick, (python("torch_ranks.py", "4", "chunked", *quick), True)
    )
    for first in range(4):
        share = slow[first::4]
        found |= dict.fromkeys(share, (python("torch_ranks.py", "4", "chunked", *share), False))
    return found


PROGRAMS = programs()

# Of two ranks, by the kernels in Triton's interpreter.
INTERPRETED = (
    "vocabulary:log_probs-bf16-softcap-scale-padded-bias-skewed-ignored-axis1-tight-head32-strided-n123",
    "vocabulary:edge-token_loss-nan_ignored-mean-bf16",
    "both:mean-bf16-n123",
    "vocabulary:mean-bf16-zloss-softcap-scale-padded-weight-signed-axis1-nostats-strided-n4x63",
    "vocabulary:edge-token_loss-stats-logits80-bf16",
    "vocabulary:edge-logits80-mean-bf16",
    "vocabulary:edge-one_class-bf16",
    "vocabulary:mean-fp16-zloss-scale-bias-weight-mask-skewed-ignored-axis1-head32-strided-n123",
    "vocabulary:edge-logits80-mean-fp16",
    "vocabulary:log_probs-fp16-padded-bias-skewed-ignored-axis1-tight-n50",
    "vocabulary:edge-token_loss-stats-mean-fp16",
    "vocabulary:mean-fp32-zloss-padded-weight-skewed-axis1-n123",
    "gathered_tokens:mean-bf16-n123",
    "gathered_head:mean-bf16-n123",
    "dtensor_tokens:edge-token_loss-stats-mean-fp16",
)
INTERPRETED += tuple(f"vocabulary:{name}" for name in ("edge-saved-softcap-bf16", *SAVED[1:]))
INTERPRETED += tuple(f"check:{name}" for name in KERNEL_CHECKS)
# A case with few rows represents a part of 700. Where one of two shards has no class, their sizes differ too. A case
# with other options has gathered DTensors.
SLOW_BY_KERNELS = (
    f"vocabulary:{SAVED[1]}",
    "check:batch_invariant_gathered_rows",
    "check:saved_rows_of_different_sizes",
    "check:gathered_dtensors",
)
QUICK_BY_KERNELS = tuple(request for request in INTERPRETED if request not in SLOW_BY_KERNELS)
QUICK_BY_KERNELS += ("vocabulary:edge-log_probs-saved-frozen_weight-fp16",)
# Of four ranks. The checks of tokens that are gathered chunk by chunk are those of two ranks.
OF_FOUR = ("check:gathered", "check:gathered_dtensors", "check:gathered_few_classes")
BY_KERNELS = python("torch_ranks.py", "2", "triton", *QUICK_BY_KERNELS)
SLOWLY_BY_KERNELS = python("torch_ranks.py", "2", "triton", *SLOW_BY_KERNELS, "4", *OF_FOUR)


def assert_passed(result: dict[str, Any]) -> None:
    assert not result.get("failure"), result["failure"]
    assert all(share <= 100 for share in result.get("used", {}).values()), result["used"]


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            name, marks=[pytest.mark.programs(command, seconds=30), *([] if quick else [pytest.mark.slow])], id=name
        )
        for name, (command, quick) in PROGRAMS.items()
    ],
)
def test_four_ranks_give_the_loss_and_the_gradients_of_one(request_: str, printed: Printed) -> None:
    assert_passed(printed[request_])


@pytest.mark.parametrize(
    "request_",
    [
        *each(dict.fromkeys(QUICK_BY_KERNELS, BY_KERNELS), seconds=25),
        *(
            pytest.param(name, marks=[pytest.mark.programs(SLOWLY_BY_KERNELS, seconds=15), pytest.mark.slow])
            for name in SLOW_BY_KERNELS
        ),
    ],
)
def test_two_ranks_by_the_kernels(request_: str, printed: Printed) -> None:
    assert_passed(printed[request_])


@pytest.mark.slow
@pytest.mark.parametrize("request_", each(dict.fromkeys(OF_FOUR, SLOWLY_BY_KERNELS), seconds=15))
def test_four_ranks_by_the_kernels(request_: str, printed: Printed) -> None:
    assert_passed(printed[request_])


ON_A_GPU = tuple(request for request in INTERPRETED if "fp32" not in request and not request.startswith("check"))
ON_A_GPU += (f"vocabulary:{SAVED[0]}",)
ON_A_GPU += tuple(f"check:{name}" for name in GATHERED_CHECKS if not name.endswith(("classes", "memory")))
ON_A_GPU += tuple(f"check:{name}" for name in HEAD_CHECKS)
BY_A_GPU = {request: python("torch_ranks.py", "2", "gpu", request) for request in ON_A_GPU}  # they mostly compile
# Ranks that share a GPU use gloo, with which `full_tensor` of a DTensor on a GPU ends PyTorch 2.11 with a segmentation
# fault.
WITH_NCCL = ("check:gathered_dtensors", *(f"check:{name}" for name in HEAD_CHECKS if name != "sent_head_in_float32"))
WITH_NCCL += tuple(request for request in ON_A_GPU if request.startswith(tuple(PLACEMENTS)))
BY_TWO_GPUS = {request: BY_A_GPU.pop(request) for request in WITH_NCCL}


@pytest.mark.gpu
@pytest.mark.parametrize("request_", each(BY_A_GPU, seconds=60))
def test_two_ranks_on_a_gpu(request_: str, printed: Printed) -> None:
    assert_passed(printed[request_])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("request_", each(BY_TWO_GPUS, seconds=60))
def test_two_ranks_on_two_gpus(request_: str, printed: Printed) -> None:
    assert_passed(printed[request_])


@pytest.mark.parametrize(("classes", "ranks"), [(507, 4), (507, 2), (8, 3), (5, 4), (1, 4), (128, 4)])
def test_shards_are_those_of_torch_chunk(classes: int, ranks: int) -> None:
    rows = [len(part) for part in torch.arange(classes).chunk(ranks)] + [0] * ranks
    firsts = [sum(rows[:rank]) for rank in range(ranks)]
    for rank in range(ranks):
        offset, largest, found = shard_of(rows[rank], rank, ranks, classes)
        assert (largest, found) == (rows[0], classes)
        assert offset == firsts[rank] or rows[rank] == 0


def test_shards_of_the_same_number_of_rows_may_have_padding() -> None:
    assert [shard_of(128, rank, 4, 507) for rank in range(4)] == [(128 * rank, 128, 507) for rank in range(4)]
    assert shard_of(10, 1, 2, None) == (10, 10, 20)


def test_a_shard_of_another_number_of_rows_is_an_error() -> None:
    message = "linear_weight must be this rank's shard of vocab_size 507 classes on 4 ranks: at least 127 rows on"
    with pytest.raises(ValueError, match=re.escape(message)):
        shard_of(126, 0, 4, 507)


def test_a_class_of_uint8_is_not_taken_for_ignore_index() -> None:
    """156 is -100 modulo 256."""
    target = torch.tensor([156, 3], dtype=torch.uint8)
    of_call: dict[str, Any] = {"reduction": "mean", "normalizer": None, "target": target, "class_weight": None}
    assert joint_normalizer((), **of_call, ignore_index=-100, classes=200) == 2


@pytest.mark.slow
def test_the_example_trains_on_four_processes() -> None:
    """Its loss starts at that of equal probabilities, log(512), on every grid of ranks."""
    root = Path(__file__).parent.parent
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "4", "examples/vocab_parallel.py", "--steps", "20"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": root, "env": environment, "capture_output": True, "text": True, "check": False}
    for tensor in ("1", "2", "4"):
        done = subprocess.run([sys.executable, *command, "--tensor", tensor], **options)
        assert done.returncode == 0, done.stderr[-2000:]
        first, last = (float(line.split()[-1]) for line in done.stdout.splitlines())
        assert abs(first - 6.24) < 0.1
        assert last < 5.0


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, ["--tensor", "3"], "--tensor must divide the vocabulary of 512, got 3"),
        ({"RANK": "0", "WORLD_SIZE": "3"}, [], "--tensor must divide the 3 ranks, got 2"),
        ({}, [], "start it with torchrun: torchrun --nproc-per-node 4 "),
    ],
)
def test_the_example_refuses_what_it_cannot_run(
    environment: dict[str, str],
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["vocab_parallel.py", *options])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(Path(__file__).parent.parent / "examples" / "vocab_parallel.py"), run_name="__main__")
    assert f"error: {message}" in capsys.readouterr().err
