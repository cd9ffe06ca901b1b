"""Policies in environments: where rollouts start, and one scan over their steps."""
