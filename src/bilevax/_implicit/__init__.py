"""`F`, its gradient, and where it exists."""
