"""Arguments that limit the command ``bandmaster`` to the groups of this process, as other tests run beside it."""

import os

MINE = ("--controller", str(os.getpid()))
