"""Compile a generated package without a device.

Every graph that the plugin's runner warms up goes through ``torch.export``, StableHLO and XLA for
CPU, runs, and is compared with the eager package and with Hugging Face.
"""
