"""Writes docs/hosts-transformers.md: every causal language model of the installed transformers, patched and run.

`python tests/hosts_report.py` (a minute). Each class gets a small random model. It is supported if one step of
the patched model has the loss and the gradients of the unpatched model, in float32 with relative differences of at most
`TOLERANCE`.
"""

import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from host_models import architectures, difference, fused_options, inputs_of, make, patch, step, unpatch
from hub_models import import_transformers

PAGE = Path(__file__).parent.parent / "docs" / "hosts-transformers.md"
TOLERANCE = 1e-5
# Classes whose small model does not run here, for a reason that has nothing to do with the patch.
NOT_RUN = {"Gemma3nForConditionalGeneration": "needs the package timm"}
HEAD = """# Models of transformers that the patch supports

`python tests/hosts_report.py` writes this page. It runs one training step of a small random model of every class in the
mapping of causal language models of transformers {version}, patched and not patched ([hosts](hosts.md)). "Supported"
means that the loss and all gradients are equal, in float32 with relative differences of at most {tolerance:g}. The
third column has the options of `linear_cross_entropy` that the model's factor, soft cap or slice of its logits gave, in
the small model. {supported} of {total} classes are supported.

| class | result | options |
|---|---|---|
"""


def row(name: str) -> str:
    """Returns a class's line of the table."""
    if name in NOT_RUN:
        return f"| {name} | not run: {NOT_RUN[name]} | |"
    model_class = getattr(import_transformers(), name)
    try:
        patch(model_class)
    except ValueError as error:
        return f"| {name} | refused: {reason(name, error)} | |"
    unpatch(model_class)
    model = make(name)
    inputs = inputs_of(name, model)
    expected = step(model, inputs)
    try:
        patch(model)
        found = step(model, inputs)
    except (ValueError, RuntimeError) as error:
        return f"| {name} | refused: {reason(name, error)} | |"
    assert (different := difference(found, expected)) <= TOLERANCE, f"{name}: {different}"
    options: dict[str, Any] = {}
    for call in fused_options(model, inputs):
        options |= call
    names = [option for option in ("logit_scale", "softcap", "vocab_size") if options[option] not in (None, 1.0)]
    return f"| {name} | supported | {', '.join(f'`{option}`' for option in names)} |".replace("|  |", "| |")


def reason(name: str, error: Exception) -> str:
    """Returns the message of an error without the name of the class and what is the same in all messages."""
    text = str(error).removeprefix(f"{name} is not supported").removeprefix(" by core_triton").removeprefix(": ")
    return text.split(". Supported are")[0]


def page() -> str:
    rows = [row(name) for name in architectures()]
    supported = sum("| supported |" in line for line in rows)
    head = HEAD.format(version=version("transformers"), tolerance=TOLERANCE, supported=supported, total=len(rows))
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(f"hosts_report.py takes no arguments, got {' '.join(sys.argv[1:])}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PAGE.write_text(page(), encoding="utf-8")
