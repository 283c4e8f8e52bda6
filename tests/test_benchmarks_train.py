"""Tests what the benchmark of training steps measures and reports, on a CPU. Nothing here depends on speed."""

import dataclasses
import itertools
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiling import quick_compilation

from benchmarks import attention, mesh_table, tables, train, train_jax, train_process, train_torch
from benchmarks.methods import GRADIENT_BOUND, LOSS_BOUND, UnavailableError, out_of_memory
from benchmarks.page_tables import NOT_YET
from benchmarks.results import RECORDED, ResultFile
from benchmarks.train_process import Request, answer, ask
from benchmarks.train_rows import BATCHES, GROUPS, LORA_RANK, MODELS, Row, draw, select, speed_figures
from flax_models.data.batches import IGNORED
from flax_models.train.accounting import flops_per_token

KEYS = {"config", "loss", "mode", "seq", "batch", "tokens_per_s", "mfu", "peak_bytes", "step_ms", "status", "commit"}
SMOKE = {row.name: row for row in GROUPS["smoke"]}
FUSED = SMOKE["smoke/fused/full/64x2"]
FSDP2 = SMOKE["smoke/hf/full/64x4/compile=false/mesh=fsdp=2"]
APART = "/scan_layers=false"  # compiles each layer separately
CAST = "/cast_head=true"  # like the trainer

# What is measured.


def test_rows_are_complete() -> None:
    assert LORA_RANK == 32
    assert {MODELS} == {("llama3.2-1b", "qwen2.5-0.5b")}
    for model in MODELS:
        for size in ((512, 16), (4096, 8)):
            for loss in ("fused", "unfused", "hf", "hf+liger"):
                for mode, groups in (("full", ("full",)), ("lora", ("lora", "lora-peers"))):
                    rows = [row for group in groups for row in GROUPS[group]]
                    name = f"{model}/{loss}/{mode}/{size[0]}x{size[1]}"
                    option = "" if loss in ("hf", "hf+liger") else APART
                    assert any(row.name == name + option + CAST * ((loss, mode) == ("fused", "full")) for row in rows)
            for group, option in (("packed", f"/data=packed{APART}{CAST}"), ("float32-head", APART)):
                assert f"{model}/fused/full/{size[0]}x{size[1]}{option}" in {row.name for row in GROUPS[group]}
        for loss in ("fused", "unfused"):
            cast = CAST * (loss == "fused")
            for option in (APART, ""):
                name = f"largest/{model}/{loss}/full/4096/remat=full{option}{cast}"
                assert name in {row.name for row in GROUPS["largest"]}
            assert f"{model}/{loss}/full/4096x8/remat=full{APART}{cast}" in {row.name for row in GROUPS["memory"]}
            assert f"{model}/{loss}/full/4096x8/remat=full" in {row.name for row in GROUPS["memory"]}
    runs = [(row.seed, row.loss, row.repeat) for row in GROUPS["converge"]]
    assert runs == [(seed, loss, repeat) for seed in range(4) for loss in ("fused", "unfused") for repeat in range(2)]
    for row in GROUPS["converge"]:  # like the training of published shapes, but on text
        assert dataclasses.replace(row, kind="speed", seed=0, repeat=0) in GROUPS["full"]
    assert {row.remat for row in GROUPS["remat"] if row.attention == "xla"} == {"none", "attention", "full"}
    rows = {row for group in GROUPS.values() for row in group}
    assert len({row.name for row in rows}) == len(rows)


def test_transformers_on_a_mesh_has_a_row_of_ours_and_one_of_a_single_gpu() -> None:
    ours = {row for group in ("mesh", "mesh-8b") for row in GROUPS[group]}
    alone, *theirs = GROUPS["mesh-hf"]
    assert [row.name for row in theirs] == [
        "llama3.2-1b/hf+liger/full/4096x16/compile=false/mesh=fsdp=2",
        "llama3-8b/hf+liger/full/4096x8/remat=full/compile=false/mesh=fsdp=2",
    ]
    for row in theirs:
        same = {"loss": "fused", "attention": "cudnn", "compile": True, "scan_layers": False, "cast_head": True}
        assert dataclasses.replace(row, **same) in ours
    assert alone == dataclasses.replace(theirs[0], mesh=None, batch=8)
    assert alone in GROUPS["liger"]


