"""Runs that are stopped or killed, that diverge, or whose disk is full lose nothing that a checkpoint contains."""

import contextlib
import errno
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_runs import (
    SMALL,
    before_step,
    learned,
    run_alone,
    small_trainer,
    start,
    train,
    write_texts,
)

from flax_models.errors import RunError
from flax_models.model.decoder import Decoder, ModelConfig
from flax_models.train import checkpoint
from flax_models.train.checkpoint import MANIFEST, Checkpoints, steps_in
from flax_models.train.config import TrainConfig
from flax_models.train.metrics import MetricsLog, read_rows
from flax_models.train.optimizers import learning_rate_schedule
from flax_models.train.run_folder import RunLock, move_failed, read_record, resume_advice
from flax_models.train.step import Trainer, TrainState
from flax_models.train.trained import read_run


@pytest.fixture(scope="module")
def whole(compiled, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run. Tests read or copy it."""
    place = tmp_path_factory.mktemp("whole")
    write_texts(place / "data")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        assert start(place, "whole") == 0
    return place / "runs" / "whole"


@pytest.fixture
def copied(whole, tmp_path) -> Path:
    """A copy of that run that a test may change, in a folder for further runs."""
    shutil.copytree(whole, tmp_path / "runs" / "whole")
    return tmp_path


def kept(folder: Path) -> list[int]:
    """Returns the steps of a run's checkpoints."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit())


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


def interrupt(state: TrainState) -> None:
    raise KeyboardInterrupt


def diverge(state: TrainState) -> TrainState:
    return state._replace(params=jax.tree.map(lambda leaf: leaf * jnp.nan, state.params))


# Stopping


def test_resumed_run_equals_the_uninterrupted_run_bit_for_bit(whole, place, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        before_step(patch, 6, interrupt)  # an exception, because a signal would save first
        assert start(place, "broken") == 130
    assert capsys.readouterr().err == "stopped: --resume continues from the checkpoint of step 3\n"
    assert train(place, "--name", "broken", "--resume") == 0
    assert "from step 3" in capsys.readouterr().out

    broken = place / "runs" / "broken"
    assert learned(whole) == learned(broken)
    results = [json.loads((folder / "result.json").read_text()) for folder in (whole, broken)]
    assert results[0]["held_out_loss"] == results[1]["held_out_loss"]

    like = small_trainer().initial
    states = [Checkpoints(folder / "checkpoints").restore(like) for folder in (whole, broken)]
    assert states[0][1] == states[1][1]
    jax.tree.map(np.testing.assert_array_equal, states[0][0], states[1][0])


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_signal_saves_the_current_step_and_the_run_resumes_from_it(number, whole, place, monkeypatch, capfd):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)  # a shell may ignore these signals
    with monkeypatch.context() as patch:
        before_step(patch, 5, lambda state: os.kill(os.getpid(), number))
        assert start(place, "stopped") == 128 + number
    notice, stopped = capfd.readouterr().err.splitlines()
    assert notice == f"{number.name}: stopping after this step; repeat it to stop without saving"
    assert stopped == f"stopped by {number.name}: step 5 of 8 is saved; --resume continues from it"
    folder = place / "runs" / "stopped"
    assert kept(folder) == [3, 5]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert train(place, "--name", "stopped", "--resume") == 0
    assert "from step 5" in capfd.readouterr().out
    assert learned(folder) == learned(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_kills_the_process(number):
    code = (
        "import os, signal\n"
        "from flax_models.train.stopping import StopRequest\n"
        "with StopRequest() as stop:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print(stop.signal.name, flush=True)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -number
    assert done.stdout == f"{number.name}\n"


def test_sigterm_before_training_ends_the_run_with_one_line(place, monkeypatch, capsys):
    import flax_models.train.main as program

    monkeypatch.setattr(program, "read_text", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert start(place, "a") == 143
    advice = "the run has not been created yet; run the same command again to start it"
    assert one_line(capsys.readouterr().err) == f"stopped by SIGTERM: {advice}\n"
    assert not (place / "runs" / "a").exists()
    assert signal.getsignal(signal.SIGTERM) == before


def test_resuming_a_finished_run_takes_no_step_and_reports_again_with_moved_texts(copied):
    write_texts(copied / "moved")
    before = read_rows(copied / "runs" / "whole")
    (copied / "runs" / "whole" / "result.json").unlink()
    assert train(copied, "--resume", "--name", "whole", "--data", str(copied / "moved")) == 0
    assert read_rows(copied / "runs" / "whole") == before
    assert (copied / "runs" / "whole" / "result.json").exists()


def test_finished_run_can_be_extended(copied, monkeypatch, capsys):
    folder = copied / "runs" / "whole"
    original, evaluated = Trainer.held_out_loss, []
    monkeypatch.setattr(Trainer, "held_out_loss", lambda *given: evaluated.append(original(*given)) or evaluated[-1])
    before = read_rows(folder)
    again = ["--name", "whole", "--resume"]
    assert train(copied, *again, "--steps", "7") == 1
    assert (
        one_line(capsys.readouterr().err)
        == f"error: --steps must be at least 8, the steps that {folder} has done, got 7\n"
    )
    assert train(copied, *again, "--steps", "10", "--batch-size", "4") == 1
    assert "--batch-size must be 2, as in" in one_line(capsys.readouterr().err)
    assert read_record(folder).config.train.steps == 8

    assert train(copied, *again, "--steps", "10") == 0
    config = read_record(folder).config.train
    rate = float(learning_rate_schedule(config)(8))
    out = capsys.readouterr().out
    assert re.search(r"note +--steps is 10 instead of 8, with which the run was started\n", out)
    assert f"the learning rate follows the schedule of 10 steps: {rate:.3g} at step 9\n" in out
    rows = read_rows(folder)
    assert (config.steps, config.warmup_steps, rows[: len(before)]) == (10, 2, before)
    added = [row for row in rows if "loss" in row][8:]
    assert [row["step"] for row in added] == [9, 10]
    assert added[0]["learning_rate"] == pytest.approx(rate)
    assert rate > 0.1 * config.learning_rate
    assert kept(folder) == [9, 10]
    assert [row["held_out_loss"] for row in rows if "held_out_loss" in row][-1:] == evaluated, "computed once"

    assert train(copied, *again) == 0
    out = capsys.readouterr().out
    assert json.loads((folder / "result.json").read_text())["held_out_loss"] == evaluated[0] == evaluated[1]
    assert "from step 10" in out
    assert "note" not in out


# Before the first checkpoint


def test_run_that_ended_before_its_first_checkpoint_releases_its_name(place, monkeypatch, capsys):
    runs = place / "runs"
    for poison, message in [
        (interrupt, "stopped: there is no checkpoint yet; --resume starts the run from the beginning\n"),
        (diverge, "error: the loss is nan at step 1; there is no checkpoint yet. "),
    ]:
        with monkeypatch.context() as patch:
            before_step(patch, 1, poison)
            start(place, "a")
        captured = capsys.readouterr()
        assert captured.err.startswith(message), captured.err
    moved = rf"moved +an earlier {runs}/a without a checkpoint to {runs}/a.failed\n"
    assert re.search(moved, captured.out), captured.out
    assert {path.name for path in runs.iterdir()} == {"a", "a.failed"}
    assert read_rows(runs / "a")[-1]["loss"] == "nan"
    assert read_rows(runs / "a.failed") == []

    with RunLock(runs / "a"):
        assert start(place, "a") == 1
    assert f"{runs}/a already exists" in one_line(capsys.readouterr().err)
    assert move_failed(runs / "a") == runs / "a.failed-2"
    (runs / "mine").mkdir()
    assert start(place, "mine") == 1
    assert f"{runs}/mine already exists and is not a run" in one_line(capsys.readouterr().err)
    assert {path.name for path in runs.iterdir()} == {"a.failed", "a.failed-2", "mine"}


# Divergence


@pytest.mark.parametrize(
    ("poison", "what"),
    [
        (jnp.nan, "the loss is nan"),
        pytest.param(1e30, "the (loss|gradient norm) is (nan|inf)", marks=pytest.mark.slow),
    ],
)
def test_diverged_run_reports_step_and_batch_and_keeps_its_last_checkpoint(place, monkeypatch, capsys, poison, what):
    before_step(
        monkeypatch, 5, lambda state: state._replace(params=jax.tree.map(lambda leaf: leaf * poison, state.params))
    )
    assert start(place, "a") == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out
    err = one_line(captured.err)
    window = r"tokens [\d,]+ to [\d,]+ \(\d+\.txt, from its token \d+\)"
    assert re.match(rf"error: {what} at step 5; the checkpoint of step 3 is kept. Batch: {window}, {window}\. ", err)
    folder = place / "runs" / "a"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["3"]
    last = read_rows(folder)[-1]
    assert last["step"] == 5
    assert {last["loss"], last["grad_norm"]} & {"nan", "inf"}
    if np.isnan(poison):
        assert last["loss"] == "nan"
    assert (folder / "loss.png").exists()


# Files that are truncated, missing or not writable


def data_file(folder: Path) -> Path:
    """Returns the largest file of a checkpoint, which holds the arrays."""
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "has .* bytes instead of"),
        (lambda path: path.unlink(), "is missing"),
        pytest.param(
            lambda path: path.write_bytes(bytes([*path.read_bytes()[:-1], 7])),
            "its checksum differs",
            id="<lambda>-its checksum is another",  # the name in slow_tests.py
        ),
    ],
)
def test_an_older_checkpoint_replaces_a_damaged_one(whole, copied, capfd, spoil, fault):
    folder = copied / "runs" / "whole"
    spoil(data_file(folder / "checkpoints" / "8"))
    assert train(copied, "--name", "whole", "--resume") == 0
    captured = capfd.readouterr()
    assert re.search(rf"warning .*checkpoints/8: .*{fault}.*; an older checkpoint is used", captured.out)
    assert "from step 6" in captured.out
    assert captured.err == ""
    assert learned(folder) == learned(whole)
    assert kept(folder) == [6, 8]
    assert (folder / "checkpoints" / "8.broken").is_dir()


def test_if_all_checkpoints_are_damaged_each_is_reported_and_kept(copied, capfd):
    folder = copied / "runs" / "whole"
    for step in (6, 8):
        data_file(folder / "checkpoints" / str(step)).write_bytes(b"")
    assert train(copied, "--name", "whole", "--resume") == 1
    err = one_line(capfd.readouterr().err)
    assert re.match(r"error: cannot read the checkpoint .*/8: .*; cannot read the checkpoint .*/6: ", err)
    assert kept(folder) == [6, 8]
    assert len(read_rows(folder)) == 10
    shutil.rmtree(folder / "checkpoints")
    assert train(copied, "--name", "whole", "--resume") == 1
    assert "checkpoints has no checkpoint" in one_line(capfd.readouterr().err)


def raise_io_error(*arguments: object) -> NoReturn:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("manifest", [True, False])
def test_a_checkpoint_that_cannot_be_read_now_is_not_set_aside(manifest, copied, monkeypatch):
    """The second attempt reads the same files, so nothing may be renamed because of the first."""
    folder = copied / "runs" / "whole" / "checkpoints"
    checkpoints, like = Checkpoints(folder, writes=True), small_trainer().initial
    place, name, file = (checkpoint, "_checksum", r"[\w/.-]+: ") if manifest else (checkpoints, "_read", "")
    if not manifest:
        (folder / "8" / MANIFEST).unlink()

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, raise_io_error)
            with pytest.raises(
                RunError, match=rf"^cannot read the checkpoint {folder}/8: {file}\[Errno 5\] [^;]*; nothing was renamed"
            ):
                checkpoints.restore(like)
        assert {path.name for path in folder.iterdir()} == {"6", "8"}
    assert int(checkpoints.restore(like)[0].step) == 8
    checkpoints.close()


