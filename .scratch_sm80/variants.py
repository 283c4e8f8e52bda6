"""The variants: kernel, constexprs and options."""

from typing import Any, NamedTuple


class Variant(NamedTuple):
    name: str
    kind: str  # "production", "triton" or "gluon"
    constexprs: dict[str, Any]
    options: dict[str, Any]
    programs: int = 0
    only: tuple[str, ...] = ()


def production(bn=128, bv=128, bd=32, stages=4, warps=4, programs=264, group=16, only=()):
    c = dict(STORES=True, STATISTICS=False, W_BY_CLASS=True, HAS_BIAS=False, HAS_SOFTCAP=False, PRECISION="ieee",
             BLOCK_N=bn, BLOCK_V=bv, BLOCK_D=bd, GROUP=group)  # fmt: skip
    return Variant(f"production {bn}x{bv}x{bd} s{stages} w{warps}", "production", c,
                   dict(num_warps=warps, num_stages=stages), programs, only)  # fmt: skip


def triton(bn, bv, bd, stages, warps, group=16, only=()):
    c = dict(BLOCK_N=bn, BLOCK_V=bv, BLOCK_D=bd, GROUP=group, EVEN_D=True)
    return Variant(f"triton {bn}x{bv}x{bd} s{stages} w{warps} g{group}", "triton", c,
                   dict(num_warps=warps, num_stages=stages), only=only)  # fmt: skip


def gluon(bn, bv, bd, stages, wn, wv, group=16, branch=True, only=()):
    c = dict(BLOCK_N=bn, BLOCK_V=bv, BLOCK_D=bd, GROUP=group, EVEN_D=True, STAGES=stages, WARPS_N=wn, WARPS_V=wv,
             BRANCH=branch)  # fmt: skip
    return Variant(f"gluon {bn}x{bv}x{bd} S{stages} w{wn}x{wv} g{group}{'' if branch else ' no branch'}", "gluon", c,
                   dict(num_warps=wn * wv), only=only)  # fmt: skip


def ampere(bd, stages, group=16, only=()):
    """core_triton/ampere_logits.py: as gluon 128x128 w2x2, with all options and an epilogue in quarters."""
    c = dict(STORES=True, STATISTICS=False, W_BY_CLASS=True, HAS_BIAS=False, HAS_SOFTCAP=False, BLOCK_N=128,
             BLOCK_V=128, BLOCK_D=bd, GROUP=group, STAGES=stages)  # fmt: skip
    return Variant(f"ampere 128x128x{bd} S{stages} g{group}", "ampere", c, dict(num_warps=4), only=only)


LLAMA = ("llama",)
VARIANTS = [
    production(),
    ampere(64, 2),
    ampere(32, 4),
    ampere(32, 5),
    gluon(256, 128, 64, 3, 4, 2),
    gluon(256, 128, 32, 6, 4, 2),
    gluon(128, 256, 64, 3, 2, 4),
    gluon(128, 128, 64, 2, 2, 2),
    triton(128, 128, 64, 3, 4),
    triton(128, 128, 32, 5, 4),
    triton(256, 128, 64, 3, 8),
    ampere(64, 2, group=4, only=LLAMA),
    ampere(64, 2, group=8, only=LLAMA),
    gluon(256, 128, 64, 3, 4, 2, group=4, only=LLAMA),
]
