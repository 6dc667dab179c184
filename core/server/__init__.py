"""HTTP to rows and back, on one event loop that nothing holds up. Knows transport; never the engines, never cli."""

if __name__ != "pdctl.core.server":
    # Two copies of one module would mean two copies of every helper process.
    raise ImportError(f"import this package as pdctl.core.server, not as {__name__}")