def test_only_wrong_content_is_set_aside(copied, monkeypatch):
    """If the files match the manifest, an error of the storage library is no damage, for example too little memory."""
    folder, like = copied / "runs" / "whole" / "checkpoints", small_trainer().initial
    checkpoints = Checkpoints(folder, writes=True)
    original = Checkpoints._read

    def fail(checkpoints: Checkpoints, step: int, like: TrainState):
        if step == 8:
            raise ValueError("no memory")
        return original(checkpoints, step, like)

    monkeypatch.setattr(Checkpoints, "_read", fail)
    with pytest.raises(RunError, match="8: no memory; nothing was renamed"):
        checkpoints.restore(like)
    reader = Checkpoints(folder)
    assert int(reader.restore(like)[0].step) == 6, "a reader that may use an older checkpoint reads it"
    (folder / "8" / MANIFEST).unlink()
    assert int(checkpoints.restore(like)[0].step) == 6
    assert {path.name for path in folder.iterdir()} == {"6", "8.broken"}
    for each in (reader, checkpoints):
        each.close()


def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_taken_as_empty(tmp_path):
    assert steps_in(tmp_path / "absent") == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="Not a directory"):
        steps_in(tmp_path / "file")
    (tmp_path / "file").rename(tmp_path / "checkpoints")
    assert resume_advice(tmp_path) == "its checkpoints cannot be read now (Not a directory); --resume tries again"


