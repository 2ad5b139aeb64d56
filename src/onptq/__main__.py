"""`python -m onptq`, and `torchrun -m onptq`: the command line."""

from onptq.cli import main

if __name__ == "__main__":
    main()
