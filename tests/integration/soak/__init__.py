"""Random faults in random worlds, for as long as asked. See ci/soak."""
