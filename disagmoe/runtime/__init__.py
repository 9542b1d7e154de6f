"""Plans run by real processes on torch.distributed: launcher, process groups, token exchange, executor, trainer.

Decides nothing itself. The layers, from below: `transport` moves slabs of rows
between ranks, `wire` puts a checked header before them and counts bytes, `merge`
says which rank passes a token's copies on to which, `route` turns the routing of
a micro-batch into index lists, `exchange` is dispatch and combine and their
backward, `lane` runs them beside compute, `groups` makes the process groups of a
Plan, `launch` starts the processes and ends them.

On top of these, `script` is one worker's part of a Program, `executor` runs it in
order, `holdings` are the parts of the model on one rank, `buckets` their flat
storage, and the modules ending in `_ops` say what each operation does with them;
`step` puts one rank together. `trainer` adds data, optimizer, logs and
checkpoints; `measured` turns what ran into a Timeline.
"""