@pytest.mark.parametrize("group", ["ablation", "ablation-qwen"])
def test_an_ablation_adds_one_thing_at_a_time(group: str) -> None:
    rows = GROUPS[group]
    added = []
    for before, after in itertools.pairwise(rows):
        changed = [
            field.name for field in dataclasses.fields(Row) if getattr(before, field.name) != getattr(after, field.name)
        ]
        assert len(changed) == 1
        added += changed
    assert added == ["attention", "loss", "data", "remat", "scan_layers", "optimizer"]


def test_rows_are_chosen_by_group_and_by_name() -> None:
    assert not any(row.config == "smoke" for row in select())
    assert [row.name for row in select(["memory", "qwen2.5-0.5b/hf/full/512x16"])] == [
        "qwen2.5-0.5b/hf/full/512x16",
        *(row.name for row in GROUPS["memory"]),
    ]
    assert [row.kind for row in select(["check/*"])] == ["check"] * 4
    with pytest.raises(ValueError, match=r"rows must be of full, .*, got fast"):
        select(["fast"])
    with pytest.raises(SystemExit, match="--rows must be of full"):
        train.main(["--rows", "fast"])
    with pytest.raises(SystemExit, match="--first must be at least 1, got 0"):
        train.main(["--first", "0"])


def test_packed_and_padded_batches() -> None:
    for row in GROUPS["packed"]:
        assert row.batch is not None
        drawn, again = draw(row, row.batch), draw(row, row.batch)
        assert drawn.padding < 0.03
        assert 0.2 < np.mean(drawn.lengths) / row.seq < 0.3
        assert drawn.tokens == pytest.approx(row.batch * row.seq * (1 - drawn.padding))
        for batch, other in zip(drawn.batches, again.batches, strict=True):
            assert batch.lengths is not None
            assert np.array_equal(batch.tokens, other.tokens)
            assert (batch.lengths.sum(axis=1) == row.seq).all()
        assert sum(batch.counted for batch in drawn.batches) == drawn.lengths.sum()
        assert (drawn.batches[0].targets[:, 0] != IGNORED).all()

    padded = draw(GROUPS["ablation"][0], 8)
    assert len(padded.lengths) == 8 * BATCHES
    assert padded.batches[0].lengths is None
    assert sum(batch.counted for batch in padded.batches) == padded.lengths.sum()
    whole = draw(FUSED, 2)
    assert (whole.padding, whole.tokens, whole.batches[0].counted) == (0, 128, 128)


def test_speed_counts_neither_padding_nor_other_flops() -> None:
    row = GROUPS["packed"][0]
    drawn = draw(row, 8)
    figures = speed_figures(row, drawn, 500.0, None, "NVIDIA H200")
    assert figures["tokens_per_s"] == pytest.approx(2 * drawn.tokens)
    flops = flops_per_token(row.model(), drawn.lengths)
    assert flops < flops_per_token(row.model(), row.seq)
    assert figures["mfu"] == pytest.approx(2 * drawn.tokens * flops / 989e12)
    assert speed_figures(row, drawn, 500.0, None, "cpu")["mfu"] is None


# Fused and unfused.


def test_the_unfused_trainer_differs_only_in_the_loss() -> None:
    figures: dict[str, Any] = {}
    with quick_compilation():
        train_jax.check(dataclasses.replace(FUSED.check(), seq=32), 2, figures, with_weights=False)
    for of in ("float32", "bfloat16", "bfloat16_cast_head"):
        dtype = of.removesuffix("_cast_head")
        assert figures[f"err_loss_{of}"] <= LOSS_BOUND[dtype]
        assert 0 < figures[f"err_gradient_{of}"] <= GRADIENT_BOUND[dtype]
    assert figures["err_gradient_float32"] < 1e-5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": 0.01}, r"float32: not timed: err_loss is 0\.01, above the sanity bound 0\.0001"),
        ({"gradient": float("nan")}, "float32: not timed: err_gradient is nan"),
        ({"moved": np.arange(12) != 3}, "float32: blocks.attention.value.kernel has no gradient other than zero"),
    ],
)
def test_a_wrong_loss_fails_the_check(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str) -> None:
    make: Any = train_jax.Compared
    right = make(np.float32(6), np.float32(1e-7), np.float32(1e-6), np.full(12, 1e-6), np.full(12, True))
    monkeypatch.setattr(train_jax, "_compare", lambda *arguments: right._replace(**wrong))
    with quick_compilation(), pytest.raises(ValueError, match=message):
        train_jax.check(FUSED.check(), 1, {}, with_weights=False)


