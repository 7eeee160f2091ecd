"""What the ranks do and how long it takes: timeline, report, dump on a stall, and the commands that show them."""
