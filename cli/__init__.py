"""Command line: one thin file a command. Knows core and transport; nothing imports it."""

if __name__ != "pdctl.cli":
    # Two copies of one module would mean two copies of every enum and lock.
    raise ImportError(f"import this package as pdctl.cli, not as {__name__}")
