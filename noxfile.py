"""The tests on each Python, with the oldest of all that settings.ini allows, with the oldest transformers and with the newest of all: `nox`

An environment each in `.nox`, with the package installed as a user would; PIP_EXTRA_INDEX_URL names another source of torch."""

from pathlib import Path

import nox

LOWEST = "uv pip compile -q --resolution=lowest-direct --extra=dev setup.py".split()


@nox.session
@nox.parametrize("python,oldest", [("3.11", "all"), ("3.12", "transformers==5.17.*"), ("3.13", "")])
def tests(session, oldest):
    given = [oldest] if oldest else []
    if oldest == "all":
        given = ["-c", str(Path(session.virtualenv.location) / "lowest.txt")]
        session.install("uv")
        session.run(*LOWEST, f"--python-version={session.python}", "-o", given[1])
    session.install(*given, ".[dev]")
    safe = dict(PYTHONSAFEPATH="1")  # the package is the installed one
    session.run("python", "-m", "pytest", "-q", *(session.posargs or ["tests"]), env=safe)
