"""The tests on each Python, with the oldest torch and transformers that settings.ini allows and with the newest: `nox`

An environment each in `.nox`, with the package installed as a user would; PIP_EXTRA_INDEX_URL names another source of torch."""

import nox

OLD = "torch==2.11.*", "transformers==5.17.*"


@nox.session
@nox.parametrize("python,oldest", [("3.11", OLD), ("3.12", OLD[1:]), ("3.13", ())])
def tests(session, oldest):
    session.install(*oldest, ".[dev]")
    safe = dict(PYTHONSAFEPATH="1")  # the package is the installed one
    session.run("python", "-m", "pytest", "-q", *(session.posargs or ["tests"]), env=safe)
