"""The process that asks the function of a source for its rows once more, as each process of a run
does.

    python -m midflight.run.launcher.checks.rows_again ENTRY OPTION

It reads the arguments of the function as JSON from standard input and writes a `RowsSample` to
standard output, or a text if the function gives no rows this time.
"""

import os
import sys

import msgspec

from midflight.environments.rows import rows_of_entry, sample_of
from midflight.errors import ConfigError
from midflight.run.launcher.trial import trying


def main() -> None:
    with trying() as trial:
        entry, option = sys.argv[1:]
        arguments = msgspec.json.decode(sys.stdin.buffer.read())
        try:
            said = sample_of(rows_of_entry(entry, arguments, option=option))
        except ConfigError as error:
            said = str(error)
        trial.answer(msgspec.json.encode(said))


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of the user's modules are not waited for
