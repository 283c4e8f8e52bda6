"""How the benchmark times: order, warm-up and energy, with calls that only note that they ran."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import timing
from benchmarks.timing import Energy, EnergyLog, Pairs, Sensor, Timing, host_pairs, keep_busy, measure_energy


class Meter(Sensor):
    """An energy counter of a GPU that takes `watts`, which changes every `step` seconds."""

    def __init__(self, watts: float, step: float) -> None:
        super().__init__(gpu=False)
        self.why_no_energy = None
        self._energy = lambda: watts * step * (time.perf_counter() // step)


def noting(log: list[str]) -> list[Callable[[], Any]]:
    return [lambda name=name: log.append(name) for name in ("floor", "method", "forward")]


def test_every_second_pair_runs_in_the_opposite_order() -> None:
    log: list[str] = []
    pairs = host_pairs(noting(log), lambda _: None, Timing(0, 0, 0), Sensor(gpu=False), 0.0)
    timed = log[-3 * timing.MIN_PAIRS :]
    assert timed[:6] == ["floor", "method", "forward", "forward", "method", "floor"]
    assert timed[:6] * (timing.MIN_PAIRS // 2) == timed
    assert len(pairs.floor) == len(pairs.method) == len(pairs.forward) == timing.MIN_PAIRS >= 20
    assert pairs.figures()["forward_ms"] >= 0
    without = host_pairs(noting(log)[:2], lambda _: None, Timing(0, 0, 0, min_pairs=2), Sensor(gpu=False), 0.0)
    assert len(without.floor) == 2
    assert without.figures()["forward_ms"] is None


def test_the_device_is_warm_before_the_first_pair() -> None:
    log: list[str] = []
    start = time.perf_counter()
    host_pairs(noting(log)[:2], lambda _: None, Timing(0, warmup=0.1, energy_seconds=0), Sensor(gpu=False), 0.0)
    assert time.perf_counter() - start > 0.1
    assert keep_busy(noting(log), 0, timing.same, timing.same) == 0


def test_the_host_is_one_round_ahead_of_the_device() -> None:
    log: list[int] = []

    def run() -> int:
        log.append(len(log) + 1)
        time.sleep(0.002)
        return len(log)

    waited: list[int] = []
    rounds = keep_busy([run], 0.02, timing.same, lambda number: waited.append((number, len(log))[0]))
    assert waited == list(range(1, rounds + 1))


@pytest.mark.parametrize("step", [0.02, 0.1])
def test_joules_do_not_depend_on_how_coarse_the_counter_is(step: float) -> None:
    energy = measure_energy(lambda: time.sleep(0.01), 0.6, timing.same, timing.same, Meter(700, step))
    assert energy.note is None
    assert energy.joules is not None
    assert 0.95 * 7 < energy.joules < 2 * 7  # 10 ms at 700 W; a busy machine oversleeps


def test_energy_that_cannot_be_measured_says_why() -> None:
    def measured(seconds: float, sensor: Sensor) -> Energy:
        return measure_energy(lambda: time.sleep(0.01), seconds, timing.same, timing.same, sensor)

    assert measured(1, Sensor(gpu=False)) == Energy(None, "no GPU is measured")
    assert "shorter than 0.2 s" in str(measured(0, Meter(700, 0.02)).note)
    assert "hardly changed" in str(measured(0.25, Meter(700, 10.0)).note)
    figures = Pairs([1.0], [1.0], [], energy=Energy(2.5)).figures()
    assert (figures["joules"], figures["joules_note"]) == (2.5, None)
    with EnergyLog(Meter(700, 10.0)) as log:
        pass
    assert log.power() is None


def test_without_a_driver_the_sensor_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(timing.ctypes, "CDLL", missing)
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)
    sensor = Sensor(gpu=True)
    assert sensor.read() == []
    assert "libnvidia-ml.so.1: no such file; there is no nvidia-smi" in str(sensor.why_not)
    assert "libnvidia-ml" in str(sensor.why_no_energy)
