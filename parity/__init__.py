"""The contract of the loss: its meaning, its float64 reference, its cases and tolerances. Imports NumPy only."""