def test_a_checkpoint_without_its_manifest_is_still_read(copied, capfd):
    """This is the state after a process is killed between writing the checkpoint and writing its manifest."""
    (copied / "runs" / "whole" / "checkpoints" / "8" / MANIFEST).unlink()
    assert train(copied, "--name", "whole", "--resume") == 0
    assert "from step 8" in capfd.readouterr().out


def test_checkpoint_of_another_model_raises_with_both_shapes(copied):
    checkpoints = Checkpoints(copied / "runs" / "whole" / "checkpoints", writes=True)
    other = Trainer(Decoder(ModelConfig(290, 16, 1, 2, 1, 8, 24, 16), rngs=nnx.Rngs(0)), TrainConfig())
    with pytest.raises(
        RunError,
        match=r"8 does not match the model: .*embedding.* must be float32 \(290, 16\), got float32 \(280, 16\)",
    ):
        checkpoints.restore(other.initial)
    assert kept(copied / "runs" / "whole") == [6, 8]


def test_reading_a_run_changes_nothing_in_it(copied):
    """Another process may be writing, and a temporary folder may become its next checkpoint."""
    folder = copied / "runs" / "whole" / "checkpoints"
    data_file(folder / "8").write_bytes(b"")
    (folder / "9.orbax-checkpoint-tmp").mkdir()
    checkpoints = Checkpoints(folder)
    state, _ = checkpoints.restore(small_trainer().initial)
    checkpoints.close()
    assert (int(state.step), len(checkpoints.skipped)) == (6, 1)
    assert {path.name for path in folder.iterdir()} == {"6", "8", "9.orbax-checkpoint-tmp"}


