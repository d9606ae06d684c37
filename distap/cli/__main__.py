"""`torchrun -m distap.cli COMMAND ...`: a command on several ranks."""

from distap.cli import main

if __name__ == "__main__":
    main()
