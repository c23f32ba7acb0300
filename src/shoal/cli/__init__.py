"""The command line: `shoal demo | new | run | dht | status | doctor | key | plan | debug`.

`app` has the command itself, and turns errors into exit codes. Each subcommand has a module of its own. Slow modules
(msgspec, asyncio, rich, the demo) are imported when a subcommand runs, so that `--help` answers at once. torch is never
imported.

=====  ================================================================
exit   meaning
=====  ================================================================
0      done
1      something failed: a peer that cannot be reached, a run that broke
2      an option, a file or an invite is wrong
3      `shoal status`: the run was not found
130    interrupted
=====  ================================================================
"""

from shoal.cli.app import main

__all__ = ["main"]
