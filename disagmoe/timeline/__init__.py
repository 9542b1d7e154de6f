"""What ran when, where the time went, and the trace that shows it."""
