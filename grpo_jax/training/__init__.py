"""The train step, its metrics and budgets, and checks that trace it."""
