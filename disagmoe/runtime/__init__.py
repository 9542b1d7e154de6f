"""Plans run by real processes on torch.distributed: launcher, process groups and the token exchange.

Decides nothing itself. The layers, from below: `transport` moves slabs of rows
between ranks, `wire` puts a checked header before them and counts bytes, `merge`
says which rank passes a token's copies on to which, `route` turns the routing of
a micro-batch into index lists, `exchange` is dispatch and combine and their
backward, `lane` runs them beside compute, `groups` makes the process groups of a
Plan, `launch` starts the processes and ends them.
"""
