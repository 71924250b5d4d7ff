"""Run the command line, as `python -m compiled_engine`."""

from compiled_engine.cli import main

if __name__ == "__main__":
    main()
