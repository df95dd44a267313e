"""How calls become programs: stages, NumPy or JAX, compilation, room for it."""
