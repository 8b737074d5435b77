"""`python -m moeq`, where the script is not on the path."""

from moeq.cli.app import main

if __name__ == "__main__":
    main()
