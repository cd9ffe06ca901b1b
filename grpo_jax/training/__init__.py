"""The train step, and what drives it: experience, metrics, budgets, runs."""
