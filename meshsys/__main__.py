"""`python -m meshsys` is the `meshsys` command."""

from __future__ import annotations

from meshsys.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
