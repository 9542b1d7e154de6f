"""The harness: resolve a configuration, evaluate every system, publish tables and figures."""
