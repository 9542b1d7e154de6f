"""Plans: what runs where and in which order, as data that can be drawn, verified, simulated and executed."""
