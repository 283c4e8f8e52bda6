"""Compiles every variant for sm_80, and for Hopper with arch sm80, on a CPU: registers, spills, shared memory, loop."""
import collections, sys
sys.path[:0] = ["tests", ".scratch_sm80"]
import kernels as K
from launch_recorder import compile_kernel, dump
from sass import innermost_loop
from variants import VARIANTS
from core_triton import ampere_logits
from core_triton.kernels import exponentials_kernel
INTS = ("x_stride", "w_stride", "e_stride", "first_class", "rows", "hidden", "classes")
FLOATS = ("scale", "softcap")
TYPES = {"target_ptr": "*i64", "flag_ptr": "*i32"} | {n: "i32" for n in INTS} | {n: "fp32" for n in FLOATS}
TYPES |= {f"{n}_matrix": "*bf16" for n in "xwe"}
def comp(variant, target=80):
    kernel = {"production": exponentials_kernel, "ampere": ampere_logits.exponentials_kernel, "triton": K.tile_kernel, "gluon": K.gluon_kernel}[variant.kind]
    c = dict(variant.constexprs)
    if variant.kind in ("production", "ampere"):
        c |= {"bias_ptr": None, "max_ptr": None}
    sig = {n: "constexpr" if n in c else TYPES.get(n, "*fp32") for n in kernel.arg_names}
    special = variant.kind in ("triton", "gluon")
    div = tuple(n for n, k in sig.items() if k.startswith("*") or (special and n in INTS and n != "first_class"))
    options = {**variant.options, **({"arch": "sm80"} if target == 90 else {})}
    return compile_kernel(kernel, sig, c, target, div, **options)
def report(name, c, save=None):
    s = dump(c.cubin, "-sass")
    if save: open(save, "w").write(s)
    loop = innermost_loop(s, "LDGSTS")
    n = collections.Counter(i.opcode.partition(".")[0] for i in loop)
    waits = [i.operands for i in loop if i.opcode.startswith("DEPBAR")]
    print(f"{name:42s} regs {c.registers} stack {c.stack:3d} smem {c.shared:6d} loop {len(loop)}: HMMA {n['HMMA']} LDSM {n['LDSM']} LDGSTS {n['LDGSTS']} PRMT {n['PRMT']} BAR {n['BAR']} LDL {n['LDL']} waits {waits} total {s.count(';')}", flush=True)
if __name__ == "__main__":
    for target in (80, 90):
        for v in VARIANTS:
            report(f"{target} {v.name}", comp(v, target), f"/tmp/s80/{v.name.replace(' ','_')}_{target}.sass")
