"""The entry point of `python -m generalist` and of the command `generalist`."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C before it is loaded ends the process at once, without a traceback of its imports."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from generalist.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
