"""Lower-level constraint sets: polyhedra that move with `x`, boxes, simplices.

All of them are `{y : A y + B x <= b, A_eq y + B_eq x = b_eq}`; inequality rows come
first wherever rows are listed, equality rows last.
"""

from .base import (
    AbstractConstraints as AbstractConstraints,
    as_float as as_float,
    check_like as check_like,
    check_not_empty as check_not_empty,
    tree_as_float as tree_as_float,
)
from .box import Box as Box
from .intersection import Intersection as Intersection
from .layout import Layout as Layout
from .moving import is_function as is_function
from .nonempty import check_box as check_box, check_polyhedron as check_polyhedron
from .polyhedron import Polyhedron as Polyhedron
from .simplex import Simplex as Simplex
from .sparse import (
    SparseMatrix as SparseMatrix,
    csr_of as csr_of,
    is_sparse as is_sparse,
)
