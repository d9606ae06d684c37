"""The command line: `python -m distap COMMAND ...`."""

from distap.cli import main

if __name__ == "__main__":
    main()
