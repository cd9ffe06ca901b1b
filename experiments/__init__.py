"""Scripts, each `python -m experiments.NAME`: parse, call the library, print, plot."""
