"""`python -m aot_lora` is the command line."""

from aot_lora.cli.main import main

if __name__ == "__main__":
    main()
