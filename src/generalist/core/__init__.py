"""What everything else stands on: errors, options, registries, schedules, randomness, files, the run directory."""
