"""The shared-memory segment: layout, lock, rows, block pool, recovery. Knows neither torch nor core."""

if __name__ != "pdctl.transport":
    # Two copies of one module would mean two copies of every enum and lock.
    raise ImportError(f"import this package as pdctl.transport, not as {__name__}")
