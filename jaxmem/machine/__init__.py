"""The machine: devices, the table of GPUs, and what is installed."""
