"""`python -m compiled_engine` is the command line."""

from compiled_engine.cli import main

if __name__ == "__main__":
    main()
