"""Fair comparisons: rows first; curves, tables, figures and a page from rows."""