def test_steps_that_do_not_train_everything_are_refused() -> None:
    from flax_models.train.step import StepMetrics

    def metrics(loss: float, *trained: bool) -> StepMetrics:
        one: Any = np.float32(1)
        return StepMetrics(np.float32(loss), one, one, np.array(trained))  # pyright: ignore[reportArgumentType]

    figures = train_jax.check_steps([metrics(7, True, False), metrics(6, False, True)], ["a", "b"])
    assert figures == {"first_loss": 7, "first_grad_norm": 1}
    with pytest.raises(ValueError, match="1 of 2 parts have no gradient other than zero, the first is b"):
        train_jax.check_steps([metrics(7, True, False)], ["a", "b"])
    with pytest.raises(ValueError, match=r"loss nan and gradient norm 1\.0 must be finite"):
        train_jax.check_steps([metrics(float("nan"), True)], ["a"])


class Steps:
    """Stands for `train_torch.Step`, with the losses that it is to have."""

    def __init__(self, *losses: float) -> None:
        self.weights, self._losses = [torch.ones(2, requires_grad=True)], iter(losses)

    def forward(self) -> torch.Tensor:
        return self.weights[0].sum() - 2 + next(self._losses)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> torch.Tensor:
        return torch.tensor(0.5)


def test_first_steps_of_transformers_are_checked() -> None:
    def check(*losses: float, same_batch: bool = True) -> dict[str, Any]:
        steps: Any = Steps(*losses)
        return train_torch.check_steps(steps, len(losses), 512, same_batch=same_batch)

    assert check(6.5, 6.4, 6.6) == {"first_loss": 6.5, "first_grad_norm": 0.5}
    assert check(6.5, 6.6, same_batch=False)["first_loss"] == 6.5
    with pytest.raises(ValueError, match=r"loss of the same batch must fall, got 6\.5000, 6\.5000, 6\.6000"):
        check(6.5, 6.5, 6.6)
    with pytest.raises(ValueError, match=r"the first loss of random weights must be about 6\.238, got 4\.500"):
        check(4.5, 4.0)
    with pytest.raises(ValueError, match=r"loss nan and gradient norm 0\.5 must be finite"):
        check(6.5, float("nan"))
    idle: Any = Steps(6.5, 6.4)
    idle.weights.append(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="1 of 2 parameters have no gradient other than zero"):
        train_torch.check_steps(idle, 2, 512)


@pytest.mark.parametrize(
    "change", [{"mesh": "data=2"}, {"mesh": "fsdp=2,tensor=2"}, {"compile": True}, {"mode": "lora"}]
)
def test_transformers_is_measured_on_a_mesh_in_one_way(change: dict[str, Any]) -> None:
    row = dataclasses.replace(FSDP2, **change)
    with pytest.raises(UnavailableError, match="on a mesh with fsdp only, not compiled, without adapters"):
        train_torch.make_model(row, row.model(), "cpu")


