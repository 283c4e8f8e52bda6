"""Tests the reports of `range_report` without kernels. Kernels add to them in test_core_triton_interpreted.py."""

import torch

from core_triton import range_report, ranges


def add(blocks: int, repaired: int) -> None:
    report = ranges.current()
    assert report is not None
    flag = torch.zeros(1, blocks, dtype=torch.int32)
    flag[0, :repaired] = 1
    shift = torch.tensor([0.0, 1.0, 2.0])
    report.add(flag, shift, torch.tensor(2, dtype=torch.int32))


def test_a_report_has_the_calls_of_the_reports_within_it() -> None:
    with range_report() as outer:
        add(3, 1)
        with range_report() as inner:
            add(5, 2)
        add(7, 0)
    assert (inner.blocks, inner.repaired_blocks, inner.rows, inner.shifted_rows) == (5, 2, 2, 1)
    assert (outer.blocks, outer.repaired_blocks, outer.rows, outer.shifted_rows) == (15, 3, 6, 3)
    assert ranges.current() is None
