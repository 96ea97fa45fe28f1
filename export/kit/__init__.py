"""Scripts that a handoff folder carries. Each stands alone: standard library, NumPy, and the tool that it drives."""
