"""The process of one checkout in `benchmarks.compare`: answers questions, a line of JSON each.

    PYTHONPATH=FOLDER python -P .../benchmarks/compare_child.py FRAMEWORK DEVICE

The package comes from FOLDER, which is also the working folder. The module `benchmarks` is always the one of this
file, even if FOLDER has a module of that name.
"""

import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("core_triton", "jax_pallas", "linear_ce", "parity")


def load_benchmarks() -> None:
    """Makes `import benchmarks` mean the folder of this file.

    Raises:
        ImportError: it cannot be loaded.
    """
    spec = importlib.util.spec_from_file_location(
        "benchmarks", HERE / "__init__.py", submodule_search_locations=[str(HERE)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{HERE} holds no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)


def check_origin(folder: Path) -> None:
    """Raises ImportError if a package that is compared was imported from outside of `folder`."""
    for name in PACKAGES:
        module = sys.modules.get(name)
        origin = getattr(module, "__file__", None)
        if origin is not None and not Path(origin).resolve().is_relative_to(folder.resolve()):
            raise ImportError(f"{name} must come from {folder}, got {origin}")


def public_function(framework: str) -> Callable[..., Any]:
    """Returns the checkout's `linear_cross_entropy`."""
    if framework == "torch":
        return importlib.import_module("core_triton").linear_cross_entropy
    return importlib.import_module("jax_pallas.linear_ce").linear_cross_entropy


class Answers:
    """The requests that the process answers.

    Args:
        framework: torch or jax.
        device: cuda or cpu.
    """

    def __init__(self, framework: str, device: str) -> None:
        from benchmarks.linear_ce import open_bench
        from benchmarks.timing import Sensor

        self._function = public_function(framework)
        self._bench = open_bench(framework, device)
        check_origin(Path.cwd())
        self._sensor = Sensor(gpu=device == "cuda")
        self._problem, self._made_for, self._run = None, None, None
        self._methods: dict[str | None, Any] = {}  # one each, so that JAX's compiled programs are found again

    def about(self) -> dict[str, Any]:
        bench = self._bench
        return {"device": bench.device, "versions": bench.versions(), "no_energy": self._sensor.why_no_energy}

    def prepare(
        self, shape: list[Any], dtype: str, targets: str, mode: str, implementation: str | None
    ) -> dict[str, Any]:
        """Compiles the call and returns its errors, its bytes and a digest of its results."""
        from benchmarks.methods import Method
        from benchmarks.shapes import MODES, Shape

        def build(mode: Any) -> Callable[..., Any]:
            def loss(x: Any, w: Any, y: Any) -> Any:
                return self._function(
                    x,
                    w,
                    y,
                    reduction=mode.reduction,
                    memory_budget=mode.memory_budget,
                    implementation=implementation,
                )

            return loss

        self._run = None
        made_for = (*shape, dtype, targets)
        if self._made_for != made_for or self._problem is None:
            self.release()
            self._problem, self._made_for = self._bench.problem(Shape(*shape), dtype, targets), made_for
        if implementation not in self._methods:
            self._methods[implementation] = Method("checkout", "ours", build, takes_budget=True)
        prepared = self._problem.prepare(self._methods[implementation], MODES[mode])
        self._run = prepared.run
        digest = self._bench.digest(self._run())
        self._problem.forget()
        self._bench.release()
        return {"figures": prepared.figures, "digest": digest}

    def block(self, calls: int) -> dict[str, Any]:
        assert self._run is not None
        return {"ms": self._bench.time_block(self._run, calls)}

    def energy(self, seconds: float) -> dict[str, Any]:
        assert self._run is not None
        energy = self._bench.energy(self._run, seconds, self._sensor)
        return {"joules": energy.joules, "note": energy.note}

    def release(self) -> dict[str, Any]:
        self._problem, self._made_for, self._run = None, None, None
        self._bench.release()
        return {}


def main(framework: str, device: str) -> None:
    """Answers requests until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr

    def reply(make: Callable[[], dict[str, Any]]) -> bool:
        try:
            answer = make()
        except Exception as error:  # a checkout may fail in any way, and the other process must learn how
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()
        return "error" not in answer

    answers: Answers | None = None

    def begin() -> dict[str, Any]:
        nonlocal answers
        load_benchmarks()
        answers = Answers(framework, device)
        return answers.about()

    if not reply(begin):
        return
    for line in sys.stdin:
        question = json.loads(line)
        reply(lambda question=question: getattr(answers, question.pop("do"))(**question))


if __name__ == "__main__":
    main(*sys.argv[1:])