# Processes and their answers.


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_two_processes_measure_transformers_with_fsdp2(remat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first step is that of one process with the same weights."""
    row = dataclasses.replace(FSDP2, remat=remat)
    found = ask(Request(dataclasses.asdict(row), 4, in_torch=True), limit=120)
    assert (found["status"], found["note"], found["gpus"]) == ("ok", None, 2)
    assert found["tokens"] == 4 * row.seq
    monkeypatch.setattr(train_torch, "divided", lambda model, device: model.bfloat16())
    torch.manual_seed(0)
    model = train_torch.make_model(FSDP2, FSDP2.model(), "cpu")
    batch = tuple(torch.from_numpy(array).long() for array in draw(row, 4).batches[0][:2])
    step = train_torch.Step(model, iter([batch]))
    loss = step.forward()
    step.backward(loss)
    assert found["first_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert found["first_grad_norm"] == pytest.approx(step.update().item(), rel=0.01)


@pytest.mark.slow
def test_a_failure_of_two_processes_is_the_answer() -> None:
    found = ask(Request(dataclasses.asdict(FSDP2), 3, in_torch=True), limit=120)
    assert found["status"] == "failed"
    assert "unflatten" in found["note"]
    found = ask(Request(dataclasses.asdict(FSDP2), 4, in_torch=True, memory=1), limit=120)
    assert (found["status"], found["note"][:8]) == ("skipped", "--memory")


@pytest.mark.slow
def test_a_separate_process_measures_transformers() -> None:
    row = SMOKE["smoke/hf/full/64x2"]
    found = ask(Request(dataclasses.asdict(row), 2, in_torch=True, split=True), limit=120)
    assert found["status"] == "ok", found["note"]
    assert found["tokens_per_s"] > 0
    assert found["first_loss"] == pytest.approx(np.log(512), abs=0.5)
    assert found["versions"].keys() >= {"torch", "transformers", "liger-kernel"}
    assert set(found["split"]) == {"forward", "backward", "optimizer"}
    assert found["compiled"] is False


def test_a_process_that_takes_too_long_is_ended() -> None:
    assert ask(Request(), limit=0.05) == {"status": "failed", "note": "took longer than 0.05 s"}


def test_a_process_that_dies_is_a_failed_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dies = tmp_path / "python"
    dies.write_text("#!/bin/sh\necho no such driver\nexit 3\n")
    dies.chmod(0o755)
    monkeypatch.setattr(train_process.sys, "executable", str(dies))
    assert ask(Request(), limit=60) == {"status": "failed", "note": "its process ended with status 3 and no answer"}


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying"), "oom", "RuntimeError: RESOURCE_EXHAUSTED"),
        (MemoryError("the plan"), "oom", "MemoryError: the plan"),
        (UnavailableError("not installed"), "skipped", "not installed"),
        (ValueError("first line\nsecond"), "failed", "ValueError: first line"),
    ],
)
def test_errors_are_answers(monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, note: str) -> None:
    def fails(row: Row, request: Request, figures: dict[str, Any]) -> None:
        figures["compile_s"] = 1.5
        raise error

    monkeypatch.setattr(train_jax, "measure", fails)
    found = answer(Request(dataclasses.asdict(FUSED), 2))
    assert (found["status"], found["compile_s"]) == (status, 1.5)
    assert found["note"].startswith(note)
    assert "\n" not in found["note"]


def test_the_answer_of_another_process_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {"status": "oom", "note": "no room", "step_ms": None}
    monkeypatch.setattr(train_jax, "measure", lambda row, request, figures: figures.update(theirs))
    found = answer(Request(dataclasses.asdict(FUSED), 2))
    assert {name: found[name] for name in theirs} == theirs


def test_out_of_memory_is_found_behind_other_errors() -> None:
    wrapped = RuntimeError("backend failed")
    assert not out_of_memory(wrapped)
    wrapped.__cause__ = ValueError("CUDA out of memory. Tried to allocate")
    assert out_of_memory(wrapped)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Fields to add to the answers of processes, by row name. Tests may change them."""
    special: dict[str, dict[str, Any]] = {}

    def fake(request: Request, limit: float) -> dict[str, Any]:
        common = {"device": "H200", "versions": {}, "status": "ok", "note": None}
        if request.row is None:
            return common
        row = Row(**request.row)
        speed = {"step_ms": 2.0, "step_ms_p20": 1.9, "step_ms_p80": 2.1, "tokens_per_s": 64e3, "first_loss": 6.0}
        usual: dict[str, Any] = {"check": {"err_loss_float32": 1e-7}, "converge": {"losses": [6.0, 5.0]}}.get(
            row.kind, speed
        )
        return {**common, **usual, **special.get(row.name, {})}

    monkeypatch.setattr(train, "ask", fake)
    return special


def run(path: Path, *arguments: str, commit: str = "one") -> tuple[int, dict[str, dict[str, Any]]]:
    status = train.main(["--json", str(path), "--commit", commit, *arguments])
    return status, {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_rows_are_merged_one_by_one(
    tmp_path: Path, answers: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.json"
    status, rows = run(path, "--rows", "smoke/fused/full/64x2", "smoke/hf/full/64x2")
    assert status == 0
    assert list(rows) == ["check/smoke/full", "smoke/fused/full/64x2", "smoke/hf/full/64x2"]
    assert all(row.keys() >= KEYS for row in rows.values())
    answers["smoke/hf/full/64x2"] = {"status": "oom", "note": "no room", "step_ms": None}
    status, rows = run(path, "--rows", "smoke/hf/full/64x2", commit="two")
    assert status == 0  # only another library's row failed
    assert [row["commit"] for row in rows.values()] == ["one", "one", "two"]
    assert rows["smoke/hf/full/64x2"]["status"] == "oom"
    assert "smoke/hf/full/64x2" in capsys.readouterr().out
    answers["smoke/fused/full/64x2"] = {"status": "oom", "note": "no room", "step_ms": None}
    assert run(path, "--rows", "smoke/fused/full/64x2")[1]["smoke/fused/full/64x2"]["status"] == "oom"
    answers["smoke/fused/full/64x2"] = {"status": "failed", "note": "wrong", "step_ms": None}
    assert run(path, "--rows", "smoke/fused/full/64x2")[0] == 1
    assert run(path, "--rows", "converge/smoke*")[1]["converge/smoke/fused/full/64x2"]["losses"] == [6, 5]


def test_nothing_of_ours_is_timed_unless_its_check_has_passed(
    tmp_path: Path, answers: dict[str, dict[str, Any]]
) -> None:
    answers["check/smoke/full"] = {"status": "failed", "note": "ValueError: float32: not timed"}
    answers["check/smoke/lora"] = {"status": "skipped", "note": "no adapters here"}
    names = ("smoke/fused/full/64x2", "smoke/fused/lora/64x2")
    status, rows = run(tmp_path / "train.json", "--rows", *names)
    assert status == 1
    assert [rows[name]["status"] for name in names] == ["failed", "skipped"]
    assert rows[names[0]]["note"] == "not measured, for check/smoke/full: ValueError: float32: not timed"
    assert rows[names[1]]["note"].endswith("no adapters here")
    assert rows[names[0]]["tokens_per_s"] is None


def test_first_losses_of_the_same_batches_must_agree(tmp_path: Path, answers: dict[str, dict[str, Any]]) -> None:
    answers["smoke/unfused/full/64x2"] = {"first_loss": 6.3}
    answers["smoke/fused/full/64x2/data=packed"] = {"first_loss": 7.0}  # other batches
    names = ("smoke/fused/full/64x2", "smoke/unfused/full/64x2", "smoke/fused/full/64x2/data=packed")
    status, rows = run(tmp_path / "train.json", "--rows", *names)
    assert status == 1
    assert [rows[name]["status"] for name in names] == ["ok", "failed", "ok"]
    assert rows[names[1]]["note"] == "first loss 6.3 is not smoke/fused/full/64x2's, 6"
    assert rows[names[1]]["tokens_per_s"] is None


def test_rows_of_a_mesh_are_relative_to_one_gpu(
    tmp_path: Path, answers: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    one, mesh = "smoke/fused/full/64x2", "smoke/fused/full/64x4/mesh=fsdp=2"
    answers[mesh] = {"tokens_per_s": 121.6e3, "gpus": 2}
    status, rows = run(tmp_path / "train.json", "--rows", one, mesh)
    assert status == 0
    assert rows[mesh]["efficiency"] == pytest.approx(0.95)
    assert "95.0% of 2 GPUs" in capsys.readouterr().out
    _, rows = run(tmp_path / "other.json", "--rows", mesh)
    assert rows[mesh]["efficiency"] is None


def test_the_table_of_meshes_is_that_of_the_recorded_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = {"config": "llama3.2-1b", "kind": "speed", "status": "ok", "loss": "fused", "remat": "none"}
    common |= {"optimizer": "adamw", "seq": 4096, "commit": "0123456789"}
    measured = {"tokens_per_s": 1234.4, "efficiency": None, "mfu": 0.5, "peak_bytes": 3 * 2**29}
    rows = [
        {**common, **measured, "mesh": None, "gpus": 1, "batch": 8},
        {**common, **measured, "mesh": "fsdp=2", "gpus": 2, "batch": 16, "efficiency": 0.9512, "remat": "full"},
        {**common, "mesh": "data=2", "gpus": 2, "batch": 16, "status": "oom", "optimizer": "adafactor"},
        {**common, **measured, "mesh": None, "gpus": 1, "batch": 2, "kind": "check"},
        {**common, **measured, "mesh": "fsdp=2", "gpus": 2, "batch": 16, "loss": "hf+liger"},
    ]
    (tmp_path / "h9").mkdir()
    (tmp_path / "h9" / "train_mesh.json").write_text(
        json.dumps({"device": "H9", "versions": {"jax": "1"}, "rows": rows})
    )
    place = mesh_table.PLACE._replace(page=tmp_path / "page.md")
    place.page.write_text(f"before\n{place.begin}\n\nold\n\n{place.end}\nafter\n")
    monkeypatch.setattr(mesh_table, "PLACE", place)
    monkeypatch.setattr(tables, "RECORDED", tmp_path / "h200")
    tables.main(["--mesh"])
    lines = [
        *("H9, jax 1, at 0123456:", "", f"| {' | '.join(mesh_table.HEADINGS)} |", "|---|---|---|---|---|---|---|"),
        "| llama3.2-1b, 8 x 4,096 | - | 1 | 1,234 | - | 50.0% | 1.5 GiB |",
        "| llama3.2-1b, optimizer adafactor, 16 x 4,096 | data=2 | 2 | out of memory | - | - | - |",
        "| llama3.2-1b, remat full, 16 x 4,096 | fsdp=2 | 2 | 1,234 | 95.1% | 50.0% | 1.5 GiB |",
        "| llama3.2-1b, transformers with Liger's kernels, 16 x 4,096 | fsdp=2 | 2 | 1,234 | - | 50.0% | 1.5 GiB |",
    ]
    assert capsys.readouterr().out.splitlines() == lines
    assert place.page.read_text() == "\n".join(["before", place.begin, "", *lines, "", place.end, "after", ""])


def test_the_page_has_the_table_of_meshes() -> None:
    files = sorted(RECORDED.parent.glob(f"*/{mesh_table.FILE}"))
    lines = mesh_table.mesh_table([json.loads(file.read_text()) for file in files])
    text = mesh_table.PLACE.page.read_text()
    assert mesh_table.PLACE.filled(text, lines) == text
    assert mesh_table.mesh_table([]) == [NOT_YET]


def test_a_mesh_of_other_devices_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SMOKE["smoke/fused/full/64x4/mesh=data=2"]
    found = train_process.answer(Request(dataclasses.asdict(row), 4))
    assert (found["status"], found["note"]) == ("skipped", "needs 2 devices, got 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(train_torch, "start_processes", None)
    with pytest.raises(UnavailableError, match="needs 2 devices, got 1"):
        train_torch.measure(FSDP2, Request(dataclasses.asdict(FSDP2), 4), {})


def test_a_row_without_room_is_tried_again_with_the_whole_device(
    tmp_path: Path, answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    common, asked = train.ask, []

    def ask(request: Request, limit: float) -> dict[str, Any]:
        asked.append(request.whole_device)
        return {**common(request, limit), "status": "ok" if request.whole_device else "oom"}

    monkeypatch.setattr(train, "ask", ask)
    row = SMOKE["smoke/hf/full/64x2"]
    file = ResultFile(tmp_path / "train.json", "H200", {}, "one", key=("name",))
    assert train.measure(row, file, train.parse([]))["status"] == "ok"
    assert asked == [False, True]
    of_one = [train_process._environment(Request(dataclasses.asdict(row), 2, whole_device=whole)) for whole in asked]
    assert [variables["XLA_PYTHON_CLIENT_PREALLOCATE"] for variables in of_one] == ["false", "true"]


@pytest.mark.parametrize("given", [None, "/compiled"])
def test_processes_share_a_compilation_cache(
    tmp_path: Path, answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    common, folders = train.ask, []

    def ask(request: Request, limit: float) -> dict[str, Any]:
        if request.row is not None:
            folders.append(train_process._environment(request)[train.CACHE])
        return common(request, limit)

    monkeypatch.setattr(train, "ask", ask)
    monkeypatch.delenv(train.CACHE, raising=False)
    if given:
        monkeypatch.setenv(train.CACHE, given)
    run(tmp_path / "train.json", "--rows", "smoke/fused/full/64x2", "smoke/hf/full/64x2")
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert folders[0] == given or Path(folders[0]).is_absolute()
    assert os.environ.get(train.CACHE) == given


def test_recorded_rows_are_still_known() -> None:
    recorded = json.loads((RECORDED / "train.json").read_text())["rows"]
    fields = {field.name for field in dataclasses.fields(Row)}
    known = {row.name: row for row in select()}
    for row in recorded:
        if row["name"] in known:
            for field in fields & row.keys() - {"batch"}:  # a search for the largest batch records its result
                assert row[field] == getattr(known[row["name"]], field)
    assert {"full", "converge"} <= {
        group for group, rows in GROUPS.items() if {row.name for row in rows} <= {row["name"] for row in recorded}
    }


def test_a_row_that_ran_elsewhere_is_refused(tmp_path: Path, answers: dict[str, dict[str, Any]]) -> None:
    answers["smoke/hf/full/64x2"] = {"device": "CPU (times are no results)"}
    rows = run(tmp_path / "train.json", "--rows", "smoke/hf/full/64x2")[1]
    assert rows["smoke/hf/full/64x2"]["note"] == "ran on CPU (times are no results)"


def test_no_row_starts_too_late(
    tmp_path: Path, answers: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    train.main(["--rows", "smoke/hf/full/64x2", "--until", "-1"])
    assert "smoke/hf/full/64x2" in (printed := capsys.readouterr().out)
    assert "not begun after -1 s" in printed


@pytest.mark.parametrize("capacity", [0, 1, 2, 15, 16, 17, 37, 130, 1000])
@pytest.mark.parametrize("estimate", [None, 1.0, 0.7, 1.4])
def test_the_largest_batch_is_found(capacity: int, estimate: float | None) -> None:
    tried = []

    def attempt(batch: int) -> dict[str, Any]:
        tried.append(batch)
        guess = None if estimate is None else int(estimate * capacity)
        return {"status": "ok" if batch <= capacity else "oom", "note": None, "estimate": guess, "step_ms": batch}

    found = train.largest(attempt, 16)
    assert found["tried"] == tried
    assert len(tried) <= 14
    if not capacity:
        assert (found["status"], found["batch"]) == ("oom", None)
        return
    assert (found["status"], found["step_ms"]) == ("ok", found["batch"])
    assert found["batch"] <= capacity < found["too_large"] <= found["batch"] + max(1, found["batch"] // train.FINE)


def test_another_error_ends_the_search() -> None:
    found = train.largest(lambda batch: {"status": "failed", "note": "wrong"}, 16)
    assert found == {"status": "failed", "note": "wrong", "batch": 16, "tried": [16]}
    found = train.largest(lambda batch: {"status": "ok" if batch < 40 else "failed", "note": "wrong"}, 16)
    assert (found["status"], found["batch"], found["too_large"]) == ("ok", 32, 64)
    assert found["note"] == "batch 64 failed, not for memory: wrong"


def test_files_are_merged(
    tmp_path: Path, answers: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("smoke/fused/full/64x2", "smoke/unfused/full/64x2")
    one, two, merged = (tmp_path / name for name in ("one.json", "two.json", "all.json"))
    run(one, "--rows", *names)
    answers[names[1]] = {"status": "failed", "note": "broken"}
    answers["smoke/hf/full/64x2"] = {"status": "oom", "note": "full"}
    measured = run(two, "--rows", names[1], "smoke/hf/full/64x2")[1]
    assert train.main(["--merge", str(one), str(two), "--json", str(merged)]) == 0
    assert "smoke/hf/full/64x2" in capsys.readouterr().out
    rows = {row["name"]: row for row in json.loads(merged.read_text())["rows"]}
    assert {name: rows[name]["status"] for name in names} == dict.fromkeys(names, "ok")
    assert rows["smoke/hf/full/64x2"] == measured["smoke/hf/full/64x2"]
    content = json.loads(two.read_text())
    two.write_text(json.dumps({**content, "device": "another"}))
    with pytest.raises(SystemExit, match=r"--merge: .*json is of"):
        train.main(["--merge", str(two), "--json", str(merged)])
    with pytest.raises(SystemExit, match="--merge goes with --json"):
        train.main(["--merge", str(two)])


@pytest.fixture
def train_plot() -> Any:
    """The module, which imports matplotlib. Each worker collects this file, and one runs it."""
    return import_module("benchmarks.train_plot")


def test_plots_show_recorded_rows(
    train_plot: Any, tmp_path: Path, answers: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.json"
    run(path, "--rows", "qwen2.5-0.5b/*/full/512x16", "converge")
    assert train.main(["--plot", "--json", str(path)]) == 0
    assert {picture.stem for picture in tmp_path.glob("*.png")} == {"train-speed", "train-convergence"}
    content, drawn = json.loads(path.read_text()), []
    former = next(row for row in content["rows"] if row["kind"] == "converge")
    content["rows"].append({**former, "name": "one that is measured no more"})
    path.write_text(json.dumps(content))
    monkeypatch.setattr(train_plot, "draw_convergence", lambda rows, *rest: drawn.extend(row["name"] for row in rows))
    train_plot.draw_all(path)
    assert drawn == [row.name for row in GROUPS["converge"]]
    path.write_text(json.dumps({"device": "x", "rows": []}))
    with pytest.raises(SystemExit, match="no row that a picture shows"):
        train_plot.draw_all(path)


def run_on_text(loss: str, seed: int, losses: list[float]) -> dict[str, Any]:
    return {"loss": loss, "seed": seed, "losses": losses}


def test_distances_between_repeats_pairs_and_means(train_plot: Any) -> None:
    rows = [
        *(run_on_text("fused", 0, losses) for losses in ([6.0, 5.0], [6.0, 5.2])),
        *(run_on_text("unfused", 0, losses) for losses in ([6.0, 4.8], [6.0, 5.2])),
        *(run_on_text("fused", 1, losses) for losses in ([7.0, 3.0], [7.0, 3.0])),
        *(run_on_text("unfused", 1, losses) for losses in ([7.0, 3.4], [7.0, 3.0])),
    ]
    found = train_plot.distances(rows)
    assert list(found) == ["repeats", "pairs", "means"]
    np.testing.assert_allclose(found["repeats"], [0, (0.2 + 0.4 + 0 + 0.4) / 4], atol=1e-12)
    np.testing.assert_allclose(found["pairs"], [0, (0.2 + 0.2 + 0.4 + 0 + 0.4 + 0 + 0.4 + 0) / 8], atol=1e-12)
    np.testing.assert_allclose(found["means"], [0, abs(0.1 - 0.2) / 2], atol=1e-12)  # opposite signs cancel
    assert list(train_plot.distances(rows[:2])) == ["repeats"]
    assert list(train_plot.distances(rows[1:3])) == ["pairs", "means"]
    assert not train_plot.distances(rows[:1])
    assert not train_plot.distances([rows[0], rows[-1]])  # different seeds


# Attention on packed rows.


def test_the_attention_benchmark_reports_what_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    arguments = ["--rows", "smoke/fused/full/64x2/data=packed", "--seconds", "0", "--json", str(path)]
    with quick_compilation():
        assert attention.main([*arguments, "--methods", "xla", "tokamax-mosaic"]) == 0
    rows = {row["method"]: row for row in json.loads(path.read_text())["rows"]}
    assert min(rows["xla"]["ms"], rows["xla"]["forward_ms"]) > 0
    assert all(1e-4 < rows["xla"][f"err_{name}"] < 1e-2 for name in ("out", "d_query", "d_key", "d_value"))
    assert rows["tokamax-mosaic"]["status"] in ("skipped", "failed")
    assert rows["tokamax-mosaic"]["note"] in capsys.readouterr().out


# The whole command.


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smoke_rows_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiles the random initialization once for all processes.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    names = ("smoke/*fused/*/64x2", "smoke/*packed", "largest/smoke*", "converge/smoke*")
    arguments = ["--rows", *names, "--seconds", "0", "--memory", "20000000", "--weights", "--split"]
    status, rows = run(tmp_path / "train.json", *arguments)
    assert status == 0
    assert all(row["status"] == "ok" for row in rows.values())
    assert rows["check/smoke/full"]["err_weights"] < 1e-5  # compared with transformers, from the same weights
    assert rows["smoke/fused/full/64x2"]["first_loss"] == pytest.approx(
        rows["smoke/unfused/full/64x2"]["first_loss"], rel=1e-3
    )
    assert set(rows["smoke/fused/full/64x2"]["split"]) >= {"model", "loss", "optimizer"}
    largest = rows["largest/smoke/fused/full/64"]
    assert 16 < largest["batch"] < largest["too_large"]
    losses = rows["converge/smoke/fused/full/64x2"]["losses"]
    assert len(losses) == train_jax.CONVERGENCE_STEPS
    assert np.mean(losses[-20:]) < losses[0] - 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smoke_rows_of_a_mesh_run_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    names = [f"smoke/fused/full/64x4{mesh}" for mesh in ("", "/mesh=data=2", "/mesh=fsdp=2")]
    status, rows = run(tmp_path / "train.json", "--rows", "smoke/fused/full/64x2", *names, "--seconds", "0")
    assert status == 0
    first, *others = (rows[name]["first_loss"] for name in names)
    assert others == pytest.approx([first, first], rel=1e-3)
    assert [rows[name]["gpus"] for name in names] == [1, 2, 2]
    assert all(rows[name]["efficiency"] > 0 for name in names[1:])
