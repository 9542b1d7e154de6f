"""Tutel itself as a baseline: its moe_layer inside our block (`model.py`), trained by expert and data parallelism
(`trainer.py`). Loads neither Tutel nor torch."""
