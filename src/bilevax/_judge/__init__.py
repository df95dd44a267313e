"""What a point is worth: stationarity and the assumptions of the theory."""
