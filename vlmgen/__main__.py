"""`python -m vlmgen` equals `vlmgen`."""

from vlmgen.cli import main

if __name__ == "__main__":
    main()
