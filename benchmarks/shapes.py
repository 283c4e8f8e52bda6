"""What is measured: the named shapes, the modes, and the plan that orders them by importance."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

TARGETS = ("peaked", "random", "sharp", "sharp3.5", "sharp8")
OBJECTIVES = ("cross-entropy", "log-probs", "token-loss")


@dataclass(frozen=True)
class Shape:
    """N tokens, hidden size D, V classes."""

    name: str
    n: int
    d: int
    v: int

    def of_row(self) -> dict[str, str | int]:
        """Returns how a row of results names the shape."""
        return {"shape": self.name, "n": self.n, "d": self.d, "v": self.v}


@dataclass(frozen=True)
class Objective:
    """What a method computes of a token's logits.

    Args:
        name: one of `OBJECTIVES`. "log-probs" is the log-probability of the target. "token-loss" is the GRPO loss of
            that log-probability, with the parameters in `data.py`.
        temperature: divides the logits.
        label_smoothing: of the cross-entropy.
    """

    name: str = "cross-entropy"
    temperature: float = 1.0
    label_smoothing: float = 0.0

    @property
    def logit_scale(self) -> float:
        return 1 / self.temperature

    @property
    def per_token(self) -> tuple[str, ...]:
        """The arrays (N,) that the objective takes besides the logits and the targets, in order."""
        return ("advantage", "old_log_prob", "ref_log_prob") if self.name == "token-loss" else ()


@dataclass(frozen=True)
class Mode:
    """What a method computes, and what is measured.

    Args:
        name: as in the results.
        reduction: "mean", or "none" under a random upstream gradient.
        objective: what is reduced.
        d_input: computes the gradient of the input.
        d_weight: computes the gradient of the weight. Without both, only the forward pass runs.
        memory_budget: bytes, for the methods that take one; only those are measured where it is given.
        saved_budget: bytes that the methods that take it may keep for the backward pass.
        float32_head: the weight is float32, under an input of fewer bits, and all of its bits count.
        ignored: share of the targets that are ignore_index.
        measures: "pairs": time and the ratio to the floor. "graph": the same, both captured in CUDA graphs. "host": the
            host time of a call. "host-chunks": the host time of each further chunk. "host-compile": the host time
            inside torch.compile.
    """

    name: str
    reduction: str = "mean"
    objective: Objective = Objective()
    d_input: bool = True
    d_weight: bool = True
    memory_budget: int | None = None
    saved_budget: int = 0
    float32_head: bool = False
    ignored: float = 0.0
    measures: Literal["pairs", "graph", "host", "host-chunks", "host-compile"] = "pairs"

    @property
    def backward(self) -> bool:
        return self.d_input or self.d_weight

    @property
    def matmuls(self) -> int:
        """Matmuls of the floor: the logits, and one for each gradient."""
        return 1 + self.d_input + self.d_weight


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama3-8b", 8192, 4096, 128256),
        Shape("qwen2.5-0.5b", 8192, 896, 151936),
        Shape("gemma2-2b", 8192, 2304, 256000),
        Shape("seed", 16384, 4096, 128256),
        Shape("long", 65536, 4096, 128256),
        # The sweeps of the pictures; llama3-8b, seed and long lie on them too.
        Shape("n2048", 2048, 4096, 128256),
        Shape("n4096", 4096, 4096, 128256),
        Shape("n32768", 32768, 4096, 128256),
        Shape("v16384", 8192, 4096, 16384),
        Shape("v32000", 8192, 4096, 32000),
        Shape("v64000", 8192, 4096, 64000),
        Shape("v256000", 8192, 4096, 256000),
        # Small calls, which may take the host longer than the device.
        Shape("h-4096-512-8192", 4096, 512, 8192),
        Shape("h-1024-768-50257", 1024, 768, 50257),
        Shape("h-2048-2048-32000", 2048, 2048, 32000),
        Shape("smoke", 96, 64, 1000),  # for the tests of the harness, on a CPU
    )
}

MODES = {
    mode.name: mode
    for mode in (
        Mode("train"),
        Mode("roomy", memory_budget=2 * 2**30),
        Mode("tight", memory_budget=256 * 2**20),
        Mode("lean", memory_budget=128 * 2**20),
        Mode("none", reduction="none"),
        Mode("eval", d_input=False, d_weight=False),
        Mode("frozen-weight", d_weight=False),
        Mode("frozen-input", d_input=False),
        Mode("half-ignored", ignored=0.5),
    )
}

# The modes below are not of the whole plan: they are measured only where they are named.
TEMPERATURE = 0.7  # of the log-probabilities
LOG_PROBS, TOKEN_LOSS = Objective("log-probs", TEMPERATURE), Objective("token-loss", TEMPERATURE)
LEAST_OF_OTHERS = 200 * 2**20  # bytes: less than any other library takes
ALL_ROWS = 2**40  # bytes: more than the rows of any shape
OBJECTIVE_MODES = {
    mode.name: mode
    for mode in (
        Mode("token-loss", objective=TOKEN_LOSS),
        Mode("token-loss-200", objective=TOKEN_LOSS, memory_budget=LEAST_OF_OTHERS),
        Mode("log-probs", reduction="none", objective=LOG_PROBS),
        Mode("log-probs-200", reduction="none", objective=LOG_PROBS, memory_budget=LEAST_OF_OTHERS),
        Mode("log-probs-saved", reduction="none", objective=LOG_PROBS, saved_budget=ALL_ROWS),
        Mode("smoothing", objective=Objective(label_smoothing=0.1)),
        Mode("float32-head", float32_head=True),
    )
}
CALL_MODES = {
    mode.name: mode
    for mode in (
        Mode("host", measures="host"),
        Mode("host-eval", d_input=False, d_weight=False, measures="host"),
        Mode("host-chunks", measures="host-chunks"),
        Mode("host-compile", measures="host-compile"),
        Mode("graph", measures="graph"),
        Mode("graph-eval", d_input=False, d_weight=False, measures="graph"),
    )
}
ALL_MODES = MODES | OBJECTIVE_MODES | CALL_MODES


@dataclass(frozen=True)
class Head:
    """The output layer of a published model.

    Args:
        name: of its shape of GRID_N tokens.
        d: hidden size.
        v: rows of the weight in the published configuration, which may or may not be padded.
        model: its name on the Hugging Face Hub; other models have the same sizes.
        sweep: it is also measured at SWEEP_N tokens.
    """

    name: str
    d: int
    v: int
    model: str
    sweep: bool = False

    def shape(self, n: int) -> Shape:
        """Returns the shape of `n` tokens: that of SHAPES with these sizes, if there is one."""
        name = self.name if n == GRID_N else f"{self.name}-n{n}"
        sizes = (n, self.d, self.v)
        return next((shape for shape in SHAPES.values() if sizes == (shape.n, shape.d, shape.v)), Shape(name, *sizes))


# Heads that people train, most important first. No two have the same sizes.
HEADS = (
    Head("llama3-8b", 4096, 128256, "meta-llama/Meta-Llama-3-8B", sweep=True),
    Head("qwen2.5-0.5b", 896, 151936, "Qwen/Qwen2.5-0.5B", sweep=True),
    Head("gemma2-2b", 2304, 256000, "google/gemma-2-2b", sweep=True),
    Head("gpt2", 768, 50257, "openai-community/gpt2", sweep=True),
    Head("gpt-oss-20b", 2880, 201088, "openai/gpt-oss-20b", sweep=True),
    Head("tinyllama-1.1b", 2048, 32000, "TinyLlama/TinyLlama-1.1B-Chat-v1.0", sweep=True),
    Head("gemma3-1b", 1152, 262144, "google/gemma-3-1b-pt"),
    Head("deepseek-v3", 7168, 129280, "deepseek-ai/DeepSeek-V3"),
    Head("llama4-scout", 5120, 202048, "meta-llama/Llama-4-Scout-17B-16E"),
    Head("olmo3-7b", 4096, 100278, "allenai/Olmo-3-1025-7B"),
    Head("qwen3-8b", 4096, 151936, "Qwen/Qwen3-8B"),
    Head("llama3.2-1b", 2048, 128256, "meta-llama/Llama-3.2-1B"),
    Head("smollm2-135m", 576, 49152, "HuggingFaceTB/SmolLM2-135M"),
    Head("qwen3-0.6b", 1024, 151936, "Qwen/Qwen3-0.6B"),
    Head("gemma3-4b", 2560, 262208, "google/gemma-3-4b-pt"),
    Head("qwen3.5-4b", 2560, 248320, "Qwen/Qwen3.5-4B"),
    Head("phi4", 5120, 100352, "microsoft/phi-4"),
    Head("minicpm-2b", 2304, 122753, "openbmb/MiniCPM-2B-sft-bf16"),
    Head("granite3-8b", 4096, 49155, "ibm-granite/granite-3.1-8b-base"),
    Head("llama2-7b", 4096, 32000, "meta-llama/Llama-2-7b-hf"),
    Head("llama3-70b", 8192, 128256, "meta-llama/Meta-Llama-3-70B"),
    Head("qwen1.5-1.8b", 2048, 151936, "Qwen/Qwen1.5-1.8B"),
    Head("gemma-2b", 2048, 256000, "google/gemma-2b"),
    Head("gemma4-e2b", 1536, 262144, "google/gemma-4-E2B-it"),
    Head("mistral-7b-v0.3", 4096, 32768, "mistralai/Mistral-7B-v0.3"),
    Head("phi3-mini", 3072, 32064, "microsoft/Phi-3-mini-4k-instruct"),
    Head("olmo2-7b", 4096, 100352, "allenai/OLMo-2-1124-7B"),
    Head("glm4-9b", 4096, 151552, "THUDM/glm-4-9b"),
    Head("glm5", 6144, 154880, "zai-org/GLM-5"),
    Head("falcon-7b", 4544, 65024, "tiiuae/falcon-7b"),
    Head("yi-6b", 4096, 64000, "01-ai/Yi-6B"),
    Head("internlm2-7b", 4096, 92544, "internlm/internlm2-7b"),
    Head("phi4-mini", 3072, 200064, "microsoft/Phi-4-mini-instruct"),
    Head("mistral-nemo", 5120, 131072, "mistralai/Mistral-Nemo-Base-2407"),
    Head("qwen2.5-1.5b", 1536, 151936, "Qwen/Qwen2.5-1.5B"),
    Head("qwen2.5-7b", 3584, 152064, "Qwen/Qwen2.5-7B"),
    Head("qwen3-14b", 5120, 151936, "Qwen/Qwen3-14B"),
    Head("gemma2-9b", 3584, 256000, "google/gemma-2-9b"),
    Head("gemma4-31b", 5376, 262144, "google/gemma-4-31B-it"),
    Head("gpt2-xl", 1600, 50257, "openai-community/gpt2-xl"),
    Head("llama2-13b", 5120, 32000, "meta-llama/Llama-2-13b-hf"),
    Head("smollm2-1.7b", 2048, 49152, "HuggingFaceTB/SmolLM2-1.7B"),
    Head("granite4.1-3b", 2560, 100352, "ibm-granite/granite-4.1-3b"),
    Head("minicpm3-4b", 2560, 73448, "openbmb/MiniCPM3-4B"),
    Head("falcon3-7b", 3072, 131072, "tiiuae/Falcon3-7B-Base"),
)
GRID = "grid"  # names all of the following in the place of shapes
GRID_MODES = ("train", "tight")
GRID_N, SMALL_N = 8192, 2048  # of every head
SWEEP_N = (4096, 16384, 1024, 256, 65536, 512, 32768)
FIRST_HEADS, FIRST_N = 32, 5  # all families are among the first 32 heads, and N from 256 to 65,536 among the first five
_SWEPT = [(head, n) for n, head in product(SWEEP_N, HEADS) if head.sweep]
_FIRST = [(head, n) for n, head in product((GRID_N, SMALL_N), HEADS[:FIRST_HEADS])]
_FIRST += [(head, n) for head, n in _SWEPT if n in SWEEP_N[:FIRST_N]]
_LATER = [(head, n) for n, head in product((GRID_N, SMALL_N), HEADS[FIRST_HEADS:])]
_LATER += [(head, n) for head, n in _SWEPT if n not in SWEEP_N[:FIRST_N]]
_GRID = (*_FIRST, *_LATER)
_OF_HEADS = {shape.name: shape for shape in (head.shape(n) for head, n in _GRID)}

NAMED = ("llama3-8b", "qwen2.5-0.5b", "gemma2-2b", "seed", "long")
OBJECTIVE_SHAPES = ("llama3-8b", "qwen2.5-0.5b", "gemma2-2b", "qwen3-8b")
HOST_SHAPES = ("h-4096-512-8192", "h-1024-768-50257", "h-2048-2048-32000", "qwen2.5-0.5b")
GRAPH_SHAPES = tuple(
    f"{n}-{d}-{v}" for d, v in ((4096, 128256), (896, 151936), (1024, 32000)) for n in (128, 256, 512, 1024)
)
# Of the modes that do not have NAMED.
DEFAULT_SHAPES = {
    **dict.fromkeys(OBJECTIVE_MODES, OBJECTIVE_SHAPES),
    "host": HOST_SHAPES,
    "host-eval": HOST_SHAPES,
    "host-chunks": ("h-2048-2048-32000",),
    "host-compile": HOST_SHAPES[:3],
    "graph": GRAPH_SHAPES,
    "graph-eval": GRAPH_SHAPES,
}
SWEEPS = ("n2048", "n4096", "n32768", "v16384", "v32000", "v64000", "v256000")


def shape_named(name: str) -> Shape | None:
    """Returns a shape by its name in `SHAPES` or the grid, or by its sizes N-D-V; None for any other name.

    Example:
        >>> shape_named("512-1024-32000").v
        32000
    """
    if re.fullmatch(r"[1-9]\d*-[1-9]\d*-[1-9]\d*", name):
        n, d, v = (int(size) for size in name.split("-"))
        return Shape(name, n, d, v)
    return SHAPES.get(name) or _OF_HEADS.get(name)


Item = tuple[Shape, Mode, str]  # the last one is the kind of targets

PLAN: tuple[tuple[str, str, str], ...] = (
    *((shape, "train", "peaked") for shape in NAMED),
    ("llama3-8b", "roomy", "peaked"),
    ("seed", "roomy", "peaked"),
    ("llama3-8b", "lean", "peaked"),
    ("llama3-8b", "none", "peaked"),
    ("llama3-8b", "eval", "peaked"),
    ("qwen2.5-0.5b", "eval", "peaked"),
    ("llama3-8b", "frozen-weight", "peaked"),
    ("llama3-8b", "frozen-input", "peaked"),
    ("llama3-8b", "half-ignored", "peaked"),
    *((shape, "train", "random") for shape in NAMED[:3]),
    *product(NAMED[:2], ("train",), ("sharp3.5", "sharp8")),
    *((shape, "train", "peaked") for shape in SWEEPS),
)


def plan(
    shapes: Sequence[str] | None = None, modes: Sequence[str] | None = None, targets: Sequence[str] | None = None
) -> list[Item]:
    """Returns what to measure, in order.

    Args:
        shapes: names that `shape_named` takes, or "grid" alone. With all three None it is `PLAN`; otherwise the product
            of what is given, where shapes default to `NAMED` or the mode's own, modes to train (in the grid to
            `GRID_MODES`) and targets to peaked.
        modes: names of `ALL_MODES`.
        targets: names of `TARGETS`.

    Raises:
        ValueError: an unknown name, or shapes beside the grid.

    Example:
        >>> [(shape.name, mode.name, targets) for shape, mode, targets in plan(["seed"], ["roomy"])]
        [('seed', 'roomy', 'peaked')]
    """
    grid = shapes is not None and list(shapes) == [GRID]
    if shapes is not None and GRID in shapes and not grid:
        raise ValueError(f"shapes must be {GRID} alone or other names, got {', '.join(shapes)}")
    for name, given, allowed in (
        ("shapes", None if grid else shapes, SHAPES),
        ("modes", modes, ALL_MODES),
        ("targets", targets, TARGETS),
    ):
        unknown = [
            value for value in given or () if value not in allowed and not (allowed is SHAPES and shape_named(value))
        ]
        if unknown:
            raise ValueError(f"{name} must be among {', '.join(allowed)}, got {', '.join(unknown)}")
    if grid:
        names = _grid(modes or GRID_MODES, targets or ("peaked",))
    elif shapes is modes is targets is None:
        names = list(PLAN)
    else:
        names = [
            (shape, mode, kind)
            for mode, kind in product(modes or ("train",), targets or ("peaked",))
            for shape in shapes or DEFAULT_SHAPES.get(mode, NAMED)
        ]
        # All modes of a shape together: its arrays are drawn once.
        order = {shape: index for index, (shape, _, _) in reversed([*enumerate(names)])}
        names.sort(key=lambda item: order[item[0]])
        names.sort(key=lambda item: PLAN.index(item) if item in PLAN else len(PLAN))
    found = [(shape_named(shape), ALL_MODES[mode], kind) for shape, mode, kind in names]
    return [(shape, mode, kind) for shape, mode, kind in found if shape is not None]


def _grid(modes: Sequence[str], targets: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns the plan of the grid. All modes of a shape come together: its arrays are drawn once."""
    return [(head.shape(n).name, mode, kind) for (head, n), kind, mode in product(_GRID, targets, modes)]
