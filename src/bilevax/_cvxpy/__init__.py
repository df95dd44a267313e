"""Models that were written in cvxpy, as problems. cvxpy is imported on demand."""

from .problem import from_cvxpy as from_cvxpy
