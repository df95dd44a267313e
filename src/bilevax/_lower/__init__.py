"""Lower-level solvers."""
