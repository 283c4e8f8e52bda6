"""Cases that hypothesis draws, with shapes, dtypes and options beyond the table of parity/cases.py."""

from typing import Any

from hypothesis import strategies as st

from linear_ce.spec import FLOAT_DTYPES, LossSpec
from parity.cases import Case
from parity.token_losses import FORMS

# These errors are always allowed, because the unfused gradient of one or two elements can be exact by chance.
FEW_ELEMENTS = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}
LEADS = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Draws a call: its shape, dtypes and options."""
    function = draw(st.sampled_from(("loss", "loss", "log_probs", "token_loss")))
    dtype = draw(st.sampled_from(FLOAT_DTYPES))
    vocab = draw(st.integers(1, 300))
    options: dict[str, Any] = {
        "softcap": draw(st.sampled_from((None, 3.0, 30.0))),
        "logit_scale": draw(st.sampled_from((1.0, 0.3, -2.0))),
        "vocab_size": draw(st.none() | st.integers(1, vocab)),
    }
    arrays: dict[str, Any] = {"upstream": "random"}
    reduction = "none"
    if function == "loss":
        options["label_smoothing"] = draw(st.sampled_from((0.0, 0.1, 1.0)))
        options["z_loss_weight"] = draw(st.sampled_from((0.0, 0.01)))
        arrays["has_class_weight"] = draw(st.booleans())
    if function == "token_loss":
        arrays["token_loss"] = draw(st.sampled_from(tuple(FORMS)))
        arrays["per_token_dtype"] = draw(st.sampled_from(("float32", dtype)))
    if function != "log_probs":
        reduction = draw(st.sampled_from(("mean", "sum", "none")))
        arrays["token_weight"] = draw(st.sampled_from(("", "mask", "signed")))
        arrays["normalizer"] = draw(st.none() | st.just(17.5)) if reduction == "mean" else None
    scale = {"mean": 1024.0, "sum": 8.0, "none": 8.0}[reduction]
    return Case(
        name=f"drawn-{draw(st.integers(0, 999))}",
        function=function,
        lead=draw(LEADS),
        hidden=draw(st.integers(1, 48)),
        vocab=vocab,
        dtype=dtype,
        head_dtype=draw(st.sampled_from(("", "float32"))),
        spec=LossSpec(reduction, **options),
        has_bias=draw(st.booleans()),
        target=draw(st.sampled_from(("uniform", "skewed"))),
        target_dtype=draw(st.sampled_from(("int64", "int32", "int16"))),
        ignored=draw(st.sampled_from(("", "some"))),
        vocab_axis=draw(st.sampled_from((0, 1))),
        tight_memory=True,  # allows d_weight the rounding errors of several chunks
        loss_scale=scale if dtype == "float16" else 1.0,
        **arrays,
    )
