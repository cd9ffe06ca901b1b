"""Runs (host): chunks of train steps until budgets are spent, evaluations, processes, memory, compiled programs."""
