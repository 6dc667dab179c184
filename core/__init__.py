"""Engines, router, supervisor, models, status. Knows transport, never cli."""

if __name__ != "pdctl.core":
    # Two copies of one module would mean two copies of every enum and lock.
    raise ImportError(f"import this package as pdctl.core, not as {__name__}")
