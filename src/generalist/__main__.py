"""What `python -m generalist` and the command `generalist` run: the command line."""

import signal


def main() -> None:
    """Ctrl-C before the command line is there ends the process at once, and without a traceback of its imports."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from generalist.cli import main as run

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
