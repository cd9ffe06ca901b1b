"""What a run is: its fields, their checks, and an update tried on shapes only."""
