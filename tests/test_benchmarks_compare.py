"""Tests the comparison of two checkouts on a CPU. Stub packages of a few lines replace the checkouts."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from benchmarks import compare, data
from benchmarks.compare_child import check_origin
from benchmarks.jax_bench import JaxBench
from benchmarks.torch_bench import TorchBench

STUB = """
from torch.nn import functional as F

def linear_cross_entropy(input, linear_weight, target, *, reduction, memory_budget, implementation):
    loss = F.cross_entropy((input.float() @ linear_weight.float().T), target, reduction=reduction)
    return loss if loss.requires_grad else {factor} * loss
"""


def tree(folder: Path, factor: str) -> Path:
    (folder / "core_triton").mkdir(parents=True)
    (folder / "core_triton" / "__init__.py").write_text(STUB.format(factor=factor))
    return folder


def test_two_folders_are_checked_and_timed_alternately(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tree(tmp_path / "old", "1"), tree(tmp_path / "new", "1.5")
    file = tmp_path / "compared.json"
    arguments = ["--framework", "torch", "--device", "cpu", "--seconds", "0", "--pairs", "4", "--block", "0"]
    arguments += ["--shapes", "64-32-500", "--modes", "train", "eval", "--checks", "sharp", "peaked"]
    assert compare.main([str(old), str(new), *arguments, "--json", str(file)]) == 1
    train, scoring = json.loads(file.read_text())["rows"]
    assert train["status"] == "ok", train["note"]
    assert train["pairs"] == 4
    assert train["same_bits"] == {"sharp": True, "peaked": True}
    assert min(train["old_ms"], train["new_ms"], train["ratio"]) > 0
    assert (train["old"], train["new"]) == (compare.label(old), compare.label(new))
    assert train["old"].startswith("code-")
    assert train["old"] != train["new"]
    assert train["errors"]["sharp"]["new"]["err_d_weight"] < 5e-3
    assert train["errors"]["sharp"]["new"]["err_d_weight_class_median"] < 5e-3
    assert scoring["status"] == "failed"
    assert "new, sharp: not timed: err_loss is 0.5" in scoring["note"]
    printed = capsys.readouterr().out
    assert "new/old" in printed
    assert "sharp yes, peaked yes" in printed


def test_pairs_of_several_processes_are_taken_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = SimpleNamespace(about={"device": "none", "versions": {}, "no_energy": None})
    times = [
        compare.Times(([1.0, 1.0], [1.1, 1.3]), [2.0, 3.0], None),
        compare.Times(([2.0], [2.0]), [4.0, None], "late"),
    ]
    started = iter(times)
    monkeypatch.setattr(compare, "children", lambda *arguments: nullcontext([child, child]))
    monkeypatch.setattr(compare, "check", lambda *arguments: {"same_bits": {}})
    monkeypatch.setattr(compare, "compare", lambda *arguments: next(started))
    monkeypatch.setattr(compare, "both", lambda *arguments: None)
    file = tmp_path / "compared.json"
    arguments = ["--framework", "torch", "--shapes", "8-8-8", "--processes", "2", "--labels", "a", "b"]
    assert compare.main([str(tmp_path), str(tmp_path), *arguments, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["process_ratios"] == pytest.approx([1.2, 1.0])
    assert (row["pairs"], row["ratio"], row["old_ms"], row["new_ms"]) == pytest.approx((3, 1.1, 1.0, 1.3))
    assert (row["old_joules"], row["new_joules"], row["joules_note"]) == (3.0, 3.0, "late")


def test_a_folder_that_cannot_be_compared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ["--framework", "torch", "--device", "cpu", "--shapes", "8-8-8"]
    (tmp_path / "core_triton").mkdir()
    (tmp_path / "core_triton" / "__init__.py").write_text("raise ImportError('half a package')")
    with pytest.raises(SystemExit, match="ImportError: half a package"):
        compare.main([str(tmp_path), str(tmp_path), *common])
    with pytest.raises(SystemExit, match="which is no folder"):
        compare.main([str(tmp_path), str(tmp_path / "absent"), *common])
    with pytest.raises(SystemExit, match=r"--checks must be among .* got blunt"):
        compare.main([str(tmp_path), str(tmp_path), *common, "--checks", "blunt"])
    with pytest.raises(SystemExit, match=r"--modes must be among train, .* got host"):
        compare.main([str(tmp_path), str(tmp_path), *common, "--modes", "host"])
    elsewhere = SimpleNamespace(__file__=str(tmp_path.parent / "core_triton" / "__init__.py"))
    monkeypatch.setitem(sys.modules, "core_triton", elsewhere)
    with pytest.raises(ImportError, match="core_triton must come from"):
        check_origin(tmp_path)


def test_digests_tell_bits_apart() -> None:
    values = [[1.0, -2.0], [0.5, 3.0]]
    pairs: list[tuple[Any, Any]] = [(TorchBench("cpu"), torch.tensor(values)), (JaxBench("cpu"), jnp.array(values))]
    for bench, array in pairs:
        assert bench.digest([array]) == bench.digest([array + 0])
        assert len({bench.digest([each]) for each in (array, array.T, -array, array + 1e-6)}) == 4
        assert bench.time_block(lambda array=array: array, 3) >= 0


def test_sharp_arrays_have_few_likely_classes() -> None:
    from benchmarks.shapes import Shape
    from benchmarks.torch_bench import TorchBench, TorchProblem

    problem = TorchProblem(
        Shape("sharp", 512, 64, 1000), "float32", "sharp", torch.device("cpu"), TorchBench("cpu").time_pairs
    )
    p = torch.softmax(problem.input @ problem.weight.T, 1)
    assert 1.2 < float((p > 2**-6).sum(1).float().mean()) < 10
    softmax_part, whole = p @ problem.weight, p @ problem.weight - problem.weight[problem.target]
    assert float(softmax_part.norm() / whole.norm()) > 1  # an error in p shows in the norm
    assert data.expected_loss(data.lean_max(64, 1000, "sharp"), 64, 1000, "sharp") == pytest.approx(0.7, abs=1e-3)