def test_the_optimizers_arrays_are_read_only_if_needed(copied, monkeypatch):
    folder, trainer = copied / "runs" / "whole" / "checkpoints", small_trainer()
    checkpoints = Checkpoints(folder)
    part, same = checkpoints.restore(trainer.evaluated_part(trainer.initial))
    state, sampler = Checkpoints(folder).restore(trainer.initial)
    assert (part.optimizer, same) == (None, sampler)
    assert type(part.params) is type(state.params)
    jax.tree.map(np.testing.assert_array_equal, (part.params, part.step), (state.params, state.step))
    with pytest.raises(RunError, match=r"does not match the model: .*embedding"):
        checkpoints.restore(part._replace(params=jax.tree.map(lambda leaf: leaf[:1], part.params)))
    checkpoints.close()
    averaging = small_trainer(optimizer="schedule_free_adamw")
    assert averaging.evaluated_part(averaging.initial) is averaging.initial
    original, asked = Checkpoints.restore, []

    def restore(checkpoints: Checkpoints, like: TrainState, **options):
        asked.append(like)
        return original(checkpoints, like, **options)

    monkeypatch.setattr(Checkpoints, "restore", restore)
    assert read_run(copied / "runs" / "whole").step == 8
    assert asked[0].optimizer is None


def test_too_little_disk_space_raises_before_anything_is_written(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, writes=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    message = "cannot write .* of step 1 to .*: it needs [0-9,]+ bytes, and the disk has 1 bytes free; there is no"
    with pytest.raises(RunError, match=message):
        checkpoints.save(1, small_trainer().initial, {})
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Makes the system reject further writes to any file, like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_one_line_and_the_run_can_be_resumed(whole, place, monkeypatch, capfd):
    with contextlib.ExitStack() as limited, monkeypatch.context() as patch:
        before_step(patch, 4, lambda state: limited.enter_context(files_of_at_most(12_000)) and None)
        assert start(place, "full") == 1
    err = one_line(capfd.readouterr().err)
    assert re.match(r"error: cannot write the checkpoint of step 6 to .*; the checkpoint of step 3 is kept$", err)
    folder = place / "runs" / "full"
    assert kept(folder) == [3]
    assert train(place, "--name", "full", "--resume") == 0
    assert "from step 3" in capfd.readouterr().out
    assert learned(folder) == learned(whole)
    assert not list((folder / "checkpoints").glob("*tmp*"))


def test_metrics_on_a_full_disk_raise_with_the_file(tmp_path):
    log = MetricsLog(tmp_path, after=0)

    def write() -> None:
        for step in range(1000):
            log.write(step, loss=1.0)
            log.flush()

    with files_of_at_most(1000):
        with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: File too large; --resume continues"):
            write()
        log.close()
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(len(rows)))


