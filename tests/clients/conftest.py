"What the checks of clients get from `.ci/clients`: where the server is, and what it serves."

import os

import pytest


@pytest.fixture(scope="session")
def url():
    return os.environ["BATCHLAB_URL"]


@pytest.fixture(scope="session")
def model():
    return os.environ["BATCHLAB_SERVED"]


@pytest.fixture(scope="session")
def folder():
    return os.environ["BATCHLAB_FOLDER"]


@pytest.fixture(scope="session")
def tools():
    return os.environ["BATCHLAB_TOOLS"] == "1"
