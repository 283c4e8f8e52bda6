"""What the Mosaic kernels for Hopper share: layouts of shared memory and registers, and the size of the card."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROW = plgpu.Layout.WGMMA.reduce(1)  # one value for each row of a product's accumulator
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one for each column

MULTIPROCESSORS = 132  # of an H100 SXM and an H200: what is compiled for where there is no card to ask


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def padded(classes: int) -> int:
    """Returns how many columns an (n, classes) array of 16 bits gets, so that TMA can cut it into tiles."""
    return cdiv(classes, 64) * 64


def transforms(columns: int, itemsize: int = 2) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Returns the layout in shared memory of an array whose minor axis has so many columns, as TMA and wgmma want."""
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def rows_of_64(shape: tuple[int, ...], dtype: Any, *, interpreted: bool) -> Any:
    """Returns shared memory for rows of 64 numbers of 16 bits, (*shape, 64), as TMA moves them and as wgmma wants them.

    The same bytes, whole rows of 128 swizzled bytes; but TMA refuses to cut an array into the tiles of 8 x 64 that
    wgmma names where they do not divide it, or where a copy starts at a row that is no multiple of 8. So there are two
    views of them, which `views` returns. The interpreter knows neither such a limit nor two views of the same memory.
    """
    tiled = plgpu.SMEM((*shape, 64), dtype, transforms=transforms(64))
    if interpreted:
        return tiled
    return plgpu.RefUnion(plgpu.SMEM((*shape, 64), dtype, transforms=transforms(64)[1:]), tiled)


def views(ref: Any, *, interpreted: bool) -> tuple[Any, Any]:
    """Returns what TMA and what wgmma and registers take of `rows_of_64`."""
    return (ref, ref) if interpreted else tuple(ref)


def programs() -> int:
    """Returns how many persistent programs fill the card."""
    try:
        return jax.local_devices(backend="gpu")[0].core_count
    except RuntimeError:
        return MULTIPROCESSORS
