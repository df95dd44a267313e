"""Work that other processes do: it travels as data and importable names."""