def test_metrics_after_the_checkpoint_and_an_incomplete_line_are_dropped(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path, after=0)
    for step in range(1, 5):
        log.write(step, loss=float(step))
    log.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 5, "lo')
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2, 3, 4]
    log = MetricsLog(tmp_path, after=2)
    log.write(3, loss=float("inf"))
    log.close()
    assert read_rows(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": "inf"}]
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", raise_io_error)
        with pytest.raises(RunError, match=r"cannot read .*metrics.jsonl: Input/output"):
            MetricsLog(tmp_path, after=2)
    assert path.read_text().startswith('{"step": 1}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl, line 2 is not a row of metrics"):
        read_rows(tmp_path)


# kill -9

KILLED = ["--steps=30", "--checkpoint-every=2", "--eval-every=7", "--log-every=3", "--sample-tokens=0"]


class KilledRun:
    """A run in separate processes, which are restarted until the run is finished.

    They are forked from a process that has imported everything and started no threads, which saves seconds per process.
    """

    def __init__(self, place: Path, name: str) -> None:
        self.place, self.name, self.folder = place, name, place / "runs" / name
        self.out, self.err = place / f"{name}.out", place / f"{name}.err"

    def launch(self) -> ForkServerProcess:
        options = ["--runs", str(self.place / "runs"), "--name", self.name]
        if self.folder.exists():
            options.append("--resume")
        else:
            options += ["--data", str(self.place / "data"), *SMALL, *KILLED]
        cache = (jax.config.jax_compilation_cache_dir, str(self.place / "cache"))
        process = get_context("forkserver").Process(target=run_alone, args=(options, *cache, self.out, self.err))
        process.start()
        return process

    def finish(self) -> str:
        """Runs to the end and returns the output."""
        process = self.launch()
        process.join()
        assert (process.exitcode, self.err.read_text()) == (0, "")
        return self.out.read_text()

    def kill_after(self, seconds: float, *, from_first_save: bool) -> bool:
        """Starts or continues the run and kills it after some seconds. Returns whether it was still running."""
        before = set(kept(self.folder))
        process = self.launch()
        while from_first_save and process.is_alive() and not set(kept(self.folder)) - before:
            time.sleep(0.005)
        process.join(seconds)
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), self.err.read_text()
        return process.exitcode != 0


def check_kills(place: Path, kills: int) -> None:
    get_context("forkserver").set_forkserver_preload(["tests.preloaded"])
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")  # shown when the test fails
    moments = random.Random(seed)
    undisturbed = KilledRun(place, "undisturbed")
    began = time.monotonic()
    undisturbed.finish()
    seconds = min(time.monotonic() - began, 8.0)  # the first run compiles
    expected = learned(undisturbed.folder)
    run, number, landed = KilledRun(place, "killed-0"), 0, 0
    while landed < kills:
        # Kills the run alternately at any time, and during training and saving, which is a small part of the run.
        saving = landed % 3 != 0
        landed += run.kill_after(moments.uniform(0, 0.2 if saving else 0.8) * seconds, from_first_save=saving)
        if not run.folder.exists():
            continue
        steps = kept(run.folder)
        last_row = max((row["step"] for row in read_rows(run.folder)), default=0)
        assert last_row - max(steps, default=0) <= 2, "steps before the last checkpoint are lost"
        assert read_rows(run.folder) is not None
        if steps and steps[-1] == 30:
            run.finish()
            assert learned(run.folder) == expected
            number += 1
            run = KilledRun(place, f"killed-{number}")
    begun = run.folder.exists()  # the process may have been killed before the folder existed
    out = run.finish()
    assert learned(run.folder) == expected
    assert bool(re.search(r"continued +from (step \d+|the beginning)", out)) == begun


@pytest.mark.slow
def test_run_killed_at_a_random_time_resumes_with_the_same_results(place):
    check_kills(place, kills=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_killed_twenty_times_resumes_with_the_same_results(place):
    check_kills(place, kills=20)
