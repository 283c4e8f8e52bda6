"""The contract of the loss, which both frameworks implement: options and argument checks, the float64 reference, the
equations (`MATH.md`) and the chunk arithmetic. Imports NumPy only."""
