"""``python -m modelmill`` is the ``modelmill`` command."""

from modelmill.cli.main import main

main()
