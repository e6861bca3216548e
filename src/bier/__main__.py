"""`python -m bier`, and the command `bier`."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from bier.cli import main as run
    except KeyboardInterrupt:  # while Python reads the commands
        sys.stderr.write("bier: interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":  # the server's worker processes import this file under another name
    main()
