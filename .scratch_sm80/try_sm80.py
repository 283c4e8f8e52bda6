"""Times variants of the exponentials kernel for compute capability 8.x on a Hopper GPU, beside cuBLAS's sm_80 kernels.

    PYTHONPATH=. python3 .scratch_sm80/try_sm80.py [--seconds 90]

Throw-away code. An error that breaks the CUDA context restarts the process at the next variant.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import kernels as K  # noqa: E402
from variants import VARIANTS  # noqa: E402

SHAPES = [("llama", 2048, 4096, 128256), ("qwen", 1536, 896, 151936), ("gemma", 1024, 2304, 256000)]
LOG2_E = 1.4426950408889634


def launch(variant, t, rows, d, v):
    x, w, e, target, ref, flag, sums, found = (t[k] for k in ("x", "w", "e", "target", "ref", "flag", "sums", "found"))
    c = variant.constexprs
    tiles = -(-rows // c["BLOCK_N"]) * -(-v // c["BLOCK_V"])
    options = dict(variant.options)
    if os.environ.get("ARCH", "sm80"):
        options["arch"] = os.environ.get("ARCH", "sm80")
    if variant.kind in ("production", "ampere"):
        from core_triton import ampere_logits
        from core_triton import kernels as production

        kernel = (production if variant.kind == "production" else ampere_logits).exponentials_kernel
        return kernel[(min(tiles, variant.programs or tiles),)](
            x, x.stride(0), w, w.stride(0), e, e.stride(0), None, target, ref, flag, sums, None, found, 0, rows, d, v,
            1.0, 1.0, **c, **options,
        )  # fmt: skip
    kernel = K.tile_kernel if variant.kind == "triton" else K.gluon_kernel
    return kernel[(tiles,)](
        x, x.stride(0), w, w.stride(0), e, e.stride(0), target, ref, flag, sums, found, 0, rows, d, v, 1.0, **c,
        **options,
    )  # fmt: skip


def tensors(rows, d, v, dev="cuda"):
    g = torch.Generator(device=dev).manual_seed(0)
    x = torch.randn(rows, d, generator=g, device=dev, dtype=torch.bfloat16)
    w = torch.randn(v, d, generator=g, device=dev, dtype=torch.bfloat16) * d**-0.5
    target = torch.randint(0, v, (rows,), generator=g, device=dev)
    target_logit = (x.float() * w[target].float()).sum(1)
    ref = torch.floor(target_logit * LOG2_E)
    t = dict(x=x, w=w, target=target, ref=ref, target_logit=target_logit)
    t["e"] = torch.empty(rows, -(-v // 64) * 64, device=dev, dtype=torch.bfloat16)
    t["flag"] = torch.zeros(-(-rows // 64), dtype=torch.int32, device=dev)
    t["sums"] = torch.empty(-(-v // 64) * rows, device=dev)
    t["found"] = torch.empty(rows, device=dev)
    # The reference: 64 rows, all classes, in float32.
    t["chosen"] = torch.randperm(rows, generator=g, device=dev)[:64]
    t["chosen"][0], t["chosen"][1] = 0, rows - 1
    t["exact"] = torch.empty(64, v, device=dev)
    for start in range(0, v, 16384):
        part = slice(start, min(v, start + 16384))
        logits = x[t["chosen"]].float() @ w[part].float().T
        t["exact"][:, part] = torch.exp2(logits * LOG2_E - ref[t["chosen"], None])
    return t


def check(variant, t, rows, v):
    blocks = -(-v // variant.constexprs["BLOCK_V"])
    chosen, exact = t["chosen"], t["exact"]
    sums = t["sums"][: blocks * rows].view(blocks, rows).sum(0)[chosen]
    e = t["e"][chosen][:, :v].float()
    errors = {
        "e": float((e - exact).norm() / exact.norm()),
        "e max": float(((e - exact).abs() / exact).max()),
        "sum": float(((sums - exact.sum(1)) / exact.sum(1)).abs().max()),
        "target": float((t["found"] - t["target_logit"]).abs().max()),
        "flags": float(t["flag"].sum()),
    }
    good = errors["e"] < 4e-3 and errors["e max"] < 6e-3 and errors["sum"] < 1e-3 and errors["target"] < 1e-2 and errors["flags"] == 0
    return good, " ".join(f"{k} {x:.1e}" for k, x in errors.items())


def time_of(run, warm=0.3, calls=15):
    torch.cuda.synchronize()
    end = time.perf_counter() + warm
    n = 0
    while time.perf_counter() < end:
        run()
        n += 1
        if n % 4 == 0:
            torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for a, b in events:
        a.record()
        run()
        b.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[calls // 2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--began", type=float, default=time.time())
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    jobs = [(shape, variant) for shape in SHAPES for variant in [None, *VARIANTS]]
    broken, t, current = set(), None, None
    for number, (shape, variant) in enumerate(jobs):
        if number < args.first:
            continue
        left = args.seconds - (time.time() - args.began)
        name, rows, d, v = shape
        label = f"{name:6s} {'cuBLAS sm_80' if variant is None else variant.name:40s}"
        if left < 2:
            print(f"{label} no time left", flush=True)
            continue
        if variant is not None and (variant.name in broken or (variant.only and name not in variant.only)):
            continue
        try:
            if current != shape:
                t = None
                t, current = tensors(rows, d, v), shape
            flops = 2.0 * rows * d * v
            if variant is None:
                from benchmarks import sm80

                sm80.SEARCH_SECONDS = 2.0
                chooser = sm80.Chooser() if not hasattr(main, "chooser") else main.chooser
                main.chooser = chooser
                result = t["e"][:, :v]
                a, b = t["x"], t["w"].T
                chooser.matmul(result, a, b, adds=False)
                ms = time_of(lambda: chooser.matmul(result, a, b, adds=False))
                print(f"{label} {ms:8.3f} ms {flops / ms * 1e-9:6.1f} TFLOP/s", flush=True)
                continue
            for k in ("e", "sums", "found"):
                t[k].fill_(float("nan"))
            t["flag"].zero_()
            start = time.perf_counter()
            compiled = launch(variant, t, rows, d, v)
            torch.cuda.synchronize()
            compiling = time.perf_counter() - start
            good, errors = check(variant, t, rows, v)
            ms = time_of(lambda: launch(variant, t, rows, d, v))
            print(
                f"{label} {ms:8.3f} ms {flops / ms * 1e-9:6.1f} TFLOP/s  {'' if good else 'WRONG '}({errors}) "
                f"regs {compiled.n_regs} spills {compiled.n_spills} smem {compiled.metadata.shared} "
                f"first call {compiling:.1f} s",
                flush=True,
            )
            if not good:
                broken.add(variant.name)
        except Exception as error:
            print(f"{label} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc(limit=3, file=sys.stdout)
            sys.stdout.flush()
            broken.add(variant.name if variant else "cuBLAS")
            try:
                torch.cuda.synchronize()
                torch.zeros(1, device="cuda").item()
            except Exception:
                print("the CUDA context is broken: restarts", flush=True)
                path = str(Path(__file__).resolve())
                os.execv(
                    sys.executable,
                    [sys.executable, path, "--seconds", str(args.seconds), "--began", str(args.began), "--first",
                     str(number + 1)],
                )  # fmt: skip
    print(f"{time.time() - args.began:.0f} s in total")


if __name__ == "__main__":
    main()
