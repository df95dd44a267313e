"""Methods that move `x`: one file each, one contract."""
