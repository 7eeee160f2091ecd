"""What accelerators need: agreements that run ahead of their streams, and copies through the host's memory."""
