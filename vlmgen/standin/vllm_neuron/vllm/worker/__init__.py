"""Worker side: the encoder cache and the sizes the runner derives."""
