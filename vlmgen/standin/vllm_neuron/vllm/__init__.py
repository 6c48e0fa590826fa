"""The parts of the plugin that run inside a vLLM engine."""
