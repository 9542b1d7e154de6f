"""Megatron-Core itself as a baseline: GPTModel, all-to-all dispatcher, schedules, DDP, distributed optimizer.

Read in this order: `shape.py` (what is run on which ranks), `model.py` (the configuration), `weights.py` (our
names to its storage), `schedule.py` (a training step), `recorder.py` (what ran when),
`compat.py` (what CPU needs). Needs the extra `megatron`; nothing is loaded here.
"""
