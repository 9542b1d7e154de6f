"""Adapters that run the peers themselves: Megatron-Core and Tutel, on our weights and data.

The planners beside this package imitate the schedules of these systems; what is
here runs their own code. Both are optional: importing this package loads neither
them nor torch.
"""
