"""Serving a generated package with vLLM: the server's command, a client, the machine's state."""
