"""Host: what keeps and watches a run: logbook, trackers, alarms, checkpoints."""
