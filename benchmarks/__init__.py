"""What was measured, how, and the recorded results with the pictures made from them. NOTES.md says how to run it."""
