"""The comparison of the two frameworks with the reference and with each other: cases, tolerances and backends.

A command of the checkout, `python -m parity`: nothing imports it at run time, and the wheel does not contain it.
"""
