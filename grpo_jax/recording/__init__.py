"""Runs that are kept and watched (host): metrics, checkpoints, trackers, warnings, statistics over seeds."""
