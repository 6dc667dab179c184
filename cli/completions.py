"""The shell completion scripts, as typer makes them: `python -m pdctl.cli.completions DIR` writes all three.

    pdctl.bash   source it, or put it into /usr/share/bash-completion/completions as `pdctl`
    _pdctl       zsh: into a directory of $fpath
    pdctl.fish   into ~/.config/fish/completions

The scripts ask `pdctl` itself for words, so they hold no command or option that could become outdated.
"""

from __future__ import annotations

import sys
from pathlib import Path

from typer.completion import get_completion_script  # type: ignore[attr-defined]

PROGRAM = "pdctl"
COMPLETE_VARIABLE = "_PDCTL_COMPLETE"
# Autoloaded from $fpath, the file is the function: its first run defines the real one, and must also call it.
_ZSH_FIRST_CALL = 'if [ "$funcstack[1]" = "_pdctl" ]; then _pdctl_completion "$@"; fi'
FILES = {"bash": "pdctl.bash", "zsh": "_pdctl", "fish": "pdctl.fish"}


def scripts() -> dict[str, str]:
    """Text of each script by its file's name."""
    made = {
        shell: get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell).rstrip("\n")
        for shell in FILES
    }
    made["zsh"] += f"\n{_ZSH_FIRST_CALL}"
    return {FILES[shell]: f"{text}\n" for shell, text in made.items()}


def write(directory: Path) -> list[Path]:
    """Write all scripts into a directory; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for file, text in scripts().items():
        path = directory / file
        path.write_text(text)
        written.append(path)
    return written


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m pdctl.cli.completions DIRECTORY")
    for path in write(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
