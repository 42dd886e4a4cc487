"""`python -m csda`."""

from csda.cli import main

if __name__ == "__main__":
    main()
