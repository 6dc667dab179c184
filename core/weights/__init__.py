"""Which model is served, from which bytes, and whether they are sound. Knows no clusters; no torch but where said."""

if __name__ != "pdctl.core.weights":
    # Two copies of one module would mean two copies of every record it keeps.
    raise ImportError(f"import this package as pdctl.core.weights, not as {__name__}")
