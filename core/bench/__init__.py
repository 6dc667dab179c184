"""`pdctl bench`: load, measure, compare, report. What measures servers knows them by their URL alone; never cli."""

if __name__ != "pdctl.core.bench":
    # Two copies of one module would mean two copies of every record it keeps.
    raise ImportError(f"import this package as pdctl.core.bench, not as {__name__}")
