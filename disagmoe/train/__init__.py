"""The trainer's command line: `python -m disagmoe.train model=tiny steps=20`.

Decides how a training run is described and started; the training itself is in
`disagmoe.runtime`.
"""
