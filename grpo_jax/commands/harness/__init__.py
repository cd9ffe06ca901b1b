"""What the commands and the experiments share: flags, settings, runs, figures."""
