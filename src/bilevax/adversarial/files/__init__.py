"""Networks as files that other libraries read."""
