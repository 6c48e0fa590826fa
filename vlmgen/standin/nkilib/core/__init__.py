"""Enums of the kernel library, grouped as the library groups them."""
