"""Devices, the table of GPUs, and what is installed: everything about the machine that a run is started on."""
