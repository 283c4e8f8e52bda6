"""The benchmarks, the recorded results, and pictures made from them. how-to-measure.md says how to run them."""
