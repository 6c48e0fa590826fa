"""Engine-core side: the scheduler and its account of the encoder cache."""
