"""The studies behind the results pages, each `python -m experiments.NAME` from a clone."""
