"""Megatron-Core itself as a baseline: GPTModel, all-to-all dispatcher, schedules, DDP, distributed optimizer.

Read in this order: `model.py` (which models, which configuration), `weights.py` (our
names to its storage), `schedule.py` (a training step), `recorder.py` (what ran when),
`compat.py` (what CPU needs). Needs the extra `megatron`; nothing is loaded here.
"""
