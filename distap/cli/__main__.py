"""Run a command on several ranks: `torchrun -m distap.cli COMMAND ...`."""

from distap.cli import main

if __name__ == "__main__":
    main()
